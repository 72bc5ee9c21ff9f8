"""Labels of candidates: selectors in the form that Kubernetes uses, and one label read as a column.

Enters: what somebody demands of labels. Leaves: whether labels meet it and, if not, why in words.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

import msgspec

from pointsman.errors import did_you_mean
from pointsman.selection.arrays import np
from pointsman.selection.columns import Column, Positions, column_of, take
from pointsman.selection.plugins import Rejected
from pointsman.selection.roster import PerMembers, Roster

Labels: TypeAlias = Mapping[str, str]
Operator: TypeAlias = Literal["In", "NotIn", "Exists", "DoesNotExist"]


class Labelled(Protocol):
    """Anything that has labels."""

    @property
    def labels(self) -> Labels: ...


L = TypeVar("L", bound=Labelled)


class LabelExpression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One demand on one label. NotIn is also met by labels without the key."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ValueError unless the operator exists and has as many values as it needs."""
        operators = get_args(Operator)
        if self.operator not in operators:
            raise ValueError(f'operator "{self.operator}" is unknown{did_you_mean(self.operator, operators)}')
        if self.operator in ("In", "NotIn") and not self.values:
            raise ValueError(f'values of "{self.key}" are missing; operator {self.operator} needs at least one')
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            raise ValueError(
                f'values of "{self.key}" are {", ".join(self.values)}; operator {self.operator} takes none'
            )

    def mismatch(self, labels: Labels) -> str | None:
        """Why the labels do not meet this demand; None if they do."""
        found = labels.get(self.key)
        if self.operator == "DoesNotExist":
            return None if found is None else f"{self.key} is {found}, and must be absent"
        if self.operator == "NotIn":
            return f"{self.key} is {found}, which is excluded" if found in self.values else None
        if found is None:
            return f"{self.key} is absent"
        if self.operator == "Exists" or found in self.values:
            return None
        return f"{self.key} is {found}, not {' or '.join(self.values)}"


class LabelSelector:
    """All of some labels and expressions. The empty selector matches everything."""

    def __init__(self, match_labels: Labels | None = None, match_expressions: Sequence[LabelExpression] = ()) -> None:
        exact = [LabelExpression(key, "In", (value,)) for key, value in (match_labels or {}).items()]
        self.expressions = (*exact, *match_expressions)
        for expression in self.expressions:
            expression.check()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LabelSelector) and self.expressions == other.expressions

    def __hash__(self) -> int:
        return hash(self.expressions)

    def mismatch(self, labels: Labels) -> str | None:
        """The first demand that the labels do not meet, in words; None if they meet all."""
        for expression in self.expressions:
            why = expression.mismatch(labels)
            if why is not None:
                return why
        return None

    def matches(self, labels: Labels) -> bool:
        """Whether the labels meet every demand."""
        return self.mismatch(labels) is None


class LabelColumn(Generic[L]):
    """One label of the candidates as a column. Members are read once, until they change; each value is judged once."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._read = PerMembers(self._values_of)

    def judged(self, candidates: Roster[L], judge: Callable[[str | None], float]) -> Column:
        """What `judge` says of each candidate's value; None is no such label."""
        values, which = self._read.of(candidates)
        verdicts = column_of([judge(value) for value in values], candidates.arrays)
        return candidates.cut(take(verdicts, which))

    def _values_of(self, everybody: Roster[L]) -> tuple[list[str | None], Positions]:
        """The values that there are, and which of them each member has."""
        found = [member.labels.get(self.key) for member in everybody]
        values = list(dict.fromkeys(found))
        place_of = {value: place for place, value in enumerate(values)}
        which = [place_of[value] for value in found]
        return values, np.array(which, dtype=np.intp) if everybody.arrays else which


class RejectedForLabels(Rejected[L]):
    """Candidates that a filter turned away for their labels; `why` is asked when somebody reads the reasons."""

    __slots__ = ("_why",)

    def __init__(self, candidates: Roster[L], positions: Positions, why: Callable[[Labels], str]) -> None:
        super().__init__(candidates, positions, "")
        self._why = why

    def __iter__(self) -> Iterator[tuple[L, str]]:
        return ((who, self._why(who.labels)) for who in map(self.candidate, self.positions))
