"""Labels of candidates: selectors in the form that Kubernetes uses, and one label read as a column.

Enters: a demand on labels. Leaves: whether labels meet it and, if not, the facts of a reason.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

import msgspec

from pointsman.errors import did_you_mean
from pointsman.selection.arrays import np
from pointsman.selection.columns import Column, PerMembers, Positions, Roster, column_of, take

Labels: TypeAlias = Mapping[str, str]
Operator: TypeAlias = Literal["In", "NotIn", "Exists", "DoesNotExist"]


class Labelled(Protocol):
    """Anything that has labels."""

    @property
    def labels(self) -> Labels: ...


L = TypeVar("L", bound=Labelled)


class LabelExpression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One demand on one label. Labels without the key meet NotIn."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ValueError if the operator is unknown or has too few or too many values."""
        operators = get_args(Operator)
        if self.operator not in operators:
            raise ValueError(f'operator "{self.operator}" is unknown{did_you_mean(self.operator, operators)}')
        if self.operator in ("In", "NotIn") and not self.values:
            raise ValueError(f'values of "{self.key}" are missing; operator {self.operator} needs at least one')
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            raise ValueError(
                f'values of "{self.key}" are {", ".join(self.values)}; operator {self.operator} takes none'
            )

    def matches(self, labels: Labels) -> bool:
        found = labels.get(self.key)
        if self.operator == "DoesNotExist":
            return found is None
        if self.operator == "NotIn":
            return found not in self.values
        return found is not None and (self.operator == "Exists" or found in self.values)


class LabelSelector:
    """Labels and expressions that must all match. The empty selector matches everything."""

    def __init__(self, match_labels: Labels | None = None, match_expressions: Sequence[LabelExpression] = ()) -> None:
        exact = [LabelExpression(key, "In", (value,)) for key, value in (match_labels or {}).items()]
        self.expressions = (*exact, *match_expressions)
        for expression in self.expressions:
            expression.check()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LabelSelector) and self.expressions == other.expressions

    def __hash__(self) -> int:
        return hash(self.expressions)

    def mismatch(self, labels: Labels) -> dict[str, Any] | None:
        """The first demand that the labels do not meet and the value found, as facts of a reason; None if all match."""
        for one in self.expressions:
            if not one.matches(labels):
                return {"key": one.key, "found": labels.get(one.key), "operator": one.operator, "values": one.values}
        return None

    def matches(self, labels: Labels) -> bool:
        return all(expression.matches(labels) for expression in self.expressions)


class LabelColumn(Generic[L]):
    """One label of the candidates as a column. Labels are read once per set of members; `judge` is called once per
    distinct value."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._read = PerMembers(self._values_of)

    def judged(self, candidates: Roster[L], judge: Callable[[str | None], float]) -> Column:
        """For each candidate, what `judge` returns for its value, or for None if it does not have the label."""
        values, which = self._read.of(candidates)
        verdicts = column_of([judge(value) for value in values], candidates.arrays)
        return candidates.cut(take(verdicts, which))

    def _values_of(self, members: Roster[L]) -> tuple[list[str | None], Positions]:
        """The distinct values, and for each member the index of its value."""
        found = [member.labels.get(self.key) for member in members]
        values = list(dict.fromkeys(found))
        index_of = {value: index for index, value in enumerate(values)}
        which = [index_of[value] for value in found]
        return values, np.array(which, dtype=np.intp) if members.arrays else which
