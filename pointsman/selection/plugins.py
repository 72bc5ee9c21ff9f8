"""Plugin protocols, and what plugins work with: the cycle, typed keys, and rejections.

A cycle is one decision, and its state ends with it. State that must last longer belongs to the plugin object.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from pointsman.reasons import Reason
from pointsman.selection.columns import Column, Positions, Roster

if TYPE_CHECKING:
    from pointsman.selection.profile import ProfileResults, Ranked
    from pointsman.selection.scheduler import SchedulingFailure, SchedulingResult
    from pointsman.selection.trace import Trace


# Random choices: one generator per decision, so that a decision can be repeated


T = TypeVar("T")

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_UNIT = 2.0**-53


def mixed(seed: int, salt: int) -> int:
    """A 64-bit seed from two numbers, well spread even for 0, 1, 2..."""
    return _spread(seed + (salt + 1) * _STEP)


def _spread(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class SplitMix64:
    """A small random generator. Seeding `random.Random` instead would take a quarter of a scheduling cycle."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed

    def random(self) -> float:
        """A uniform number in [0, 1)."""
        self._state += _STEP
        return (_spread(self._state) >> 11) * _UNIT

    def below(self, n: int) -> int:
        """A uniform number in 0..n-1."""
        return int(self.random() * n)

    def shuffled(self, items: Iterable[T]) -> list[T]:
        shuffled = list(items)
        for last in range(len(shuffled) - 1, 0, -1):
            other = self.below(last + 1)
            shuffled[last], shuffled[other] = shuffled[other], shuffled[last]
        return shuffled


C = TypeVar("C")
R = TypeVar("R")


class Key(Generic[T]):
    """Names a value of type T in a cycle's state. Two keys are never equal, even with the same name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Key({self.name!r})"


class Cycle(msgspec.Struct, Generic[R], eq=False):
    """One decision: the request, the time, the seed, and what plugins pass to each other."""

    request: R
    now: float = 0.0
    seed: int = 0
    trace: "Trace | None" = None
    """Collects everything that the cycle considers; None if nothing is collected."""
    _rng: SplitMix64 | None = None
    state: dict[Key[Any], Any] = {}
    """Values that plugins pass to each other; `cycle[key]` and `cycle.get(key)` are typed."""

    @property
    def rng(self) -> SplitMix64:
        """The generator for every random choice: a cycle with the same seed decides the same."""
        if self._rng is None:
            self._rng = SplitMix64(self.seed)
        return self._rng

    def __setitem__(self, key: Key[T], value: T) -> None:
        self.state[key] = value

    def __getitem__(self, key: Key[T]) -> T:
        value: T = self.state[key]
        return value

    def get(self, key: Key[T]) -> T | None:
        """The value under this key; None if there is none."""
        return self.state.get(key)


class Rejected(Iterable[tuple[C, Reason]], Generic[C]):
    """Candidates that a filter rejects, all with the same reason code. Reasons are made when they are read.

    Each fact is a column, with one value per candidate, or one value for all candidates:
    `Rejected(roster, positions, "full", load=load, limit=limit)`. Columns are copied at once, so that the reasons stay
    true when the columns change.
    """

    __slots__ = ("_facts", "_rows", "_whole", "code", "positions")

    def __init__(self, candidates: Roster[C], positions: Positions, code: str, **facts: Any) -> None:
        # Members and rows, not the roster: a rejection that is kept must not keep the columns alive.
        self._whole, self._rows = candidates.whole, candidates.rows
        self.positions = positions
        self.code = code
        self._facts = {name: fact if isinstance(fact, _VALUES) else fact.copy() for name, fact in facts.items()}

    def candidate(self, position: int) -> C:
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
"""Types of facts that are not columns. Checking for `np.ndarray` instead would load numpy."""


class RejectedEach(Rejected[C]):
    """Candidates that a filter rejects, each with its own reason. `why` makes a reason when it is read."""

    __slots__ = ("_why",)

    def __init__(self, candidates: Roster[C], positions: Positions, why: Callable[[C], Reason]) -> None:
        super().__init__(candidates, positions, "")
        self._why = why

    def all_of(self, codes: Set[str]) -> bool:
        return all(reason.code in codes for _, reason in self)

    def _reason(self, position: int) -> Reason:
        return self._why(self.candidate(position))


# The protocols. A class has every role whose method it has; it need not inherit from them.


@runtime_checkable
class Producer(Protocol[C]):
    """Prepares facts about the candidates for one cycle, before any profile runs."""

    def produce(self, cycle: Cycle[Any], candidates: Roster[C]) -> None:
        """Put facts into the cycle. An exception is noted in the trace, and the cycle continues without them."""
        ...


@runtime_checkable
class Filter(Protocol[C]):
    """Names the candidates to remove and why; the kernel removes them."""

    def rejections(self, cycle: Cycle[Any], candidates: Roster[C]) -> Iterable[tuple[C, Reason | str]]:
        """Candidates that must not be chosen, each with a reason. A text becomes a reason whose code is the filter's
        name. Summaries count by code, so a filter with several kinds of reasons should return `Reason`s."""
        ...


@runtime_checkable
class Gate(Protocol[C]):
    """A group of filters with a fast check for the case in which no filter rejects a candidate."""

    @property
    def filters(self) -> Sequence[Filter[C]]: ...

    def lets_all_pass(self, cycle: Cycle[Any], candidates: Roster[C]) -> bool:
        """True only if no filter would reject any candidate. If it returns False, each filter runs."""
        ...


@runtime_checkable
class Scorer(Protocol[C]):
    """Scores each candidate. Weights belong to the profile, not to the scorer.

    A class attribute `bounded = True` promises that all scores are within [0, 1]; the kernel does not check them.
    `steady = True` promises that scores depend on measurements alone, not on the request or on what was sent. The
    kernel then calls the scorer only once per measurement.
    """

    def scores(self, cycle: Cycle[Any], candidates: Roster[C]) -> Sequence[float] | Column:
        """One value in [0, 1] per candidate, in their order."""
        ...


@runtime_checkable
class Picker(Protocol[C]):
    """Chooses among the remaining candidates."""

    def pick(self, cycle: Cycle[Any], ranked: "Ranked[C]") -> Sequence[C]:
        """At least one candidate, best first. `ranked` iterates over `Scored` candidates, best first."""
        ...


@runtime_checkable
class ProfileHandler(Protocol[C]):
    """Decides which profiles run, and combines their results into one."""

    def pick_profiles(self, cycle: Cycle[Any], profiles: Sequence[str], results: "ProfileResults[C]") -> Sequence[str]:
        """The profiles to run next, given all results so far, failures included. An empty result ends the cycle."""
        ...

    def process_results(
        self, cycle: Cycle[Any], results: "ProfileResults[C]"
    ) -> "SchedulingResult[C] | SchedulingFailure[C]":
        """The result of the cycle."""
        ...


@cache
def kebab_case(name: str) -> str:
    """QueueScorer -> queue-scorer."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def plugin_name(plugin: object) -> str:
    """A plugin's name in traces: its class in kebab case, which is also its type in configuration."""
    return kebab_case(type(plugin).__name__)
