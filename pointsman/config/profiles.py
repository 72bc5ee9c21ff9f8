"""Profiles and the handler that chooses among them, with everything that a document may leave out."""

from collections.abc import Sequence
from typing import Any

from pointsman.config.building import Plugins
from pointsman.config.names import Names
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.published import ELSEWHERE, NEEDS
from pointsman.config.schema import PickerBody, PluginSpec, ProfileEntry, ProfileSpec
from pointsman.config.validation import INVALID, usable
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.filters.demands import Demands
from pointsman.routing.producers import InflightLoadProducer
from pointsman.selection import (
    Filter,
    Picker,
    Producer,
    Profile,
    ProfileHandler,
    Scheduler,
    Scorer,
    SingleProfileHandler,
    Weighted,
)

DEFAULT_PROFILE = (("queue-scorer", 2.0), ("kv-cache-utilization-scorer", 2.0), ("prefix-cache-scorer", 3.0))
"""What schedules when a document declares neither plugins nor profiles."""


def with_defaults(body: PickerBody) -> tuple[Sequence[PluginSpec], Sequence[ProfileSpec]]:
    """The plugins and profiles of a document, or the default ones if it has neither."""
    if body.plugins or body.scheduling_profiles or INVALID in (body.plugins, body.scheduling_profiles):
        return body.plugins or [], body.scheduling_profiles or []
    entries = [ProfileEntry(plugin_ref=name, weight=weight) for name, weight in DEFAULT_PROFILE]
    return [PluginSpec(type=name) for name, _ in DEFAULT_PROFILE], [ProfileSpec(name="default", plugins=entries)]


class Profiles:
    """Makes the scheduler of a document."""

    def __init__(self, plugins: Plugins, problems: Problems, path: FieldPath) -> None:
        self._plugins = plugins
        self._problems = problems
        self._path = (*path, "schedulingProfiles")

    def scheduler(self, specs: Sequence[ProfileSpec]) -> Scheduler[Endpoint] | None:
        """The scheduler; None if anything is wrong with the document."""
        profiles = self._profiles(specs)
        handler = self._handler(len(specs) or 1)
        producers = self._producers()
        if len(self._problems):
            return None
        return Scheduler([profile for profile in profiles if profile is not None], handler, producers)

    def _profiles(self, specs: Sequence[ProfileSpec]) -> list[Profile[Endpoint] | None]:
        if not specs:
            declared = self._plugins.built(injected=False)
            entries = [Weighted(one, self._plugins.declared[name].weight, name) for name, one in declared.items()]
            return [self._profile("default", entries, self._path)]
        names = Names("profile", self._problems)
        made = []
        for place, spec in usable(specs):
            path = (*self._path, place)
            names.take(spec.name, path)
            made.append(self._profile(spec.name, self._entries(spec, path), path))
        return made

    def _entries(self, spec: ProfileSpec, path: FieldPath) -> list[Weighted]:
        entries = []
        for place, entry in usable(spec.plugins):
            if entry.plugin_ref is INVALID:
                continue
            if self._plugins.exists(entry.plugin_ref, (*path, "plugins", place, "pluginRef")):
                plugin = self._plugins.get(entry.plugin_ref)
                weight = self._plugins.declared[entry.plugin_ref].weight if entry.weight is None else entry.weight
                if plugin is not INVALID:
                    entries.append(Weighted(plugin, weight, entry.plugin_ref))
        return entries

    def _profile(self, name: str, entries: list[Weighted], path: FieldPath) -> Profile[Endpoint] | None:
        useful = [entry for entry in entries if isinstance(entry.plugin, Filter | Scorer | Picker)]
        pickers = [entry.name for entry in useful if isinstance(entry.plugin, Picker)]
        if len(pickers) > 1:
            message = f"a profile has one picker; found {len(pickers)}: {', '.join(pickers)}"
            self._problems.add((*path, "plugins"), message)
            return None
        if not pickers:
            declared = self._plugins.built(injected=False)
            picker = next((name for name, one in declared.items() if isinstance(one, Picker)), "max-score-picker")
            useful.append(Weighted(self._plugins.inject(picker, "picker", path), name=picker))
        if useful[-1].plugin is INVALID:
            return None
        own = {type(entry.plugin) for entry in useful}  # who declares one of them means it to be as declared
        demands = Demands()
        if own.isdisjoint(map(type, demands.filters)):
            return Profile(name, demands, *useful)
        return Profile(name, *(demand for demand in demands.filters if type(demand) not in own), *useful)

    def _handler(self, profiles: int) -> Any:
        handlers = self._plugins.of_kind(ProfileHandler)
        if len(handlers) > 1:
            names = ", ".join(one.name for one in handlers)
            self._problems.add(handlers[1].path, f"there is more than one profile handler ({names}); keep one")
        if not handlers and profiles > 1:
            if not self._plugins.incomplete:  # else the handler may be among those that could not be built
                message = f"{profiles} profiles need a profile handler among the plugins; found none"
                self._problems.add(self._path, message)
            return INVALID
        if not handlers:
            return self._plugins.inject("single-profile-handler", "profile handler", self._path)
        handler = self._plugins.get(handlers[0].name)
        if type(handler) is SingleProfileHandler and profiles > 1:
            message = f"a single-profile-handler runs one profile; found {profiles}"
            self._problems.add(handlers[0].path, message)
        return handler

    def _producers(self) -> list[Producer[Endpoint]]:
        """Those declared, and those that the others need."""
        kinds = {one.type.name for one in self._plugins.declared.values() if one.type is not None}
        needed = dict.fromkeys(producer for kind, producers in NEEDS.items() if kind in kinds for producer in producers)
        for name in needed:
            if name in ELSEWHERE and name not in self._plugins.declared:
                self._plugins.note(f"{name} is not injected: {ELSEWHERE[name]}")
            elif name not in ELSEWHERE and name not in kinds:
                self._plugins.inject(name, "producer", self._path)
        producers = [one for one in self._plugins.built().values() if isinstance(one, Producer)]
        # What a request adds is counted net of the prefix that an endpoint has, so whoever finds that out goes first.
        return sorted(producers, key=lambda one: isinstance(one, InflightLoadProducer))
