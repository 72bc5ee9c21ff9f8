"""Names become classes: built-in ones by their short names, the user's own by package.module:Name."""

import pytest

from pointsman.config import load_picker
from pointsman.config.registry import plugins, policies
from pointsman.errors import ConfigError

PUBLISHED_TYPES = [
    "queue-scorer", "running-requests-size-scorer", "kv-cache-utilization-scorer", "lora-affinity-scorer",
    "token-load-scorer", "prefix-cache-scorer", "active-request-scorer", "load-aware-scorer",
    "header-label-affinity-scorer", "endpoint-attribute-scorer", "session-affinity-scorer",
    "session-affinity-filter", "no-hit-lru-scorer", "latency-scorer", "context-length-aware",
    "approx-prefix-cache-producer", "inflight-load-producer", "decode-filter", "prefill-filter", "encode-filter",
    "label-selector-filter", "utilization-filter", "utilization-detector", "concurrency-detector",
    "prefix-cache-affinity-filter", "slo-headroom-tier-filter", "max-score-picker", "random-picker",
    "weighted-random-picker", "single-profile-handler", "header-profile-handler", "disagg-profile-handler",
    "prefix-based-pd-decider", "always-disagg-pd-decider", "always-disagg-multimodal-decider",
    "static-usage-limit-policy", "priority-holdback-policy", "soft-reflective-ceiling-policy",
    "round-robin-fairness-policy", "global-strict-fairness-policy", "fcfs-ordering-policy", "edf-ordering-policy",
    "slo-deadline-ordering-policy", "probabilistic-admitter", "latency-slo-admitter",
    "topology-extractor", "topology-affinity-filter", "topology-affinity-scorer", "endpoint-attribute-filter",
    "core-metrics-extractor", "program-aware-fairness", "agent-identity", "burst-prefix-cache-producer",
    "mm-embeddings-cache-producer", "mm-embeddings-cache-scorer", "file-discovery",
    "priority-then-time-eviction-order-policy", "sheddable-eviction-filter",
]  # fmt: skip


def test_every_published_type_that_decides_something_is_there() -> None:
    assert [name for name in PUBLISHED_TYPES if name not in plugins()] == []


def test_every_built_in_type_says_what_it_is_for() -> None:
    assert [kind.name for kind in [*plugins(), *policies()] if not kind.summary] == []


def test_every_built_in_parameter_has_a_type() -> None:
    untyped = [
        f"{kind.name}.{name}"
        for kind in [*plugins(), *policies()]
        for name, field in kind.parameters.items()
        if field.annotation is None
    ]
    assert untyped == []


def test_the_policies() -> None:
    assert {kind.name for kind in policies()} == {
        "fifo",
        "priority",
        "slo-aware",
        "cost-optimized",
        "adaptive",
        "power-of-two",
        "prefix",
    }


