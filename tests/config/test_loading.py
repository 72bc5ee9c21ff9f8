"""Documents become plans: what they say, what they leave out, and what is never applied."""

from pathlib import Path

import pytest

from pointsman.config import PickerPlan, PointsmanPlan, build_policy, load, load_manifest, load_picker
from pointsman.errors import ConfigError
from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.plugins import DispatchListener
from pointsman.routing.producers import ApproxPrefixCacheProducer, InflightLoadProducer
from pointsman.routing.queue import ConcurrencyDetector, UtilizationDetector
from pointsman.selection import Cycle, Profile, SchedulingResult, SingleProfileHandler
from pointsman.strategies import FIFOPolicy, SLOAwarePolicy
from pointsman.types import ExecutionInstance, RequestMetadata

PUBLISHED = sorted((Path(__file__).parent / "published").glob("*.yaml"))


def scorers(profile: Profile[Endpoint]) -> dict[str, float]:
    return {name: weight for name, _, weight, *_ in profile.scorers}


DEMANDS = ["serves-model", "is-healthy", "has-room", "within-budget"]


def filters(profile: Profile[Endpoint]) -> list[str]:
    """Those after the demands that stand before every profile."""
    names = [name for name, *_ in profile.filters]
    assert names[: len(DEMANDS)] == DEMANDS
    return names[len(DEMANDS) :]


# Published documents


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_published_documents_load_as_they_are_and_schedule(file: Path) -> None:
    plan = load_picker(file)
    fleet = EndpointTable([ExecutionInstance(instance_id=name, labels={"llm-d.ai/role": "both"}) for name in "abc"])
    result = plan.scheduler.run(Cycle(RequestMetadata("r", prompt="hello")), fleet.roster)
    assert isinstance(result, SchedulingResult)
    assert str(result.target) in "abc"


def test_names_without_effect_give_warnings() -> None:
    warnings = load_picker(Path(__file__).parent / "published" / "precise-prefix.yaml").warnings
    found = {warning.field: warning.message for warning in warnings}
    counted = "the gateway counts prompt tokens, or estimates them from bytes"
    assert found["plugins[0]"] == f"token-producer has no effect: {counted}"
    assert "prefixMatchInfoProducerName" in "".join(found)


def test_flow_control_as_published() -> None:
    plan = load_picker(Path(__file__).parent / "published" / "flow-control.yaml")
    flow = plan.flow_control
    assert flow is not None
    assert (flow.max_requests, flow.max_bytes) == (2000, 4 * 2**30)
    assert (flow.request_ttl_s, flow.no_endpoint_request_ttl_s) == (30.0, 600.0)
    assert flow.make_eviction is not None
    assert isinstance(flow.detector, ConcurrencyDetector)
    assert plan.saturation_detector is flow.detector
    assert flow.limits is plan.plugins["hold-back"]
    high, low = flow.bands
    assert (high.priority, high.max_requests, high.max_bytes) == (100, 500, 10**9)
    assert high.fairness is plan.plugins["round-robin-fairness-policy"]
    assert high.ordering is plan.plugins["fcfs-ordering-policy"]
    assert low.ordering is plan.plugins["edf-ordering-policy"]
    assert (flow.default_band.max_requests, flow.default_band.max_bytes) == (5000, 2**30)
    assert flow.default_negative_band is not None
    assert flow.default_negative_band.max_requests == 50
    assert len(flow.build()) == 0


# What a document leaves out


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "{}", "kind: EndpointPickerConfig\n", "plugins:\nschedulingProfiles:\n"]
)
def test_an_empty_document_is_the_default(text: str) -> None:
    plan = load_picker(text)
    assert list(plan.scheduler.profiles) == ["default"]
    profile = plan.scheduler.profiles["default"]
    assert scorers(profile) == {"queue-scorer": 2.0, "kv-cache-utilization-scorer": 2.0, "prefix-cache-scorer": 3.0}
    assert profile.picker_name == "max-score-picker"
    assert isinstance(plan.scheduler.handler, SingleProfileHandler)
    assert [type(producer) for producer in plan.scheduler.producers] == [ApproxPrefixCacheProducer]
    assert isinstance(plan.saturation_detector, UtilizationDetector)
    assert plan.flow_control is None
    assert plan.gates == {"flowControl": False, "haPopulateNonLeaderDatastore": True}


