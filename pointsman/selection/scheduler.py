"""The cycle: producers prepare, the handler asks for profiles until it asks for none, then says what came of it."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from pointsman.errors import ConfigError, PluginError, UnknownName
from pointsman.selection.handlers import SchedulingFailure, SchedulingResult, SingleProfileHandler
from pointsman.selection.plugins import Cycle, Producer, ProfileHandler, plugin_name
from pointsman.selection.profile import Profile, ProfileFailure, ProfileResult, broken
from pointsman.selection.roster import Roster

C = TypeVar("C")

MOST_ROUNDS = 64
"""A handler that still asks for profiles after this many rounds will never stop."""


class Scheduler(Generic[C]):
    """Profiles and the one handler that chooses among them."""

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
        """The profile that every cycle runs, once; the handler need not be asked what to make of it."""
        self.producer_failures: dict[str, int] = {}

    def run(self, cycle: Cycle[Any], candidates: Roster[C]) -> SchedulingResult[C] | SchedulingFailure[C]:
        """One decision. Every profile sees the original candidates."""
        for producer in self.producers:
            try:
                producer.produce(cycle, candidates)
            except Exception as error:  # what it would have told is missing; the decision is still possible
                self._producer_failed(cycle, producer, error)
        if self._only is not None:
            result = self._only.run(cycle, candidates)
            if type(result) is ProfileFailure:
                return SchedulingFailure("", {result.profile: result})
            return SchedulingResult({result.profile: result}, result.profile)  # type: ignore[dict-item]
        results: dict[str, ProfileResult[C] | ProfileFailure[C]] = {}
        for _ in range(MOST_ROUNDS):
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
            raise PluginError(plugin_name(self.handler), f"still asks for profiles after {MOST_ROUNDS} rounds")
        if not results:
            return SchedulingFailure("no profile was run", {})
        try:
            return self.handler.process_results(cycle, results)
        except Exception as error:
            raise broken(plugin_name(self.handler), error) from error

    def _producer_failed(self, cycle: Cycle[Any], producer: Producer[C], error: Exception) -> None:
        name = plugin_name(producer)
        self.producer_failures[name] = self.producer_failures.get(name, 0) + 1
        if cycle.trace is not None:
            cycle.trace.note(f"{name} failed: {type(error).__name__}: {error}")
