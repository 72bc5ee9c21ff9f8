"""The body of an `EndpointPickerConfig` -> a plan: profiles, their handler, flow control, and all defaults."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from pointsman.config.building import Plugins
from pointsman.config.deprecated import RETIRED_GATES, modernized
from pointsman.config.effects import warn_of_no_effect
from pointsman.config.plan import FlowControlPlan, PickerPlan
from pointsman.config.problems import FieldPath, Names, Problems, found
from pointsman.config.registry import ELSEWHERE, FEATURE_GATES, NEEDS
from pointsman.config.registry import plugins as plugin_registry
from pointsman.config.schema import BandTemplate, FlowControlSpec, PickerBody, PluginSpec, ProfileEntry, ProfileSpec
from pointsman.config.validation import INVALID, usable
from pointsman.errors import did_you_mean
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.estimates import UNKNOWN_PRICE
from pointsman.routing.filters.demands import Demands
from pointsman.routing.plugins import EndpointDiscovery
from pointsman.routing.producers import BurstPrefixCacheProducer, InflightLoadProducer, PredictedLatencyProducer
from pointsman.routing.queue import (
    REQUEST_TTL_S,
    BandSettings,
    EvictionFilter,
    EvictionOrder,
    FlowNamer,
    InFlightEviction,
    UtilizationDetector,
)
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

ScorerWeights: TypeAlias = tuple[tuple[str, float], ...]

DEFAULT_PROFILE: ScorerWeights = (
    ("queue-scorer", 2.0),
    ("kv-cache-utilization-scorer", 2.0),
    ("prefix-cache-scorer", 3.0),
)
"""The published scorers for a document that declares neither plugins nor profiles."""
OWN_PROFILE: ScorerWeights = (("slo-miss-scorer", 1.0),)
"""The scorers for a deployment without a document. They take each new request into account at once. Scorers that read
measurements would instead send all requests between two measurements to the same instance."""
OWN_NAME = "slo-miss"
DEFAULT_DETECTOR = "utilization-detector"
DEFAULT_POLICIES = {
    "fairness policy": "global-strict-fairness-policy",
    "ordering policy": "fcfs-ordering-policy",
    "usage limit policy": "static-usage-limit-policy",
}
DEFAULT_BAND = BandSettings()
METRICS_AGE_S = 3.0
"""The age at which an instance's metrics become stale. A plane reads metrics twice a second."""


def default_plan(problems: Problems, path: FieldPath) -> PickerPlan | None:
    """The plan of a deployment without a scheduling section."""
    specs, profiles = _profile_of(OWN_PROFILE)
    body = PickerBody(plugins=list(specs), scheduling_profiles=list(profiles))
    plan = picker_plan(body, problems, path, queues=True)
    return None if plan is None else msgspec.structs.replace(plan, name=OWN_NAME)


def picker_plan(body: PickerBody, problems: Problems, path: FieldPath, *, queues: bool = False) -> PickerPlan | None:
    """The plan; None if the document has problems. With `queues`, requests wait even without flow control."""
    specs, profile_specs = with_defaults(body)
    plugins = Plugins(plugin_registry(), problems)
    for one, where in modernized(specs, problems, (*path, "plugins")):
        plugins.declare(one, where)
    plugins.built()
    gates = _gates(body, problems, path)
    detector = saturation_detector(body, plugins, path)
    scheduler = Profiles(plugins, problems, path).scheduler(profile_specs)
    spec, flow_control, is_on = body.flow_control, None, gates["flowControl"]
    if is_on:
        flow_control = FlowControls(plugins, problems, path).plan(spec or FlowControlSpec(), detector)
    elif spec and spec != FlowControlSpec(saturation_detector=spec.saturation_detector):
        message = "has no effect, except for its saturationDetector: the feature gate flowControl is off"
        problems.warn((*path, "flowControl"), message)
    discovery = _discovery(body, plugins, path)
    warn_of_no_effect(body, plugins, problems, path, flow_control)
    if queues:
        _allow_the_age_of_metrics(plugins, problems)
    for name, field in _other_references(body, path):
        if name and name not in ELSEWHERE:
            plugins.exists(name, field)
    if len(problems) or scheduler is None:
        return None
    return PickerPlan(
        plugins=plugins.built(),
        scheduler=scheduler,
        saturation_detector=detector,
        flow_control=flow_control,
        gates=gates,
        endpoints_file="" if discovery is None else discovery.endpoints_file(),
        queues=queues,
    )