def test_without_profiles_everything_declared_is_in_one() -> None:
    plan = load_picker("""\
plugins:
- type: utilization-detector
- type: context-length-aware
  parameters: {enableFiltering: true}
- type: queue-scorer
  name: q
- type: random-picker
- type: probabilistic-admitter
""")
    profile = plan.scheduler.profiles["default"]
    assert filters(profile) == ["utilization-detector", "context-length-aware"]
    assert scorers(profile) == {"context-length-aware": 1.0, "q": 1.0}
    assert profile.picker_name == "random-picker"
    assert "probabilistic-admitter" in plan.plugins


def test_an_injected_detector_is_not_a_filter() -> None:
    plan = load_picker("plugins:\n- type: queue-scorer\n")
    assert isinstance(plan.saturation_detector, UtilizationDetector)
    assert filters(plan.scheduler.profiles["default"]) == []


def test_a_profile_without_a_picker_gets_the_declared_one_and_keeps_a_weight_of_zero() -> None:
    plan = load_picker("""\
plugins:
- type: weighted-random-picker
  name: lottery
- type: queue-scorer
- type: probabilistic-admitter
schedulingProfiles:
- name: p
  plugins:
  - pluginRef: queue-scorer
    weight: 0
  - pluginRef: probabilistic-admitter
""")
    profile = plan.scheduler.profiles["p"]
    assert profile.picker_name == "lottery"
    assert scorers(profile) == {"queue-scorer": 0.0}


def test_the_weight_of_a_profile_overrides_that_of_the_plugin() -> None:
    plugins = "plugins:\n- {type: queue-scorer, weight: 2}\n- {type: load-aware-scorer, weight: 3}\n"
    bare = load_picker(plugins)
    assert scorers(bare.scheduler.profiles["default"]) == {"queue-scorer": 2.0, "load-aware-scorer": 3.0}
    profile = "schedulingProfiles:\n- name: p\n  plugins:\n  - pluginRef: queue-scorer\n"
    entry = "  - {pluginRef: load-aware-scorer, weight: 5}\n"
    plan = load_picker(plugins + profile + entry)
    assert scorers(plan.scheduler.profiles["p"]) == {"queue-scorer": 2.0, "load-aware-scorer": 5.0}


def test_several_profiles_without_pickers_share_the_injected_one() -> None:
    plan = load_picker("plugins:\n- type: header-profile-handler\nschedulingProfiles:\n- name: a\n- name: b\n")
    a, b = plan.scheduler.profiles.values()
    assert a.picker is b.picker is plan.plugins["max-score-picker"]


def test_needed_producers_are_injected_and_run_first() -> None:
    plan = load_picker("plugins:\n- type: token-load-scorer\n")
    assert [type(one) for one in plan.scheduler.producers] == [ApproxPrefixCacheProducer, InflightLoadProducer]
    listed_backwards = load_picker("plugins:\n- type: inflight-load-producer\n- type: approx-prefix-cache-producer\n")
    kinds = [type(one) for one in listed_backwards.scheduler.producers]
    assert kinds == [ApproxPrefixCacheProducer, InflightLoadProducer]


def test_a_declared_producer_is_not_injected_again() -> None:
    plan = load_picker("plugins:\n- type: prefix-cache-scorer\n- {type: approx-prefix-cache-producer, name: mine}\n")
    assert plan.scheduler.producers == (plan.plugins["mine"],)
    assert isinstance(plan.plugins["mine"], DispatchListener)


