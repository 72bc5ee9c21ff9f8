"""The body of an `EndpointPickerConfig` -> a plan, with everything that it may leave out."""

from collections.abc import Iterator

from pointsman.config.building import Plugins
from pointsman.config.flow import FlowControls, saturation_detector
from pointsman.config.plan import PickerPlan
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.profiles import Profiles, with_defaults
from pointsman.config.published import ELSEWHERE, FEATURE_GATES
from pointsman.config.registry import plugins as plugin_registry
from pointsman.config.schema import FlowControlSpec, PickerBody
from pointsman.config.validation import usable
from pointsman.config.wording import found
from pointsman.errors import did_you_mean
from pointsman.routing.queue import UtilizationDetector

MEASURED_S = 1.0
"""Numbers of instances that run are at most so old, if all is well."""


def picker_plan(body: PickerBody, problems: Problems, path: FieldPath, *, queues: bool = False) -> PickerPlan | None:
    """The plan; None if anything is wrong with the document. `queues`: requests wait also without flow control."""
    specs, profile_specs = with_defaults(body)
    plugins = Plugins(plugin_registry(), problems)
    for place, spec in usable(specs):
        plugins.declare(spec, (*path, "plugins", place))
    plugins.built()
    gates = _gates(body, problems, path)
    detector = saturation_detector(body, plugins, path)
    scheduler = Profiles(plugins, problems, path).scheduler(profile_specs)
    flow_control = None
    if gates["flowControl"]:
        flow_control = FlowControls(plugins, problems, path).plan(body.flow_control or FlowControlSpec(), detector)
    elif body.flow_control and _has_settings(body.flow_control):
        but = "" if queues else ", except for its saturationDetector"
        plugins.note(f"flowControl is ignored{but}: the feature gate flowControl is off")
    if queues and gates["flowControl"] and isinstance(detector, UtilizationDetector) and detector.oldest_s < MEASURED_S:
        plugins.note(
            f"the saturation detector takes numbers older than {detector.oldest_s:g}s for saturated, and instances are "
            "measured less often: requests wait for the next numbers; give it metricsStalenessThreshold: 3s"
        )
    if queues and not gates["flowControl"] and _names_a_detector(body):
        plugins.note(
            "saturationDetector is ignored: the feature gate flowControl is off, so requests wait for room only"
        )
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
        queues=queues,
        notes=tuple(plugins.notes),
    )


def _gates(body: PickerBody, problems: Problems, path: FieldPath) -> dict[str, bool]:
    gates = dict(FEATURE_GATES)
    for place, text in usable(body.feature_gates):
        name, equals, value = text.partition("=")
        field = (*path, "featureGates", place)
        if name not in FEATURE_GATES:
            problems.add(field, f'unknown feature gate "{name}"{did_you_mean(name, FEATURE_GATES)}')
        elif equals and value.lower() not in ("true", "false"):
            problems.add(field, f"expected {name}, {name}=true or {name}=false, found {found(text)}")
        else:
            gates[name] = value.lower() != "false"
    return gates


def _names_a_detector(body: PickerBody) -> bool:
    return bool(body.saturation_detector or (body.flow_control and body.flow_control.saturation_detector))


def _has_settings(spec: FlowControlSpec) -> bool:
    return spec != FlowControlSpec(saturation_detector=spec.saturation_detector)


def _other_references(body: PickerBody, path: FieldPath) -> Iterator[tuple[str, FieldPath]]:
    """References to plugins that do nothing here: they must still be spelled right."""
    handler, layer = body.request_handler, body.data_layer
    if handler and handler.parsers:
        for place, parser in usable(handler.parsers):
            yield parser.plugin_ref, (*path, "requestHandler", "parsers", place, "pluginRef")
    elif body.parser:
        yield body.parser.plugin_ref, (*path, "parser", "pluginRef")
    for place, source in usable(layer.sources if layer else ()):
        field: FieldPath = (*path, "dataLayer", "sources", place)
        yield source.plugin_ref, (*field, "pluginRef")
        for number, extractor in usable(source.extractors):
            yield extractor.plugin_ref, (*field, "extractors", number, "pluginRef")
