"""A profile: filters, weighted scorers and one picker, run over the candidates of a cycle.

Enters: a cycle and a roster. Leaves: a result with the targets, or a failure with the reason for every candidate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

import msgspec

from pointsman.errors import ConfigError, PluginError
from pointsman.reasons import Reason, counted, reason_of
from pointsman.selection.arrays import np
from pointsman.selection.columns import Column, Roster, array, column_of, linear
from pointsman.selection.plugins import Cycle, Filter, Gate, Picker, Rejected, Scorer, plugin_name
from pointsman.selection.trace import ProfileTrace, Score

C = TypeVar("C")


class Scored(NamedTuple, Generic[C]):
    """A candidate and its weighted total."""

    candidate: C
    score: float


class Ranked(Sequence[Scored[C]], Generic[C]):
    """The candidates that passed the filters, with their totals: a sequence of `Scored`, best first.

    The sequence is sorted on first access. A picker that needs only the best candidate reads `totals`, which are not
    sorted.
    """

    __slots__ = ("_sorted", "candidates", "totals")

    def __init__(self, candidates: Roster[C], totals: Column) -> None:
        self.candidates = candidates
        self.totals = totals
        """One total per candidate, in the order of `candidates`."""
        self._sorted: list[Scored[C]] | None = None

    def _in_order(self) -> list[Scored[C]]:
        if self._sorted is None:
            pairs = map(Scored, self.candidates, map(float, self.totals))
            self._sorted = sorted(pairs, key=lambda scored: -scored.score)
        return self._sorted

    def __len__(self) -> int:
        return len(self.totals)

    def __iter__(self) -> Iterator[Scored[C]]:
        return iter(self._in_order())

    @overload
    def __getitem__(self, position: int) -> Scored[C]: ...
    @overload
    def __getitem__(self, position: slice) -> list[Scored[C]]: ...
    def __getitem__(self, position: int | slice) -> Scored[C] | list[Scored[C]]:
        return self._in_order()[position]


class ProfileResult(msgspec.Struct, Generic[C], eq=False):
    """The outcome of a profile that chose: its targets, best first, and all ranked candidates."""

    profile: str
    targets: Sequence[C]
    ranked: Ranked[C]


class ProfileFailure(Generic[C]):
    """The outcome of a profile that chose no candidate: what each filter rejected, and why."""

    __slots__ = ("considered", "profile", "stages")

    def __init__(self, profile: str, considered: int, stages: Sequence[tuple[str, Rejected[C]]]) -> None:
        self.profile = profile
        self.considered = considered
        self.stages = stages
        """(filter, what it rejected), in the order in which they ran."""

    @property
    def counts(self) -> dict[str, int]:
        """How many candidates each filter rejected."""
        return {name: len(rejected) for name, rejected in self.stages}

    def all_of(self, codes: Set[str]) -> bool:
        """Whether every candidate was rejected with one of these codes."""
        return all(rejected.all_of(codes) for _, rejected in self.stages)

    def reasons(self) -> list[tuple[C, str, Reason]]:
        """(candidate, filter, reason) for every candidate."""
        return [(candidate, name, reason) for name, rejected in self.stages for candidate, reason in rejected]

    def summary(self) -> dict[str, Any]:
        """The facts for the reason: how many candidates were rejected with each code."""
        rejected = counted((candidate, reason) for candidate, _, reason in self.reasons())
        return {"profile": self.profile, "candidates": self.considered, "rejected": rejected}

    def __str__(self) -> str:
        return str(none_chosen([self]))


ProfileResults: TypeAlias = Mapping[str, ProfileResult[C] | ProfileFailure[C]]
"""Results of one cycle, by the name of the profile."""


def none_chosen(failures: Iterable[ProfileFailure[Any]]) -> Reason:
    return Reason("none-chosen", {"profiles": [failure.summary() for failure in failures]})


class Weighted(NamedTuple):
    """A plugin in a profile, with its weight, and its name in this profile if that differs from its usual name."""

    plugin: object
    weight: float = 1.0
    name: str = ""


class Steady(NamedTuple, Generic[C]):
    """The scores from a profile's steady scorers, for these members and this measurement."""

    members: Sequence[C]
    stamp: int
    totals: Column | None
    scored: Sequence[Score]
    left: Sequence[int]
    """Indices of the scorers that run in every cycle."""