def test_types_without_parameters_ignore_theirs_with_a_warning() -> None:
    plan = load_picker("plugins:\n- type: queue-scorer\n  parameters: {whatever: 1}\n")
    [warning] = plan.warnings
    assert str(warning) == "<text>:3: warning: plugins[0].parameters: these have no effect: queue-scorer has none"


# Gates


@pytest.mark.parametrize(
    ("gates", "on"),
    [("[]", False), ("[flowControl]", True), ("[flowControl=true]", True), ("[flowControl=false]", False)],
)
def test_the_gate_enables_flow_control(gates: str, on: bool) -> None:
    plan = load_picker(f"featureGates: {gates}\n")
    assert (plan.flow_control is not None) is on


def test_with_the_gate_off_only_the_detector_has_an_effect() -> None:
    plan = load_picker("""\
plugins:
- type: concurrency-detector
flowControl:
  defaultPriorityBand: {fairnessPolicyRef: nobody}
  saturationDetector: {pluginRef: concurrency-detector}
""")
    assert isinstance(plan.saturation_detector, ConcurrencyDetector)
    assert plan.flow_control is None
    assert any("feature gate flowControl is off" in warning.message for warning in plan.warnings)


def test_the_old_field_for_the_detector_is_read_unless_the_new_one_is_set() -> None:
    detectors = "plugins:\n- {type: concurrency-detector, name: new}\n- {type: concurrency-detector, name: old}\n"
    old = "saturationDetector: {pluginRef: old}\n"
    new = "flowControl: {saturationDetector: {pluginRef: new}}\n"
    one = load_picker(detectors + old)
    both = load_picker(detectors + old + new)
    assert one.saturation_detector is one.plugins["old"]
    assert both.saturation_detector is both.plugins["new"]


def test_flow_control_defaults() -> None:
    flow = load_picker("featureGates: [flowControl]\n").flow_control
    assert flow is not None
    assert (flow.max_requests, flow.max_bytes, flow.bands) == (None, None, ())
    assert (flow.request_ttl_s, flow.no_endpoint_request_ttl_s) == (60.0, 60.0)
    assert (flow.default_band.max_requests, flow.default_band.max_bytes) == (5000, 10**9)
    assert flow.make_eviction is None


# All or nothing


def test_two_loads_share_nothing() -> None:
    text = "plugins:\n- type: prefix-cache-scorer\n"
    one, two = load_picker(text), load_picker(text)
    assert {id(plugin) for plugin in one.plugins.values()}.isdisjoint(id(plugin) for plugin in two.plugins.values())


def test_a_bad_file_has_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("plugins:\n- type: queue-scorer\n")
    running = load(file)
    assert isinstance(running, PickerPlan)
    before = dict(running.plugins)
    file.write_text("plugins:\n- type: queue-scorer\n- type: nonsense\n")
    with pytest.raises(ConfigError) as raised:
        load(file)
    assert str(raised.value).startswith(f"{file}:3: plugins[1].type: ")
    assert running.plugins == before


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: there is no such file"),
        (b"a: 1\nb: \xff\n", ":2: cannot be read: it is not UTF-8 text; save it as UTF-8"),
        (b"\x7fELF\x00", ": cannot be read: it is a binary file, not text"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, problem: str) -> None:
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load(file)
    assert str(raised.value).startswith(str(file))
    assert problem in str(raised.value)


def test_a_directory_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: it is a directory"):
        load(tmp_path)


# Our own document


