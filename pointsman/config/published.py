"""Names of the published endpoint picker that documents use and that have no plugin of their own here."""

_READ = "requests are read by the gateway"
_MEASURED = "the runtime measures endpoints"

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
    "core-metrics-extractor": _MEASURED,
    "model-server-protocol-metrics": _MEASURED,
    "models-data-source": _MEASURED,
    "models-data-extractor": _MEASURED,
    "endpoint-notification-source": "plugins are told when endpoints leave",
    "token-producer": "the gateway counts prompt tokens, or estimates them from bytes",
    "tokenizer": "the gateway counts prompt tokens, or estimates them from bytes",
    "session-id-producer": "plugins read the session from the request themselves",
    "precise-prefix-cache-producer": "prefix matches come from approx-prefix-cache-producer",
    "predicted-latency-producer": "no latencies are predicted; whoever reads them does as without",
    "disagg-headers-handler": "disagg-profile-handler sets the headers itself",
    "prefill-header-handler": "disagg-profile-handler sets the headers itself",
}
"""Types that configure nothing here, and why. Documents may declare them; the rest of the document counts."""

REPLACED: dict[str, str] = {
    "by-label": "label-selector-filter",
    "by-label-selector": "label-selector-filter",
    "kv-cache-scorer": "kv-cache-utilization-scorer",
    "pd-profile-handler": "disagg-profile-handler",
    "data-parallel-profile-handler": "single-profile-handler",
    "precise-prefix-cache-scorer": "prefix-cache-scorer",
}
"""Old types and what to use instead. They decide something, so they cannot just be ignored."""

PARAMETERS_ELSEWHERE = frozenset(
    {"prefixMatchInfoProducerName", "inFlightLoadProducerName", "latencyPredictionInfoProducerName"}
)
"""Parameters of many types that choose among producers of one fact. Here each fact has one producer."""

STRICT_WITHOUT_PARAMETERS = frozenset({"soft-reflective-ceiling-policy"})
"""Types without parameters ignore what they are given; these do not."""

FEATURE_GATES: dict[str, bool] = {"flowControl": False, "haPopulateNonLeaderDatastore": True}
"""The gates there are, and whether they are on if nobody says."""

_PREFIX = "approx-prefix-cache-producer"
_LOAD = "inflight-load-producer"
_LATENCY = "predicted-latency-producer"

NEEDS: dict[str, tuple[str, ...]] = {
    "prefix-cache-scorer": (_PREFIX,),
    "no-hit-lru-scorer": (_PREFIX,),
    "prefix-based-pd-decider": (_PREFIX,),
    "prefix-cache-affinity-filter": (_PREFIX, _LOAD),
    "token-load-scorer": (_PREFIX, _LOAD),
    "active-request-scorer": (_LOAD,),
    "utilization-filter": (_LOAD,),
    "concurrency-detector": (_LOAD,),
    "latency-scorer": (_PREFIX, _LATENCY),
    "slo-headroom-tier-filter": (_LATENCY,),
    "latency-slo-admitter": (_LATENCY,),
}
"""The producers that a type's facts come from. They run in this order: load is counted net of prefix matches."""