def _allow_the_age_of_metrics(plugins: Plugins, problems: Problems) -> None:
    """Raise the staleness limits of detectors: the usual age of a plane's metrics must not look like saturation."""
    for name, detector in plugins.built().items():
        if isinstance(detector, UtilizationDetector) and detector.oldest_s < METRICS_AGE_S:
            declared = plugins.declared[name]
            field = (*declared.path, "parameters", "metricsStalenessThreshold")
            if not declared.injected and problems.written(field):
                message = f"is {METRICS_AGE_S:g}s here: instances are measured twice a second, and may miss a few"
                problems.warn(field, message)
            detector.allow_age(METRICS_AGE_S)


def discovery_reference(body: PickerBody) -> tuple[str, FieldPath]:
    """The plugin that discovers endpoints (empty if there is none), and the path of the field that names it."""
    spec = body.data_layer.discovery if body.data_layer else None
    if spec and spec.endpoints:
        return spec.endpoints.plugin_ref or "", ("dataLayer", "discovery", "endpoints", "pluginRef")
    return (spec.plugin_ref or "" if spec else ""), ("dataLayer", "discovery", "pluginRef")


def _discovery(body: PickerBody, plugins: Plugins, path: FieldPath) -> EndpointDiscovery | None:
    name, field = discovery_reference(body)
    found = plugins.referred(name, "endpoint discovery", (*path, *field)) if name else INVALID
    return None if found is INVALID else found


def _gates(body: PickerBody, problems: Problems, path: FieldPath) -> dict[str, bool]:
    gates = dict(FEATURE_GATES)
    for index, text in usable(body.feature_gates):
        name, equals, value = text.partition("=")
        field = (*path, "featureGates", index)
        if name in RETIRED_GATES:
            problems.warn(field, "has no effect: what it gates is always on")
        elif name not in FEATURE_GATES:
            problems.add(field, f'unknown feature gate "{name}"{did_you_mean(name, FEATURE_GATES)}')
        elif equals and value.lower() not in ("true", "false"):
            problems.add(field, f"expected {name}, {name}=true or {name}=false, found {found(text)}")
        else:
            gates[name] = value.lower() != "false"
    return gates


def _other_references(body: PickerBody, path: FieldPath) -> Iterator[tuple[str, FieldPath]]:
    """References to plugins that have no effect here. Their names are checked nevertheless."""
    handler, layer = body.request_handler, body.data_layer
    if handler and handler.parsers:
        for index, parser in usable(handler.parsers):
            yield parser.plugin_ref, (*path, "requestHandler", "parsers", index, "pluginRef")
    elif body.parser:
        yield body.parser.plugin_ref, (*path, "parser", "pluginRef")
    for index, source in usable(layer.sources if layer else ()):
        field: FieldPath = (*path, "dataLayer", "sources", index)
        yield source.plugin_ref, (*field, "pluginRef")
        for number, extractor in usable(source.extractors):
            yield extractor.plugin_ref, (*field, "extractors", number, "pluginRef")


def with_defaults(body: PickerBody) -> tuple[Sequence[PluginSpec], Sequence[ProfileSpec]]:
    """The plugins and profiles of a document, or the defaults if the document has neither."""
    if body.plugins or body.scheduling_profiles or INVALID in (body.plugins, body.scheduling_profiles):
        return body.plugins or [], body.scheduling_profiles or []
    return _profile_of(DEFAULT_PROFILE)


def _profile_of(scorers: ScorerWeights) -> tuple[Sequence[PluginSpec], Sequence[ProfileSpec]]:
    entries = [ProfileEntry(plugin_ref=name, weight=weight) for name, weight in scorers]
    return [PluginSpec(type=name) for name, _ in scorers], [ProfileSpec(name="default", plugins=entries)]