def test_each_deployment_has_its_own_scheduling(own_module: str) -> None:
    plan = load(f"""\
kind: Pointsman
deployments:
- name: chat
  model: llama-70b
  endpoints: &servers [{{url: "http://localhost:8000"}}]
  scheduling: {{policy: slo-aware, parameters: {{urgentBelowMs: 250}}}}
- name: batch
  model: llama-8b
  endpoints: *servers
  scheduling: {{policy: "{own_module}:MyPolicy", parameters: {{patience_s: 9}}}}
- name: search
  model: e5
  endpoints: *servers
  scheduling:
    config:
      plugins:
      - type: queue-scorer
- name: plain
  model: tiny
  endpoints: *servers
""")
    assert isinstance(plan, PointsmanPlan)
    chat, batch, search, plain = plan.deployments
    assert (chat.name, chat.model, chat.picker) == ("chat", "llama-70b", None)
    assert isinstance(chat.policy, SLOAwarePolicy)
    assert batch.policy is not None
    assert batch.policy.patience_s == 9.0  # type: ignore[attr-defined]
    assert search.picker is not None
    assert scorers(search.picker.scheduler.profiles["default"]) == {"queue-scorer": 1.0}
    assert plain.picker is not None
    assert scorers(plain.picker.scheduler.profiles["default"]) == {"slo-miss-scorer": 1.0}
    assert (search.decided_by, plain.decided_by) == ("endpoint picker", "slo-miss")


def test_an_empty_config_is_the_published_default() -> None:
    plan = load("""\
kind: Pointsman
deployments:
- name: chat
  model: m
  endpoints: [{url: "http://localhost:8000"}]
  scheduling: {config: {}}
""")
    assert isinstance(plan, PointsmanPlan)
    [chat] = plan.deployments
    assert chat.picker is not None
    published = {"queue-scorer": 2.0, "kv-cache-utilization-scorer": 2.0, "prefix-cache-scorer": 3.0}
    assert scorers(chat.picker.scheduler.profiles["default"]) == published


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            "model: m, scheduling: {policy: slo-awre}",
            'scheduling.policy: there is no scheduling policy "slo-awre"; did you mean "slo-aware"?',
        ),
        (
            "model: m, scheduling: {policy: fifo, parameters: {a: 1}}",
            "scheduling.parameters.a: unknown parameter; known: pricePerGpuHour",
        ),
        (
            "model: m, scheduling: {policy: adaptive, parameters: {lowLoad: 2}}",
            "scheduling.parameters.lowLoad: lowLoad must be between 0 and highLoad",
        ),
        ("model: m, scheduling: {parameters: {a: 1}}", "scheduling.parameters: belong to a policy"),
        ("model: m, scheduling: {policy: fifo, config: {}}", "scheduling: has a policy and a config; keep one"),
        (
            "model: m, scheduling: {config: {plugins: [{type: nope}]}}",
            'scheduling.config.plugins[0].type: there is no plugin type "nope"',
        ),
        (
            "model: m, scheduling: {policy: 'my_plugins:Roleless'}",
            'scheduling.policy: "my_plugins:Roleless" is not a scheduling policy',
        ),
        ("model: ''", "model: must not be empty"),
        ("scheduling: {policy: fifo}", 'field "model" is missing'),
        ("model: m, replica: 2", 'replica: unknown field; did you mean "replicas"?'),
    ],
)
def test_mistakes_in_deployments(own_module: str, fields: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_manifest(f"kind: Pointsman\ndeployments:\n- {{name: a, endpointsFile: servers.yaml, {fields}}}\n")
    [found] = raised.value.problems
    assert str(found).removeprefix("<text>:3: deployments[0]").lstrip(".: ").startswith(problem)


def test_names_of_deployments_are_unique() -> None:
    line = "- {name: a, model: %s, engine: {type: simulated}}\n"
    with pytest.raises(
        ConfigError, match=r'<text>:3: deployments\[1\].name: there is already a deployment "a" on line 2'
    ):
        load_manifest("deployments:\n" + line % "m" + line % "n")


def test_a_missing_kind_is_inferred_from_the_fields() -> None:
    assert isinstance(load("deployments: []\n"), PointsmanPlan)
    assert isinstance(load("plugins: []\n"), PickerPlan)


def test_a_document_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match='unknown kind "Pointsman"'):
        load_picker("kind: Pointsman\n")


# Policies in code


