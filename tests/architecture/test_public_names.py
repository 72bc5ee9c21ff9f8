"""What users may rely on: the public names of each package. Changing this list is changing the API."""

import importlib

import pytest

PUBLIC = {
    "pointsman": {
        "Application", "BuildError", "ControlPlaneManager", "ExecutionInstance", "InputNode", "ParallelismType",
        "Reason", "RequestMetadata", "RequestPriority", "SchedulingDecision", "SchedulingPolicy", "Strategy", "batch",
        "build", "current", "deployment", "from_ray_dag", "model", "record_metric",
    },
    "pointsman.selection": {
        "Column", "Cycle", "FallbackProfileHandler", "Filter", "Key", "LabelExpression", "LabelSelector",
        "MaxScorePicker", "PerMembers", "Picker", "Positions", "PowerOfTwoPicker", "Producer", "Profile",
        "ProfileFailure", "ProfileHandler", "ProfileResult", "RandomPicker", "Ranked", "Rejected", "RejectedEach",
        "Roster", "Scheduler", "SchedulingFailure", "SchedulingResult", "Scored", "Scorer", "SingleProfileHandler",
        "SplitMix64", "Trace", "Weighted", "WeightedRandomPicker", "mixed", "plugin_name",
    },
    "pointsman.routing.filters": {
        "DecodeFilter", "EncodeFilter", "EndpointAttributeFilter", "HasRoom", "IsHealthy", "LabelSelectorFilter",
        "MeetsDeadline", "PrefillFilter", "PrefixCacheAffinityFilter", "ServesModel", "SessionAffinityFilter",
        "SloHeadroomTierFilter", "TopologyAffinityFilter", "UtilizationFilter", "WithinBudget",
    },
    "pointsman.routing.scorers": {
        "ActiveRequestScorer", "Cheapest", "ContextLengthAware", "EndpointAttributeScorer", "Fastest",
        "HeaderLabelAffinityScorer", "KvCacheUtilizationScorer", "LatencyScorer", "LeastLoaded", "LoadAwareScorer",
        "LoraAffinityScorer", "MmEmbeddingsCacheScorer", "NoHitLruScorer", "PendingWorkScorer", "PrefixCacheScorer",
        "QueueScorer", "SloMissScorer",
        "RunningRequestsSizeScorer", "SessionAffinityScorer", "TokenLoadScorer", "TopologyAffinity",
        "TopologyAffinityScorer",
    },
    "pointsman.routing.handlers": {
        "AlwaysDisaggMultimodalDecider", "AlwaysDisaggPdDecider", "DisaggProfileHandler", "HeaderProfileHandler",
        "PrefixBasedPdDecider",
    },
    "pointsman.routing.producers": {
        "ApproxPrefixCacheProducer", "BurstPrefixCacheProducer", "InflightLoadProducer", "MmEmbeddingsCacheProducer",
        "PredictedLatencyProducer",
    },
    "pointsman.strategies": {
        "AdaptivePolicy", "CostOptimizedPolicy", "FIFOPolicy", "PowerOfTwoPolicy", "PrefixPolicy", "PriorityPolicy",
        "Rule", "SchedulingPolicy", "SLOAwarePolicy", "Strategy", "rule",
    },
    "pointsman.placement": {
        "Arrangement", "Ask", "Claim", "DefragmentationPlan", "EngineAbility", "Fleet", "Move", "Need", "Place",
        "Placed", "Placer", "PreemptionPlan", "Refused", "Tier", "defragment", "preempt", "victims",
    },
    "pointsman.placement.estimate": {
        "Architecture", "Estimate", "Fit", "Model", "Part", "Serving", "Tensor", "UnreadableModel", "estimate", "fit",
        "kv_tokens", "read_model", "usable_bytes",
    },
    "pointsman.pipeline": {
        "Access", "Call", "Flow", "FromInput", "FromStep", "Graph", "HandleTo", "Node", "NodeKind", "NodeOptions",
        "Run", "Step", "flow_of",
    },
    "pointsman.scaling": {
        "ApplicationScalingPolicy", "ApplicationView", "Budget", "DeploymentView", "Guard", "MaxOf", "Measurements",
        "MinOf", "Panic", "PolicyFunction", "Predictive", "QueueDepth", "Rate", "SCALING_POLICIES", "ScalingLimits",
        "ScalingPolicy", "ScalingRecord", "ScheduleEntry", "Scheduled", "SloAttainment", "Stay", "TargetOngoing",
        "TokenThroughput", "TooSlow", "Window", "Wish", "invoke", "invoke_application", "by_node", "policy_name",
        "windows_of",
    },
    "pointsman.engines": {
        "Command", "ENGINES", "Engine", "LaunchSpec", "LlamaCpp", "OpenAI", "ProbeRequest", "ProcessEnd", "Python",
        "Samples",
        "Sglang", "Simulated", "Vllm",
    },
    "pointsman.control": {
        "Controller", "Desired", "DesiredDeployment", "DesiredEndpoint", "DesiredEngine", "InstanceStatus",
        "Lifecycle", "Phase", "ReconcileStep", "What",
    },
    "pointsman.runtimes.inprocess": {"ControlPlaneManager"},
    "pointsman.integrations.ray_serve": {
        "PointsmanRouter", "RefusedByPolicy", "ServeInputNode", "explain", "from_ray_dag", "pipeline",
        "pointsman_routing", "pointsman_scaling", "status", "to_ray_serve",
    },
    "pointsman.lab.check": {"Broken", "Report", "check"},
}  # fmt: skip


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_these(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    assert all(hasattr(module, name) for name in module.__all__)
    assert module.__doc__, "a package says what enters, what leaves and the one rule of the room"