class Profile(Generic[C]):
    """Zero or more filters, zero or more scorers, exactly one picker.

    `Profile("fast", HasRoom(), (QueueScorer(), 2.0), MaxScorePicker())`: the default weight of a scorer is 1. A plugin
    has every role whose method it has. Filters run in the order given. A gate must be the first plugin.
    """

    def __init__(self, name: str, *plugins: object) -> None:
        self.name = name
        self.filters: list[tuple[str, Filter[C]]] = []
        self.scorers: list[tuple[str, Scorer[C], float, bool]] = []
        """(name, scorer, weight, whether it promises scores within [0, 1])"""
        pickers: list[tuple[str, Picker[C]]] = []
        self._gate: Gate[C] | None = None
        if plugins and hasattr(plugins[0], "lets_all_pass"):
            gate: Any = plugins[0]
            self._gate, plugins = gate, plugins[1:]
            self.filters += [(plugin_name(plugin), plugin) for plugin in gate.filters]
        behind = len(self.filters)
        for given in plugins:
            plugin, weight, called = given if isinstance(given, Weighted) else _weighted(given)
            called = called or plugin_name(plugin)
            role: Any = plugin  # `isinstance` with a protocol takes ten times as long
            if rejects := hasattr(plugin, "rejections"):
                self.filters.append((called, role))
            if rates := hasattr(plugin, "scores"):
                self.scorers.append((called, role, weight, getattr(plugin, "bounded", False)))
            if picks := hasattr(plugin, "pick"):
                pickers.append((called, role))
            if not (rejects or rates or picks):
                raise ConfigError([f'profile "{name}": {called} is neither a filter, a scorer nor a picker'])
        if len(pickers) != 1:
            found = ", ".join(called for called, _ in pickers) or "none"
            raise ConfigError([f'profile "{name}" needs exactly one picker, found: {found}'])
        [(self.picker_name, self.picker)] = pickers
        self._behind_gate = self.filters[behind:]
        indices = range(len(self.scorers))
        self._changing = [index for index in indices if not getattr(self.scorers[index][1], "steady", False)]
        self._nothing_steady: Steady[C] = Steady((), -1, None, (), indices)
        self._steady = self._nothing_steady

    def run(self, cycle: Cycle[Any], candidates: Roster[C]) -> ProfileResult[C] | ProfileFailure[C]:
        considered = left = len(candidates)
        trace = None
        if cycle.trace is not None:
            trace = ProfileTrace(self.name, considered)
            cycle.trace.profiles += (trace,)
        stages: list[tuple[str, Rejected[C]]] = []
        gate = self._gate
        open_gate = gate is not None and gate.lets_all_pass(cycle, candidates)
        for name, rejecting in self._behind_gate if open_gate else self.filters:
            if not left:
                break
            try:
                given = rejecting.rejections(cycle, candidates)
                rejected = _checked_rejections(name, candidates, given) if given else None
            except Exception as error:
                raise broken(name, error) from error
            if rejected is not None:
                stages.append((name, rejected))
                candidates = candidates.without(rejected.positions)
                left = len(candidates)
        if trace is not None:
            trace.stages = stages or ()
            trace.survivors = candidates.whole if candidates.rows is None else candidates.members()
        if not left:
            return ProfileFailure(self.name, considered, stages)
        ranked = Ranked(candidates, self._totals(cycle, candidates, trace))
        try:
            targets = self.picker.pick(cycle, ranked)
        except Exception as error:
            raise broken(self.picker_name, error) from error
        if not targets:
            raise PluginError(self.picker_name, "picked no candidate; a picker returns at least one")
        if trace is not None:
            trace.picker, trace.targets = self.picker_name, tuple(targets)
        return ProfileResult(self.name, targets, ranked)

    def _totals(self, cycle: Cycle[Any], candidates: Roster[C], trace: ProfileTrace | None) -> Column:
        steady = self._steady
        if candidates.stamp is None or candidates.rows is not None:
            steady = self._nothing_steady
        elif steady.members is not candidates.whole or steady.stamp != candidates.stamp[0]:
            steady = self._steady = self._steady_part(cycle, candidates)
        if trace is not None:
            trace.steady = steady.scored
        totals = steady.totals
        for index in steady.left:
            name, _, weight, _ = self.scorers[index]
            raw, scores = self._scores(index, cycle, candidates)
            totals = _weighted_sum(totals, scores, weight)
            if trace is not None:
                kept = raw.copy()  # the scorer may reuse its column
                trace.scored += ((index, name, weight, kept, kept if raw is scores else scores),)
        if totals is None:
            return column_of([0.0] * len(candidates), candidates.arrays)
        return totals if steady.left else totals.copy()  # a user's picker may change them

    def _steady_part(self, cycle: Cycle[Any], candidates: Roster[C]) -> "Steady[C]":
        """The scores from the steady scorers, cached until the next measurement."""
        assert candidates.stamp is not None
        totals: Column | None = None
        scored = []
        for index in range(len(self.scorers)):
            if index in self._changing:
                continue
            name, _, weight, _ = self.scorers[index]
            raw, scores = self._scores(index, cycle, candidates)
            totals = _weighted_sum(totals, scores, weight)
            scored.append((index, name, weight, raw, scores))
        return Steady(candidates.whole, candidates.stamp[0], totals, scored, self._changing)

    def _scores(self, index: int, cycle: Cycle[Any], candidates: Roster[C]) -> tuple[Column, Column]:
        """The scores from one scorer, raw and clamped to [0, 1]."""
        name, scorer, _, bounded = self.scorers[index]
        try:
            given = scorer.scores(cycle, candidates)
        except Exception as error:
            raise broken(name, error) from error
        if len(given) != len(candidates):
            raise PluginError(name, f"gave {len(given)} scores for {len(candidates)} candidates")
        column = given if type(given) is list and not candidates.arrays else column_of(given, candidates.arrays)
        return column, column if bounded else _within_bounds(column)


