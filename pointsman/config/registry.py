"""Type names -> classes: short names for built-in plugins and policies, package.module:Name for the user's own.

Enters: a name as written in YAML. Leaves: a `PluginType` with its parameters. The one rule: a class needs no
registration. Its name gives its type, and the arguments of its `__init__` are its parameters.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, TypeGuard, get_type_hints

import msgspec

from pointsman.config.code import load_module
from pointsman.config.problems import FieldPath, Problems, a
from pointsman.config.validation import Field
from pointsman.engines import ENGINES, Engine
from pointsman.errors import did_you_mean, system_reason
from pointsman.parameters import Spelled, camel_case, unmarked
from pointsman.routing.endpoints import Extractor
from pointsman.routing.plugins import (
    Admitter,
    Decider,
    DepartureListener,
    DispatchListener,
    EndpointDiscovery,
    HeaderWriter,
    Locator,
    ProgressListener,
    ResponseHeaderWriter,
)
from pointsman.routing.queue import (
    EvictionFilter,
    EvictionOrder,
    FairnessPolicy,
    FlowNamer,
    OrderingPolicy,
    SaturationDetector,
    UsageLimitPolicy,
)
from pointsman.scaling import SCALING_POLICIES
from pointsman.selection import Filter, Picker, Producer, ProfileHandler, Scorer
from pointsman.selection.plugins import kebab_case
from pointsman.strategies import SchedulingPolicy

ROLES: dict[str, Any] = {
    "filter": Filter,
    "scorer": Scorer,
    "picker": Picker,
    "profile handler": ProfileHandler,
    "producer": Producer,
    "extractor": Extractor,
    "locator": Locator,
    "endpoint discovery": EndpointDiscovery,
    "decider": Decider,
    "admitter": Admitter,
    "fairness policy": FairnessPolicy,
    "ordering policy": OrderingPolicy,
    "usage limit policy": UsageLimitPolicy,
    "saturation detector": SaturationDetector,
    "flow namer": FlowNamer,
    "eviction filter": EvictionFilter,
    "eviction order": EvictionOrder,
    "dispatch listener": DispatchListener,
    "departure listener": DepartureListener,
    "progress listener": ProgressListener,
    "header writer": HeaderWriter,
    "response header writer": ResponseHeaderWriter,
}

_READ = "requests are read by the gateway"
_MEASURED = "the runtime measures endpoints"
_GPUS = "no exporters of GPU metrics are read, and endpoints have no such attributes"

ELSEWHERE: dict[str, str] = {
    "openai-parser": _READ,
    "anthropic-parser": _READ,
    "vllmhttp-parser": _READ,
    "vllmgrpc-parser": _READ,
    "sglanghttp-parser": _READ,
    "vertexai-parser": _READ,
    "passthrough-parser": _READ,
    "models-responder": "the gateway lists models",
    "request-attribute-reporter": "the gateway reports what a request has used",
    "metrics-data-source": _MEASURED,
    "model-server-protocol-metrics": _MEASURED,
    "dcgm-data-source": _GPUS,
    "dcgm-extractor": _GPUS,
    "dp-rank-header-handler": "an engine chooses among its data parallel ranks itself",
    "models-data-source": _MEASURED,
    "models-data-extractor": _MEASURED,
    "endpoint-notification-source": "plugins are always notified when endpoints leave",
    "token-producer": "the gateway counts prompt tokens, or estimates them from bytes",
    "tokenizer": "the gateway counts prompt tokens, or estimates them from bytes",
    "session-id-producer": "plugins read the session from the request themselves",
    "precise-prefix-cache-producer": "prefix matches come from approx-prefix-cache-producer",
    "disagg-headers-handler": "disagg-profile-handler sets the headers itself",
    "prefill-header-handler": "disagg-profile-handler sets the headers itself",
}
"""Types of the published picker that have no effect here, each with the reason. Documents may declare them."""

REPLACED: dict[str, str] = {
    "by-label": "label-selector-filter",
}
"""Old types and their replacements. These types influence decisions, so they must not be ignored."""

MISSING: dict[str, str] = {
    "thunder-agent": "program-aware-fairness shares between sessions, and session-affinity-scorer keeps their instance",
    "disaggregatedset-rollout-screener": "it needs DisaggregatedSets, which only Kubernetes has",
    "k8s-notification-source": "it needs the API server that only Kubernetes has",
}
"""Types of the published picker that are not built in, each with an alternative or with the reason."""

PARAMETERS_ELSEWHERE = frozenset(
    {"prefixMatchInfoProducerName", "inFlightLoadProducerName", "latencyPredictionInfoProducerName"}
)
"""Parameters that choose among several producers of one fact. Here each fact has one producer."""

STRICT_WITHOUT_PARAMETERS = frozenset({"soft-reflective-ceiling-policy"})
"""A type that has no parameters ignores the parameters that a document gives it. These types refuse them."""

FEATURE_GATES: dict[str, bool] = {"flowControl": False, "haPopulateNonLeaderDatastore": True}
"""All feature gates, and whether each is on by default."""

_PREFIX = "approx-prefix-cache-producer"
_LOAD = "inflight-load-producer"
_LATENCY = "predicted-latency-producer"
_METRICS = "core-metrics-extractor"

NEEDS: dict[str, tuple[str, ...]] = {
    "prefix-cache-scorer": (_PREFIX,),
    "no-hit-lru-scorer": (_PREFIX,),
    "prefix-based-pd-decider": (_PREFIX,),
    "prefix-cache-affinity-filter": (_PREFIX, _LOAD),
    "token-load-scorer": (_PREFIX, _LOAD),
    "pending-work-scorer": (_PREFIX, _LOAD),
    "slo-miss-scorer": (_PREFIX, _LOAD, _LATENCY),
    "active-request-scorer": (_LOAD,),
    "utilization-filter": (_LOAD,),
    "concurrency-detector": (_LOAD,),
    "latency-scorer": (_PREFIX, _LATENCY),
    "slo-headroom-tier-filter": (_LATENCY,),
    "latency-slo-admitter": (_LATENCY,),
    "endpoint-attribute-scorer": (_METRICS,),
    "mm-embeddings-cache-scorer": ("mm-embeddings-cache-producer",),
    "endpoint-attribute-filter": (_METRICS,),
}
"""The producers and extractors that a type needs, in the order in which they run. Load excludes prefix matches."""

PLUGIN_PACKAGES = (
    "pointsman.selection.pickers",
    "pointsman.selection.scheduler",
    "pointsman.routing.filters",
    "pointsman.routing.scorers",
    "pointsman.routing.handlers",
    "pointsman.routing.producers",
    "pointsman.routing.queue",
    "pointsman.routing.admission",
    "pointsman.routing.extractors",
)


def roles_of(plugin: object) -> list[str]:
    """The roles of a plugin or of a class of plugins, by their methods."""
    return [role for role, protocol in ROLES.items() if isinstance(plugin, protocol)]


def is_plugin(made: type) -> bool:
    """Whether objects of this class can be listed under `plugins`."""
    return bool(roles_of(made)) and not getattr(made, "_is_protocol", False) and not inspect.isabstract(made)


def is_scaling_policy(made: type) -> bool:
    """Whether objects of this class can scale a deployment."""
    return callable(getattr(made, "desired_replicas", None)) and not inspect.isabstract(made)


def is_policy(made: type) -> TypeGuard[type[SchedulingPolicy]]:
    """Whether objects of this class can schedule a deployment."""
    return issubclass(made, SchedulingPolicy) and not inspect.isabstract(made)


class PluginType(msgspec.Struct, frozen=True):
    """A class that can be built from configuration."""

    name: str
    build: Callable[..., object]
    parameters: Mapping[str, Field]
    """Parameters by their names in YAML."""
    builtin: bool
    takes_anything: bool
    """Whether the class takes `**kwargs`. If so, unknown parameters are passed on unchanged."""

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.build) or "").partition("\n")[0]


class Registry:
    """The types that one field of a document can name."""

    def __init__(
        self, word: str, builtin: Mapping[str, type], belongs: Callable[[type], bool], wanted: str, *, method: str = ""
    ) -> None:
        self.word = word
        self._types = {name: plugin_type(name, made) for name, made in sorted(builtin.items())}
        self._belongs = belongs
        self._wanted = wanted
        """What a class must have to be in this registry, for error messages."""
        self._method = method
        """The method that a plain function may replace, if any. Neither the method nor the function may be async."""

    def __iter__(self) -> Iterator[PluginType]:
        return iter(self._types.values())

    def __contains__(self, name: str) -> bool:
        return name in self._types

    def find(self, name: str, problems: Problems, path: FieldPath) -> PluginType | None:
        """The type with this name; None after reporting why there is no such type."""
        if ":" in name:
            return self._imported(name, problems, path)
        known = self._types.get(name)
        if known is None:
            instead = REPLACED.get(name)
            hint = f'; use "{instead}"' if instead in self._types else did_you_mean(name, self._types)
            problem = f'there is no {self.word} "{name}"{hint}'
            if name in MISSING:
                problem = f'"{name}" of the published picker is not built in: {MISSING[name]}'
            elif other := _elsewhere(name, self.word):
                problem = f'"{name}" is {a(other)}, not {a(self.word)}{did_you_mean("", self._types)}'
            problems.add(path, problem)
        return known

    def _imported(self, name: str, problems: Problems, path: FieldPath) -> PluginType | None:
        module_name, _, attribute = name.partition(":")
        try:
            module = load_module(module_name)
        except (Exception, SystemExit) as error:
            problems.add(path, import_failure(module_name, error))
            return None
        made = getattr(module, attribute, None)
        if made is None:
            near = did_you_mean(attribute, [other for other in vars(module) if not other.startswith("_")])
            problems.add(path, f'module "{module_name}" has no "{attribute}"{near}')
        elif self._method and _is_async(getattr(made, self._method, made)):
            what = f"{self._method} of {name}" if isinstance(made, type) else name
            problems.add(path, f'"{what}" is async or yields; it must be a plain function, which returns its answer')
        elif self._method and inspect.isfunction(made):
            return function_type(name, made)
        elif not isinstance(made, type):
            expected = "a class or function" if self._method else "a class"
            problems.add(path, f'"{name}" is not {expected} but a {type(made).__name__}')
        elif not self._belongs(made):
            problems.add(path, f'"{name}" is not {a(self.word)}: {self._wanted}')
        else:
            return plugin_type(name, made, builtin=False)
        return None


def plugin_type(name: str, made: type, *, builtin: bool = True) -> PluginType:
    """The type for a class. The signature of the class gives the parameters."""
    init: Any = made.__init__  # type: ignore[misc]
    if init is object.__init__:
        return PluginType(name, made, {}, builtin, takes_anything=False)
    arguments = list(inspect.signature(made).parameters.values())
    return PluginType(name, made, _fields(init, arguments, builtin), builtin, _takes_anything(arguments))


def function_type(name: str, function: Callable[..., Any]) -> PluginType:
    """The type for a user's function. The arguments after the first one are the parameters."""

    def build(**given: Any) -> Callable[..., Any]:
        return partial(function, **given) if given else function

    build.__doc__ = function.__doc__
    arguments = list(inspect.signature(function).parameters.values())[1:]
    return PluginType(name, build, _fields(function, arguments, False), False, _takes_anything(arguments))


