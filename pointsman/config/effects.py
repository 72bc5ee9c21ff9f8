"""Parts of a document that have no effect: unused plugins, weights of plugins without scores, unknown attributes.

Enters: a document whose plugins are built. Leaves: warnings. Fields and plugin parameters that never have an effect are
marked `NoEffect` where they are declared. The registry lists the types that never have an effect.
"""

from typing import Any

from pointsman.config.building import Declared, Plugins
from pointsman.config.plan import FlowControlPlan
from pointsman.config.problems import FieldPath, Problems, a, listed
from pointsman.config.registry import roles_of
from pointsman.config.schema import PickerBody
from pointsman.config.validation import INVALID, usable
from pointsman.routing.attributes import CORE_METRICS
from pointsman.routing.endpoints import Extractor
from pointsman.routing.extractors import CoreMetricsExtractor
from pointsman.routing.filters import EndpointAttributeFilter
from pointsman.routing.scorers import EndpointAttributeScorer
from pointsman.selection import Scorer

BY_ITSELF = {"profile handler", "producer", "extractor", "admitter"}
"""Roles that take effect as soon as a plugin with the role is declared."""
LISTENS = {"dispatch listener", "departure listener", "header writer", "response header writer"}
"""Roles that take effect once declared if the plugin has no other role: a scorer listens only for its own scores."""
WITH_FLOW_CONTROL = ("flow namer", "eviction filter", "eviction order")
"""Roles that take effect once declared if flow control is on. The last two also need eviction."""


def warn_of_no_effect(
    body: PickerBody, plugins: Plugins, problems: Problems, path: FieldPath, flow: FlowControlPlan | None
) -> None:
    _check_attributes(plugins, problems)
    _check_weights(body, plugins, problems, path)
    for one in plugins.declared.values():
        plugin = plugins.get(one.name) if not one.injected and not one.ignored else INVALID
        if plugin is not INVALID and one.name not in plugins.used and (why := _idle(plugin, flow)):
            problems.warn(one.path, f"{one.name} has no effect: {why}")


def _idle(plugin: Any, flow: FlowControlPlan | None) -> str:
    """Why a plugin that nothing refers to has no effect; empty if the plugin has an effect."""
    roles = roles_of(plugin)
    if BY_ITSELF.intersection(roles) or LISTENS.issuperset(roles):
        return ""
    roles = [role for role in roles if role not in LISTENS]
    if any(role in WITH_FLOW_CONTROL for role in roles):
        if flow is None:
            return "the feature gate flowControl is off"
        evicts = "flow namer" in roles or flow.make_eviction is not None
        return "" if evicts else "flowControl.enableEviction is false"
    return f"it is {a(listed(roles))}, and nothing refers to it"


def _check_weights(body: PickerBody, plugins: Plugins, problems: Problems, path: FieldPath) -> None:
    """Warn about weights of plugins without scores."""
    for index, profile in usable(body.scheduling_profiles):
        for number, entry in usable(profile.plugins):
            field = (*path, "schedulingProfiles", index, "plugins", number, "weight")
            declared = plugins.declared.get(entry.plugin_ref) if entry.plugin_ref is not INVALID else None
            if entry.weight is not None and declared is not None and not _scores(declared):
                problems.warn(field, f"has no effect: {declared.name} is not a scorer")
    for one in plugins.declared.values():
        field = (*one.path, "weight")
        if not one.injected and problems.written(field) and not _scores(one):
            problems.warn(field, f"has no effect: {one.name} is not a scorer")


def _scores(one: Declared) -> bool:
    """Whether a plugin has scores. True for a plugin that could not be built: that problem has been reported."""
    return one.ignored or one.type is None or isinstance(one.type.build, Scorer)


def _check_attributes(plugins: Plugins, problems: Problems) -> None:
    """Warn about attributes that no plugin provides."""
    built = plugins.built()
    extractors = {name: one for name, one in built.items() if isinstance(one, Extractor)}
    others = [name for name, one in extractors.items() if not isinstance(one, CoreMetricsExtractor)]
    given = {key for one in extractors.values() if isinstance(one, CoreMetricsExtractor) for key in one.attributes}
    for name, plugin in built.items():
        if not isinstance(plugin, EndpointAttributeScorer | EndpointAttributeFilter):
            continue
        read, declared = plugin.attribute, plugins.declared[name]
        core = read.producer in ("", CORE_METRICS)
        if read.is_attribute and not (read.key in given if core and not others else core or read.producer in others):
            message = (
                f"has no effect: no endpoint has {read.key}; declare it in customMetrics of {CORE_METRICS}, or a plugin"
                " that extracts it"
            )
            problems.warn((*declared.path, "parameters"), message)