class Profiles:
    """Builds the scheduler of a document."""

    def __init__(self, plugins: Plugins, problems: Problems, path: FieldPath) -> None:
        self._plugins = plugins
        self._problems = problems
        self._path = (*path, "schedulingProfiles")

    def scheduler(self, specs: Sequence[ProfileSpec]) -> Scheduler[Endpoint] | None:
        """The scheduler; None if the document has problems."""
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
            self._plugins.used |= {name for name, one in declared.items() if isinstance(one, Filter | Scorer | Picker)}
            return [self._profile("default", entries, self._path)]
        names = Names("profile", self._problems)
        made = []
        for index, spec in usable(specs):
            path = (*self._path, index)
            names.take(spec.name, path)
            made.append(self._profile(spec.name, self._entries(spec, path), path))
        return made

    def _entries(self, spec: ProfileSpec, path: FieldPath) -> list[Weighted]:
        entries = []
        for index, entry in usable(spec.plugins):
            name = entry.plugin_ref
            if name is not INVALID and self._plugins.exists(name, (*path, "plugins", index, "pluginRef")):
                plugin = self._plugins.get(name)
                self._plugins.used.add(name)
                weight = self._plugins.declared[name].weight if entry.weight is None else entry.weight
                if plugin is not INVALID:
                    entries.append(Weighted(plugin, weight, name))
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
            self._plugins.used.add(picker)
            useful.append(Weighted(self._plugins.inject(picker, "picker", path), name=picker))
        if useful[-1].plugin is INVALID:
            return None
        own = {type(entry.plugin) for entry in useful}  # a declared filter replaces the default filter of the same type
        demands = Demands(UNKNOWN_PRICE)
        if own.isdisjoint(map(type, demands.filters)):
            return Profile(name, demands, *useful)
        return Profile(name, *(demand for demand in demands.filters if type(demand) not in own), *useful)

    def _handler(self, profiles: int) -> Any:
        handlers = self._plugins.of_kind(ProfileHandler)
        if len(handlers) > 1:
            names = ", ".join(one.name for one in handlers)
            self._problems.add(handlers[1].path, f"there is more than one profile handler ({names}); keep one")
        if not handlers and profiles > 1:
            if (
                not self._plugins.incomplete
            ):  # otherwise a declared handler may be missing only because it could not be built
                message = f"{profiles} profiles need a profile handler among the plugins; found none"
                self._problems.add(self._path, message)
            return INVALID
        if not handlers:
            return self._plugins.inject("single-profile-handler", "profile handler", self._path)
        handler = self._plugins.get(handlers[0].name)
        if type(handler) is SingleProfileHandler and profiles > 1:
            self._problems.add(handlers[0].path, f"a single-profile-handler runs one profile; found {profiles}")
        return handler

    def _producers(self) -> list[Producer[Endpoint]]:
        """The declared producers, and the producers that other plugins need."""
        kinds = {one.type.name for one in self._plugins.declared.values() if one.type is not None}
        needed = dict.fromkeys(producer for kind, producers in NEEDS.items() if kind in kinds for producer in producers)
        for name in needed:
            if name in ELSEWHERE and name not in self._plugins.declared:
                self._problems.warn(self._path, f"{name} is not injected: {ELSEWHERE[name]}")
            elif name not in ELSEWHERE and name not in kinds:
                self._plugins.inject(name, "extractor" if name.endswith("-extractor") else "producer", self._path)
        producers = [one for one in self._plugins.built().values() if isinstance(one, Producer)]
        # The load of a request excludes its cached prefix, so prefixes are looked up first.
        return sorted(producers, key=_place)


def _place(producer: Producer[Endpoint]) -> int:
    """The rank of a producer. A producer comes after the producers whose facts it reads."""
    late = (BurstPrefixCacheProducer, InflightLoadProducer, PredictedLatencyProducer)
    return next((place for place, kind in enumerate(late, start=1) if isinstance(producer, kind)), 0)