def _is_async(called: Any) -> bool:
    """Whether a call returns a coroutine or a generator."""
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return any(is_kind(called) for is_kind in kinds)


def _fields(called: Any, arguments: Iterable[inspect.Parameter], builtin: bool) -> dict[str, Field]:
    try:
        hints = get_type_hints(called, include_extras=True)
    except NameError:  # an annotation uses a name that is imported only for type checkers
        hints = {}
    fields: dict[str, Field] = {}
    for argument in arguments:
        if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            field = _field(argument, hints.get(argument.name, Any), builtin)
            fields[field.spellings[0]] = field
    return fields


def _takes_anything(arguments: Iterable[inspect.Parameter]) -> bool:
    return any(argument.kind is argument.VAR_KEYWORD for argument in arguments)


def _field(argument: inspect.Parameter, annotation: Any, builtin: bool) -> Field:
    spelled = next((m.name for m in unmarked(annotation)[1] if isinstance(m, Spelled)), camel_case(argument.name))
    spellings = dict.fromkeys([spelled] if builtin else [spelled, argument.name])
    optional = argument.default is not argument.empty
    return Field(argument.name, tuple(spellings), annotation, optional, argument.default if optional else None)


def import_failure(module: str, error: BaseException) -> str:
    """Why a user's module cannot be imported, and what to do about it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        if module.endswith(".py") and f"{module}.".startswith(f"{error.name}."):
            return f'"{module}" is a file; name its module, "{module.removesuffix(".py").replace("/", ".")}"'
        if f"{module}.".startswith(f"{error.name}."):
            where = "it must be installed, or be in the current directory or PYTHONPATH"
            return f'there is no module "{error.name}"; {where}'
        return f'module "{module}" cannot be imported: it needs "{error.name}", which is not installed'
    if isinstance(error, TypeError | ValueError) and (not module or module.startswith(".")):
        return 'write your own class as "package.module:Name"'
    said = system_reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f'module "{module}" cannot be imported: {said}'


def _elsewhere(name: str, word: str) -> str:
    """What else has this name, if something other than the expected kind does."""
    homes = (plugins(), policies(), scaling_policies(), engines())
    return next((home.word for home in homes if name in home and home.word != word), "")


@cache
def plugins() -> Registry:
    built_in = {kebab_case(name): made for name, made in _exported(PLUGIN_PACKAGES) if is_plugin(made)}
    wanted = "it fills no role, such as that of a filter (rejections), scorer (scores) or picker (pick)"
    return Registry("plugin type", built_in, is_plugin, wanted)


@cache
def policies() -> Registry:
    """All scheduling policies, by their names in reasons and metrics."""
    built_in = {made.name: made for _, made in _exported(["pointsman.strategies"]) if is_policy(made)}
    wanted = "it needs the methods prioritize and schedule of a SchedulingPolicy"
    return Registry("scheduling policy", built_in, is_policy, wanted)


@cache
def scaling_policies() -> Registry:
    wanted = "it needs a method desired_replicas(view)"
    return Registry("scaling policy", SCALING_POLICIES, is_scaling_policy, wanted, method="desired_replicas")


@cache
def unrecognised() -> Registry:
    """An empty registry. Its error message says what a user's class must have to be a policy or a plugin."""
    wanted = (
        "it has neither the method desired_replicas(view) of a scaling policy, nor prioritize and schedule of a "
        "SchedulingPolicy, nor one of a plugin, such as a filter (rejections), scorer (scores) or picker (pick)"
    )
    return Registry("policy or plugin", {}, lambda _: False, wanted, method="desired_replicas")


@cache
def engines() -> Registry:
    wanted = "it must be a subclass of pointsman.engines.Engine with a launch method"
    return Registry("engine", ENGINES, lambda made: issubclass(made, Engine) and not inspect.isabstract(made), wanted)


def can_be_started(engine: PluginType) -> bool:
    """Whether the engine can start servers, rather than only read running ones."""
    return bool(getattr(engine.build, "launchable", False))


def _exported(packages: Iterable[str]) -> Iterator[tuple[str, type]]:
    for package in packages:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            made = getattr(module, name)
            if isinstance(made, type):
                yield name, made