def broken(name: str, error: Exception) -> PluginError:
    return error if isinstance(error, PluginError) else PluginError(name, f"raised {type(error).__name__}: {error}")


def _weighted(given: object) -> Weighted:
    if isinstance(given, tuple):
        plugin, weight = given
        return Weighted(plugin, float(weight))
    return Weighted(given)


def _checked_rejections(
    name: str, candidates: Roster[C], given: Iterable[tuple[C, Reason | str]]
) -> Rejected[C] | None:
    if isinstance(given, Rejected):
        return given if len(given) else None
    listed = list(given)
    if not listed:
        return None
    position_of = {id(candidate): position for position, candidate in enumerate(candidates)}
    reasons: dict[int, Reason | str] = {}
    for candidate, reason in listed:
        if id(candidate) not in position_of:
            raise PluginError(name, f"rejected {candidate}, which is not among the candidates it was given")
        reasons.setdefault(position_of[id(candidate)], reason)
    return Listed(candidates, name, reasons)


class Listed(Rejected[C]):
    """Rejections that a filter returned as pairs."""

    __slots__ = ("_reasons",)

    def __init__(self, candidates: Roster[C], name: str, reasons: dict[int, Reason | str]) -> None:
        super().__init__(candidates, list(reasons), name)
        self._reasons = reasons

    def all_of(self, codes: Set[str]) -> bool:
        return all(reason.code in codes for _, reason in self)

    def _reason(self, position: int) -> Reason:
        return reason_of(self.code, self._reasons[position])


def _within_bounds(scores: Column) -> Column:
    """The scores clamped to [0, 1], with nan as 0. Returns the same column if nothing has to change."""
    if isinstance(scores, list):
        if min(scores) >= 0.0 and max(scores) <= 1.0 and sum(scores) >= 0.0:
            return scores
        return [0.0 if not score >= 0.0 else 1.0 if score > 1.0 else score for score in scores]
    if np.minimum.reduce(scores) >= 0.0 and np.maximum.reduce(scores) <= 1.0:
        return scores
    return np.clip(np.nan_to_num(scores, nan=0.0), 0.0, 1.0)


def _weighted_sum(totals: Column | None, scores: Column, weight: float) -> Column:
    if totals is None:
        return scores if weight == 1.0 else linear(scores, weight, 0.0)
    if isinstance(totals, list):
        return [total + weight * score for total, score in zip(totals, scores)]  # noqa: B905 (lengths are checked)
    return totals + weight * array(scores)
