"""What a cycle comes to, and the handlers that fit candidates of any kind."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from pointsman.selection.plugins import Cycle
from pointsman.selection.profile import ProfileFailure, ProfileResult

C = TypeVar("C")

__all__ = ["FallbackProfileHandler", "SchedulingFailure", "SchedulingResult", "SingleProfileHandler", "failed"]


class SchedulingResult(msgspec.Struct, Generic[C], eq=False):
    """What a cycle decided: the result of each profile that chose, and which of them the request goes to."""

    results: Mapping[str, ProfileResult[C]]
    primary: str

    @property
    def targets(self) -> Sequence[C]:
        """Where the request goes, best first."""
        return self.results[self.primary].targets

    @property
    def target(self) -> C:
        """The first of them."""
        return self.results[self.primary].targets[0]


class SchedulingFailure(Generic[C]):
    """A cycle that found nobody: a value, because that is an ordinary outcome."""

    __slots__ = ("failures", "why")

    def __init__(self, why: str, failures: Mapping[str, ProfileFailure[C]]) -> None:
        self.why = why
        self.failures = failures

    def reasons(self) -> list[tuple[C, str, str]]:
        """(candidate, filter, reason) for every candidate of every failed profile."""
        return [reason for failure in self.failures.values() for reason in failure.reasons()]

    def in_words(self, noun: str = "candidates") -> str:
        """The reason given, or else those of the failed profiles."""
        return self.why or "; ".join(failure.in_words(noun) for failure in self.failures.values())

    def __str__(self) -> str:
        return self.in_words()


def failed(results: Mapping[str, ProfileResult[C] | ProfileFailure[C]]) -> dict[str, ProfileFailure[C]]:
    """Those of the results that chose nobody."""
    return {name: result for name, result in results.items() if isinstance(result, ProfileFailure)}


class SingleProfileHandler:
    """Runs the one profile there is, once."""

    def pick_profiles(
        self,
        cycle: Cycle[Any],
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult[Any] | ProfileFailure[Any]],
    ) -> Sequence[str]:
        return () if len(results) == len(profiles) else profiles

    def process_results(
        self, cycle: Cycle[Any], results: Mapping[str, ProfileResult[C] | ProfileFailure[C]]
    ) -> SchedulingResult[C] | SchedulingFailure[C]:
        if len(results) != 1:
            return SchedulingFailure(f"one profile result was expected, found {len(results)}", failed(results))
        [(name, result)] = results.items()
        if isinstance(result, ProfileFailure):
            return SchedulingFailure("", {name: result})
        return SchedulingResult({name: result}, name)


class FallbackProfileHandler:
    """Runs the profiles in their order until one of them chooses somebody."""

    def pick_profiles(
        self,
        cycle: Cycle[Any],
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult[Any] | ProfileFailure[Any]],
    ) -> Sequence[str]:
        tried = len(results)
        if tried == len(profiles) or (tried and isinstance(results[profiles[tried - 1]], ProfileResult)):
            return ()
        return profiles[tried : tried + 1]

    def process_results(
        self, cycle: Cycle[Any], results: Mapping[str, ProfileResult[C] | ProfileFailure[C]]
    ) -> SchedulingResult[C] | SchedulingFailure[C]:
        for name, result in results.items():
            if isinstance(result, ProfileResult):
                return SchedulingResult({name: result}, name)
        last = list(results)[-1:]
        return SchedulingFailure("", {name: failure for name, failure in failed(results).items() if name in last})
