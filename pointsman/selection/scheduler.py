"""The scheduling cycle: producers run, then the profiles that the handler picks, until it picks none."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from pointsman.errors import ConfigError, PluginError, UnknownName
from pointsman.reasons import Reason, reason_of
from pointsman.selection.columns import Roster
from pointsman.selection.plugins import Cycle, Producer, ProfileHandler, plugin_name
from pointsman.selection.profile import Profile, ProfileFailure, ProfileResult, ProfileResults, broken, none_chosen

C = TypeVar("C")

__all__ = ["FallbackProfileHandler", "SchedulingFailure", "SchedulingResult", "SingleProfileHandler", "failed"]


class SchedulingResult(msgspec.Struct, Generic[C], eq=False):
    """The outcome of a cycle: the result of each profile that chose, and the profile whose target gets the request."""

    results: Mapping[str, ProfileResult[C]]
    primary: str

    @property
    def targets(self) -> Sequence[C]:
        """The targets of the primary profile, best first."""
        return self.results[self.primary].targets

    @property
    def target(self) -> C:
        """The first target of the primary profile."""
        return self.results[self.primary].targets[0]


class SchedulingFailure(Generic[C]):
    """The outcome of a cycle that chose no candidate: a value and not an exception, because this is ordinary."""

    __slots__ = ("failures", "given")

    def __init__(self, given: Reason | str, failures: Mapping[str, ProfileFailure[C]]) -> None:
        """`given` is the reason. A profile handler may give a text, or "" to use the reasons of the failed profiles."""
        self.given = given
        self.failures = failures

    def reasons(self) -> list[tuple[C, str, Reason]]:
        """(candidate, filter, reason) for every candidate of every failed profile."""
        return [reason for failure in self.failures.values() for reason in failure.reasons()]

    @property
    def reason(self) -> Reason:
        """The reason that was given, or else one made from the reasons of the failed profiles."""
        return reason_of("profile-handler", self.given) if self.given else none_chosen(self.failures.values())

    def __str__(self) -> str:
        return str(self.reason)


def failed(results: ProfileResults[C]) -> dict[str, ProfileFailure[C]]:
    return {name: result for name, result in results.items() if isinstance(result, ProfileFailure)}


class SingleProfileHandler:
    """Runs the only profile, once."""

    def pick_profiles(self, cycle: Cycle[Any], profiles: Sequence[str], results: ProfileResults[Any]) -> Sequence[str]:
        return () if len(results) == len(profiles) else profiles

    def process_results(
        self, cycle: Cycle[Any], results: ProfileResults[C]
    ) -> SchedulingResult[C] | SchedulingFailure[C]:
        if len(results) != 1:
            return SchedulingFailure(Reason("not-one-profile", {"profiles": len(results)}), failed(results))
        [(name, result)] = results.items()
        if isinstance(result, ProfileFailure):
            return SchedulingFailure("", {name: result})
        return SchedulingResult({name: result}, name)


class FallbackProfileHandler:
    """Runs the profiles in order until one of them chooses a candidate."""

    def pick_profiles(self, cycle: Cycle[Any], profiles: Sequence[str], results: ProfileResults[Any]) -> Sequence[str]:
        tried = len(results)
        if tried == len(profiles) or (tried and isinstance(results[profiles[tried - 1]], ProfileResult)):
            return ()
        return profiles[tried : tried + 1]

    def process_results(
        self, cycle: Cycle[Any], results: ProfileResults[C]
    ) -> SchedulingResult[C] | SchedulingFailure[C]:
        for name, result in results.items():
            if isinstance(result, ProfileResult):
                return SchedulingResult({name: result}, name)
        last = list(results)[-1:]
        return SchedulingFailure("", {name: failure for name, failure in failed(results).items() if name in last})


MAX_ROUNDS = 64
"""A handler that still picks profiles after this many rounds counts as stuck."""


class Scheduler(Generic[C]):
    """Profiles, and the handler that chooses among them."""

    def __init__(
        self,
        profiles: Sequence[Profile[C]],
        handler: ProfileHandler[C] | None = None,
        producers: Sequence[Producer[C]] = (),
    ) -> None:
        self.profiles = {profile.name: profile for profile in profiles}
        if len(self.profiles) != len(profiles):
            raise ConfigError(["two profiles have the same name"])
        if handler is None and len(profiles) != 1:
            raise ConfigError([f"{len(profiles)} profiles need a profile handler that chooses among them"])
        self.handler: ProfileHandler[C] = SingleProfileHandler() if handler is None else handler
        self.producers = tuple(producers)
        self._names = tuple(self.profiles)
        self._only = profiles[0] if len(profiles) == 1 and type(self.handler) is SingleProfileHandler else None
        """The only profile, if there is one profile and the default handler. Then the handler need not run."""
        self.producer_failures: dict[str, int] = {}

    def run(self, cycle: Cycle[Any], candidates: Roster[C]) -> SchedulingResult[C] | SchedulingFailure[C]:
        """One decision. Every profile gets the original candidates."""
        for producer in self.producers:
            try:
                producer.produce(cycle, candidates)
            except Exception as error:  # the decision is possible without these facts
                self._producer_failed(cycle, producer, error)
        if self._only is not None:
            result = self._only.run(cycle, candidates)
            if type(result) is ProfileFailure:
                return SchedulingFailure("", {result.profile: result})
            return SchedulingResult({result.profile: result}, result.profile)  # type: ignore[dict-item]
        results: dict[str, ProfileResult[C] | ProfileFailure[C]] = {}
        for _ in range(MAX_ROUNDS):
            try:
                wanted = self.handler.pick_profiles(cycle, self._names, results)
            except Exception as error:
                raise broken(plugin_name(self.handler), error) from error
            if not wanted:
                break
            for name in wanted:
                profile = self.profiles.get(name)
                if profile is None:
                    raise UnknownName("profile", name, self.profiles)
                results[name] = profile.run(cycle, candidates)
        else:
            raise PluginError(plugin_name(self.handler), f"still asks for profiles after {MAX_ROUNDS} rounds")
        if not results:
            return SchedulingFailure(Reason("no-profile-ran"), {})
        try:
            outcome = self.handler.process_results(cycle, results)
        except Exception as error:
            raise broken(plugin_name(self.handler), error) from error
        if type(outcome) is SchedulingFailure and outcome.given:
            outcome.given = reason_of(plugin_name(self.handler), outcome.given)
        return outcome

    def _producer_failed(self, cycle: Cycle[Any], producer: Producer[C], error: Exception) -> None:
        name = plugin_name(producer)
        self.producer_failures[name] = self.producer_failures.get(name, 0) + 1
        if cycle.trace is not None:
            facts = {"producer": name, "error": f"{type(error).__name__}: {error}"}
            cycle.trace.note(Reason("producer-failed", facts))