PUBLISHED_PARAMETERS = {
    "token-load-scorer": {"queueThresholdTokens"},
    "prefix-cache-scorer": {"matchLengthWeight", "matchLengthScaleTokens"},
    "active-request-scorer": {"idleThreshold", "maxBusyScore"},
    "load-aware-scorer": {"threshold"},
    "header-label-affinity-scorer": {"headerName", "labelKey"},
    "endpoint-attribute-scorer": {"attributeKey", "producer", "algorithm"},
    "session-affinity-scorer": {"strategy", "profileName", "encodedEndpointHeaderConfig", "sessionIdConfig"},
    "session-affinity-filter": {"strategy", "profileName", "encodedEndpointHeaderConfig", "sessionIdConfig"},
    "no-hit-lru-scorer": {"lruSize"},
    "latency-scorer": {
        "ttftWeight", "tpotWeight", "headroomSelectionStrategy",
        "compositeKVWeight", "compositeQueueWeight", "compositePrefixWeight",
    },
    "context-length-aware": {"label", "enableFiltering"},
    "approx-prefix-cache-producer": {
        "autoTune", "blockSizeTokens", "blockSize", "maxPrefixTokensToMatch", "maxPrefixBlocksToMatch",
        "lruCapacityPerServer",
    },
    "label-selector-filter": {"matchLabels", "matchExpressions"},
    "utilization-filter": {"conditions", "fallbackOnEmpty"},
    "prefix-cache-affinity-filter": {
        "affinityThreshold", "explorationProbability", "maxTTFTPenaltyMs", "ttftSource", "peakPrefillThroughput",
    },
    "slo-headroom-tier-filter": {"epsilonExploreNeg"},
    "max-score-picker": {"maxNumOfEndpoints"},
    "random-picker": {"maxNumOfEndpoints"},
    "weighted-random-picker": {"maxNumOfEndpoints"},
    "header-profile-handler": {"headerName", "defaultProfile"},
    "disagg-profile-handler": {"stageOrder", "profiles", "deciders"},
    "prefix-based-pd-decider": {"nonCachedTokens", "promptTokens"},
    "utilization-detector": {"queueDepthThreshold", "kvCacheUtilThreshold", "metricsStalenessThreshold", "headroom"},
    "concurrency-detector": {"maxConcurrency", "maxTokenConcurrency", "headroom", "concurrencyMode"},
    "static-usage-limit-policy": {"threshold"},
    "priority-holdback-policy": {"minCeiling", "maxCeiling", "shape", "domain"},
    "probabilistic-admitter": {"queueDepthThreshold", "kvCacheUtilThreshold", "power", "k"},
    "topology-extractor": {"hostname", "rack", "zone", "region"},
    "topology-affinity-filter": {"minAffinity", "topologyProducerName", "peerTopologyHeader"},
    "topology-affinity-scorer": {"topologyProducerName"},
    "endpoint-attribute-filter": {"attribute", "producer", "onMissing", "fallbackOnEmpty", "algorithm"},
    "core-metrics-extractor": {"engineLabelKey", "defaultEngine", "engineConfigs"},
    "program-aware-fairness": {
        "strategy", "lasWeightService", "lasWeightHeadWait", "lasDecayFactor", "lasHalfLifeSeconds",
        "evictionTtlSeconds", "evictionSweepSeconds",
    },
    "agent-identity": {"additionalSessionHeaders"},
    "burst-prefix-cache-producer": {
        "windowDurationMs", "maxPerReplica", "blockSizeTokens", "maxPrefixTokensToMatch", "minColocateBlocks",
        "maxBatchSize",
    },
    "mm-embeddings-cache-producer": {"cacheSizeInMBPerServer", "encodeProfile"},
    "mm-embeddings-cache-scorer": {"producerName"},
    "file-discovery": {"path", "watchFile"},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_every_published_parameter_is_understood(name: str) -> None:
    [kind] = [kind for kind in plugins() if kind.name == name]
    assert set(kind.parameters) >= PUBLISHED_PARAMETERS[name]


# Somebody's own


def test_an_own_class_is_built_with_its_parameters_in_either_spelling(own_module: str) -> None:
    plan = load_picker(f"""\
plugins:
- type: {own_module}:PreferShortNames
  name: camel
  parameters: {{longestName: 5}}
- type: {own_module}:PreferShortNames
  name: snake
  parameters: {{longest_name: 6, favourite: a}}
- type: {own_module}:Anything
  parameters: {{whatever: [1, 2], other_thing: x}}
""")
    assert (plan.plugins["camel"].longest_name, plan.plugins["snake"].longest_name) == (5, 6)
    assert plan.plugins[f"{own_module}:Anything"].settings == {"whatever": [1, 2], "other_thing": "x"}
    assert [name for name, *_ in plan.scheduler.profiles["default"].scorers] == ["camel", "snake"]


def test_an_own_class_may_refer_to_another_plugin_wherever_that_is_listed(own_module: str) -> None:
    plan = load_picker(f"""\
plugins:
- type: {own_module}:Pair
  name: pair
  parameters: {{other: queue-scorer}}
- type: queue-scorer
""")
    assert plan.plugins["pair"].other is plan.plugins["queue-scorer"]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            "{type: 'my_plugins:PreferShortName'}",
            'type: module "my_plugins" has no "PreferShortName"; did you mean "PreferShortNames"?',
        ),
        ("{type: 'my_pluggins:X'}", 'type: there is no module "my_pluggins"; it must be installed, or be in'),
        ("{type: 'broken_plugins:X'}", 'type: module "broken_plugins" cannot be imported: it needs "'),
        ("{type: 'my_plugins:Roleless'}", 'type: "my_plugins:Roleless" is not a plugin type: it fills no role'),
        (
            "{type: 'my_plugins:prefer_short_names'}",
            'type: "my_plugins:prefer_short_names" is not a class but a function',
        ),
        (
            "{type: 'plugins/my_plugins.py:X'}",
            'type: "plugins/my_plugins.py" is a file; name its module, "plugins.my_plugins"',
        ),
        ("{type: slo-aware}", 'type: "slo-aware" is a scheduling policy, not a plugin type; known: '),
        ("{type: panic}", 'type: "panic" is a scaling policy, not a plugin type; known: '),
        ("{type: ':X'}", 'type: write your own class as "package.module:Name"'),
        ("{type: 'my_plugins:'}", 'type: module "my_plugins" has no ""'),
        (
            "{type: 'my_plugins:PreferShortNames', parameters: {longstName: 1}}",
            'parameters.longstName: unknown parameter; did you mean "longestName"?',
        ),
        (
            "{type: 'my_plugins:PreferShortNames', parameters: {longestName: 1, longest_name: 2}}",
            "parameters.longest_name: is the same parameter as longestName; write it once",
        ),
        (
            "{type: 'my_plugins:PreferShortNames', parameters: {longestName: 0}}",
            "parameters.longestName: longestName must be positive, found 0",
        ),
        ("{type: 'my_plugins:Pair'}", 'parameters: parameter "other" is missing'),
        ("{type: 'my_plugins:Broken'}", "my_plugins:Broken cannot be made: KeyError: 'no such luck'"),
    ],
)
def test_mistakes_with_own_classes(own_module: str, entry: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_picker(f"plugins:\n- {entry}\n")
    [found] = raised.value.problems
    text = str(found)
    assert text.startswith("<text>:2: plugins[0]")
    assert text.removeprefix("<text>:2: plugins[0]").lstrip(".: ").startswith(problem)