def saturation_detector(body: PickerBody, plugins: Plugins, path: FieldPath) -> Any:
    """The detector that a document names in the new field or in the old field, or else the default detector."""
    if body.flow_control and body.flow_control.saturation_detector:
        name, field = body.flow_control.saturation_detector.plugin_ref, (*path, "flowControl", "saturationDetector")
    elif body.saturation_detector:
        name, field = body.saturation_detector.plugin_ref, (*path, "saturationDetector")
    else:
        name, field = "", path
    if name is INVALID:
        return INVALID
    reach = plugins.inject if name in ("", DEFAULT_DETECTOR) else plugins.referred
    return reach(name or DEFAULT_DETECTOR, "saturation detector", (*field, "pluginRef"))


class FlowControls:
    """Builds the plan of one `flowControl` section."""

    def __init__(self, plugins: Plugins, problems: Problems, path: FieldPath) -> None:
        self._plugins = plugins
        self._problems = problems
        self._path = (*path, "flowControl")

    def plan(self, spec: FlowControlSpec, detector: Any) -> FlowControlPlan:
        ttl = REQUEST_TTL_S if spec.default_request_ttl is None else spec.default_request_ttl
        negative = spec.default_negative_priority_band
        return FlowControlPlan(
            bands=self._bands(spec),
            default_band=self._band(spec.default_priority_band or BandTemplate(), "defaultPriorityBand"),
            default_negative_band=self._band(negative, "defaultNegativePriorityBand") if negative else None,
            limits=self._policy(spec.usage_limit_policy_plugin_ref, "usage limit policy", "usageLimitPolicyPluginRef"),
            detector=detector,
            max_requests=self._amount(spec.max_requests, "maxRequests") or None,
            max_bytes=self._amount(spec.max_bytes, "maxBytes") or None,
            request_ttl_s=ttl,
            no_endpoint_request_ttl_s=ttl if spec.no_endpoint_request_ttl is None else spec.no_endpoint_request_ttl,
            make_eviction=self._eviction(spec),
        )

    def _eviction(self, spec: FlowControlSpec) -> Callable[[], InFlightEviction] | None:
        if not spec.enable_eviction:
            return None
        may_stop, order = self._only(EvictionFilter, "eviction filter"), self._only(EvictionOrder, "eviction order")
        return partial(InFlightEviction, may_stop, order)

    def _only(self, protocol: Any, word: str) -> Any:
        """The declared plugin with a role that only one plugin may have; None if there is no such plugin."""
        declared = self._plugins.of_kind(protocol)
        if len(declared) > 1:
            names = ", ".join(one.name for one in declared)
            self._problems.add(declared[1].path, f"there is more than one {word} ({names}); keep one")
        plugin = self._plugins.get(declared[0].name) if declared else None
        return None if plugin is INVALID else plugin

    def _bands(self, spec: FlowControlSpec) -> tuple[BandSettings, ...]:
        bands: dict[int, BandSettings] = {}
        for index, band in usable(spec.priority_bands):
            if band.priority is not INVALID and band.priority in bands:
                message = f"there is already a band of priority {band.priority}"
                self._problems.add((*self._path, "priorityBands", index, "priority"), message)
            bands[band.priority] = self._band(band, "priorityBands", index)
        return tuple(bands.values())

    def _band(self, band: BandTemplate, *path: str | int) -> BandSettings:
        namer = self._only(FlowNamer, "flow namer")
        return BandSettings(
            priority=band.priority,
            max_requests=self._amount(band.max_requests, *path, "maxRequests") or DEFAULT_BAND.max_requests,
            max_bytes=self._amount(band.max_bytes, *path, "maxBytes") or DEFAULT_BAND.max_bytes,
            fairness=self._policy(band.fairness_policy_ref, "fairness policy", *path, "fairnessPolicyRef"),
            ordering=self._policy(band.ordering_policy_ref, "ordering policy", *path, "orderingPolicyRef"),
            flow_of=None if namer is None else namer.name_flow,
        )

    def _policy(self, name: str, role: str, *path: str | int) -> Any:
        if name is INVALID:
            return INVALID
        default = DEFAULT_POLICIES[role]
        reach = self._plugins.inject if name in ("", default) else self._plugins.referred
        return reach(name or default, role, (*self._path, *path))

    def _amount(self, amount: int | None, *path: str | int) -> int | None:
        if amount and amount < 0:
            self._problems.add((*self._path, *path), f"must not be negative, found {amount}")
            return None
        return amount
