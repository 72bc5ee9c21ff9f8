"""What a plugin may be, and what it is handed: the protocols of the kernel, the cycle, and typed keys.

A cycle is one decision. Its state ends with it; what a plugin wants to remember longer it keeps in itself.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from pointsman.reasons import Reason
from pointsman.selection.chance import Chance
from pointsman.selection.columns import Column, Positions
from pointsman.selection.roster import Roster

if TYPE_CHECKING:
    from pointsman.selection.profile import ProfileFailure, ProfileResult, Ranked
    from pointsman.selection.scheduler import SchedulingFailure, SchedulingResult
    from pointsman.selection.trace import Trace

C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")


class Key(Generic[T]):
    """Names a value of type T in a cycle's state. Two keys are never the same, whatever their names."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Key({self.name!r})"


class Cycle(msgspec.Struct, Generic[R], eq=False):
    """One decision under way: for whom, when, with which dice, and what plugins have told each other so far."""

    request: R
    now: float = 0.0
    seed: int = 0
    trace: "Trace | None" = None
    """Filled with everything that was considered, if there is one."""
    _chance: Chance | None = None
    state: dict[Key[Any], Any] = {}
    """What plugins have told each other; `cycle[key]` and `cycle.get(key)` know its types."""

    @property
    def chance(self) -> Chance:
        """The dice of this cycle. Every random choice uses them, so that a cycle with the same seed repeats."""
        if self._chance is None:
            self._chance = Chance(self.seed)
        return self._chance

    def __setitem__(self, key: Key[T], value: T) -> None:
        self.state[key] = value

    def __getitem__(self, key: Key[T]) -> T:
        value: T = self.state[key]
        return value

    def get(self, key: Key[T]) -> T | None:
        """The value under this key, or None if nobody has put one there."""
        return self.state.get(key)


class Rejected(Iterable[tuple[C, Reason]], Generic[C]):
    """Candidates that a filter rejects, all with the same reason code. The reasons are made when they are read.

    A fact is a column (a list or an array: each candidate has its own value) or one value for all of them:
    `Rejected(roster, positions, "full", load=load, limit=limit)`. Columns are copied now, so that the reason stays
    true when they change.
    """

    __slots__ = ("_facts", "_rows", "_whole", "code", "positions")

    def __init__(self, candidates: Roster[C], positions: Positions, code: str, **facts: Any) -> None:
        # Members and rows, not the roster: a kept rejection must not keep the columns alive.
        self._whole, self._rows = candidates.whole, candidates.rows
        self.positions = positions
        self.code = code
        self._facts = {name: fact if isinstance(fact, _VALUES) else fact.copy() for name, fact in facts.items()}

    def candidate(self, position: int) -> C:
        """The candidate at this position of the roster."""
        return self._whole[position if self._rows is None else self._rows[position]]

    def all_of(self, codes: Set[str]) -> bool:
        """Whether every candidate is rejected with one of these codes."""
        return self.code in codes

    def _reason(self, position: int) -> Reason:
        facts = self._facts.items()
        return Reason(self.code, {name: f if isinstance(f, _VALUES) else float(f[position]) for name, f in facts})

    def __iter__(self) -> Iterator[tuple[C, Reason]]:
        return ((self.candidate(position), self._reason(position)) for position in self.positions)

    def __len__(self) -> int:
        return len(self.positions)


_VALUES = (str, int, float, tuple, dict, type(None))
"""Facts that are no columns. Asking for `np.ndarray` instead would load numpy."""


class RejectedEach(Rejected[C]):
    """Candidates with a reason of their own each, worked out by `why` when it is read."""

    __slots__ = ("_why",)

    def __init__(self, candidates: Roster[C], positions: Positions, why: Callable[[C], Reason]) -> None:
        super().__init__(candidates, positions, "")
        self._why = why

    def all_of(self, codes: Set[str]) -> bool:
        return all(reason.code in codes for _, reason in self)

    def _reason(self, position: int) -> Reason:
        return self._why(self.candidate(position))


# The protocols. A class fills every role whose method it has; it need not inherit from anything here.


@runtime_checkable
class Producer(Protocol[C]):
    """Prepares facts about the candidates for one cycle, before any profile runs."""

    def produce(self, cycle: Cycle[Any], candidates: Roster[C]) -> None:
        """Put what was found into the cycle. An exception is noted in the trace; the cycle goes on without."""
        ...


@runtime_checkable
class Filter(Protocol[C]):
    """Names the candidates to remove and why; the kernel removes them."""

    def rejections(self, cycle: Cycle[Any], candidates: Roster[C]) -> Iterable[tuple[C, Reason | str]]:
        """Candidates that must not be chosen, each with a reason. Text becomes a reason whose code is the filter's
        name. Summaries count by code: a filter with several kinds of reasons returns `Reason`s."""
        ...


@runtime_checkable
class Gate(Protocol[C]):
    """Filters that stand together and know at a glance when none of them would turn anybody away."""

    @property
    def filters(self) -> Sequence[Filter[C]]: ...

    def lets_all_pass(self, cycle: Cycle[Any], candidates: Roster[C]) -> bool:
        """Whether nobody would be rejected. False is always right: then each filter is asked."""
        ...


@runtime_checkable
class Scorer(Protocol[C]):
    """Says how good each candidate is. Weights belong to the profile, not to the scorer.

    A scorer with a class attribute `bounded = True` promises that its scores are within [0, 1] by construction; the
    kernel does not look at each of them then. One with `steady = True` promises that they follow from measurements
    alone, whatever the request and whatever has been sent: the kernel asks it again only after the next measurement.
    """

    def scores(self, cycle: Cycle[Any], candidates: Roster[C]) -> Sequence[float] | Column:
        """One value in [0, 1] per candidate, in their order."""
        ...


@runtime_checkable
class Picker(Protocol[C]):
    """Makes the choice among those who are left."""

    def pick(self, cycle: Cycle[Any], ranked: "Ranked[C]") -> Sequence[C]:
        """At least one of them, best first. `ranked` iterates over `Scored` candidates, best first."""
        ...


@runtime_checkable
class ProfileHandler(Protocol[C]):
    """Decides which profiles run, and what their results mean."""

    def pick_profiles(
        self,
        cycle: Cycle[Any],
        profiles: Sequence[str],
        results: "Mapping[str, ProfileResult[C] | ProfileFailure[C]]",
    ) -> Sequence[str]:
        """Profiles to run next, given the results so far (also failed ones). Empty ends the cycle."""
        ...

    def process_results(
        self, cycle: Cycle[Any], results: "Mapping[str, ProfileResult[C] | ProfileFailure[C]]"
    ) -> "SchedulingResult[C] | SchedulingFailure[C]":
        """What the whole cycle came to."""
        ...


def kebab_case(name: str) -> str:
    """QueueScorer -> queue-scorer."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def plugin_name(plugin: object) -> str:
    """What a plugin is called in traces: its class in kebab case, which is also its type in configuration."""
    return kebab_case(type(plugin).__name__)