def test_build_policy(own_module: str) -> None:
    assert isinstance(build_policy("fifo"), FIFOPolicy)
    assert isinstance(build_policy("slo-aware", {"urgentBelowMs": 10}), SLOAwarePolicy)
    assert type(build_policy(f"{own_module}:MyPolicy")).__name__ == "MyPolicy"


def test_build_policy_reports_all_problems() -> None:
    with pytest.raises(ConfigError) as raised:
        build_policy("slo-aware", {"urgentBelow": 1, "urgentShare": "half"})
    assert str(raised.value).splitlines() == [
        'parameters.urgentBelow: unknown parameter; did you mean "urgentBelowMs"?',
        'parameters.urgentShare: expected a number, found "half"',
    ]


# Attributes and locations

COOL = "{type: endpoint-attribute-scorer, parameters: {attributeKey: heat, algorithm: {type: linear_lower_is_better}}}"
HEAT = "{name: vllm, customMetrics: [{attributeKey: heat, metricSpec: gpu_heat}]}"


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ("", True),
        (f"- {{type: core-metrics-extractor, parameters: {{engineConfigs: [{HEAT}]}}}}\n", False),
        ("- {type: core-metrics-extractor}\n", True),
    ],
)
def test_an_attribute_that_no_plugin_gives_is_a_warning(more: str, warned: bool) -> None:
    warnings = load_picker(f"plugins:\n- {COOL}\n{more}").warnings
    assert [warning.message for warning in warnings if "no endpoint has heat" in warning.message] == (
        [warnings[0].message] if warned else []
    )
    assert bool(warnings) is warned


def test_numbers_of_the_fleet_need_no_producer() -> None:
    document = f"plugins:\n- {COOL.replace('heat', 'waiting_queue_size')}\n- {COOL.replace('heat', 'load')}\n"
    named = document.replace("{type: endpoint", "{name: other, type: endpoint", 1)
    assert load_picker(named).warnings == ()


def test_topology_plugins_use_the_extractor_that_is_declared() -> None:
    def rack(more: str) -> str:
        plan = load_picker(f"plugins:\n- type: topology-affinity-filter\n{more}")
        locator = plan.plugins["topology-affinity-filter"]._locator
        labels = {"cabinet": "c", "topology.kubernetes.io/rack": "r"}
        return str(locator.location(ExecutionInstance(instance_id="i", labels=labels)).rack)

    assert rack("") == "r"
    assert rack("- {type: topology-extractor, parameters: {rack: cabinet}}\n") == "c"
    other = "- {type: topology-extractor, name: mine, parameters: {rack: cabinet}}\n"
    assert rack(other) == "r"
    assert rack(f"  parameters: {{topologyProducerName: mine}}\n{other}") == "c"
    with pytest.raises(ConfigError, match='"queue-scorer" is not a locator'):
        rack("  parameters: {topologyProducerName: queue-scorer}\n- type: queue-scorer\n")


def test_costs_that_rest_on_an_assumption_give_a_warning() -> None:
    text = """\
kind: Pointsman
deployments:
- name: chat
  model: m
  endpoints: [{{url: "http://localhost:8000"{endpoint}}}]
  scheduling: {{policy: cost-optimized{parameters}}}
  price: {price}
"""
    said = "costs assume 2 per GPU hour, and are unknown on CPUs; set price.perGpuHour or price.perInstanceHour"
    bare = load(text.format(endpoint="", parameters="", price="{perMillionInputTokens: 1}"))
    assert [warning.message for warning in bare.warnings] == [said]
    for endpoint, parameters, price in (
        (", pricePerHour: 3", "", "{}"),
        ("", ", parameters: {pricePerGpuHour: 3}", "{}"),
        ("", "", "{perInstanceHour: 3}"),
        ("", "", "{perGpuHour: 0}"),
    ):
        assert load(text.format(endpoint=endpoint, parameters=parameters, price=price)).warnings == ()
