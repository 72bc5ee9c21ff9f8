"""The `placement` of a deployment, and the related parameters of its engine -> what its instances ask for.

Enters: the section, the engine. Leaves: an ask, or problems. The one rule: if the section and the engine differ, or if
two fields contradict each other, that is a problem. No field is ignored silently.
"""

from pathlib import Path
from typing import Any

import msgspec

from pointsman.config.machines import ResourcesSpec
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.schema import PlacementSpec
from pointsman.config.validation import INVALID, usable
from pointsman.engines import Engine
from pointsman.errors import PointsmanError
from pointsman.parameters import camel_case, packaged
from pointsman.placement.asks import Ask, EngineDemand, Need, PlacementRules, Tier
from pointsman.placement.estimate import UnreadableModel, estimate
from pointsman.selection import LabelSelector

DEFAULT_CONTEXT = 8192
"""Tokens per request, if neither the document nor the engine sets a number."""
TIERS = {tier.written: tier for tier in Tier}
ALLOWED_BY = {
    Tier.SEVERAL_GPUS: "several_gpus",
    Tier.SEVERAL_WORKERS: "several_workers",
    Tier.PARTIAL_OFFLOAD: "partial_offload",
    Tier.CPU: "cpu",
}
"""For each tier that must be allowed, the field that allows it."""


def ask_of(spec: PlacementSpec, deployment: str, engine: Engine, problems: Problems, path: FieldPath) -> Ask | None:
    """The ask for one unnamed instance; None if the need is unknown, or after reporting what is wrong."""
    return _Asking(spec, deployment, engine, problems, path).ask()


class _Asking:
    """Builds the ask from one section and one engine."""

    def __init__(
        self, spec: PlacementSpec, deployment: str, engine: Engine, problems: Problems, path: FieldPath
    ) -> None:
        self._spec, self._deployment, self._engine = spec, deployment, engine
        self._problems, self._path = problems, path
        self._demand: EngineDemand = engine.demand

    def ask(self) -> Ask | None:
        spec, demand, problems, path = self._spec, self._demand, self._problems, self._path
        before = len(problems)
        selector = _selector(spec, problems, path)
        gpus = frozenset(
            found for index, gpu in usable(spec.gpus) if (found := _gpu(gpu, problems, (*path, "gpus", index)))
        )
        rules: dict[str, Any] = {name: getattr(spec, name) for name in PlacementRules.__struct_fields__}
        tiers = () if spec.tiers is INVALID else tuple(TIERS[name] for _, name in usable(spec.tiers))
        if INVALID in rules.values() or spec.tiers is INVALID or spec.resources is INVALID:
            return None
        self._check_tiers(tiers)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            rules[name] = self._agreed(name, rules[name], getattr(demand, name))
        need = self._need(rules)
        if need is None or selector is None or len(problems) > before:
            return None
        rules |= self._layers(need, rules, tiers) | ({} if need.tensor_parallel_sizes else {"cpu": True})
        self._check_sizes(need, rules)
        if len(problems) > before:
            return None
        ask = Ask(
            **rules,
            instance_id="",
            deployment=self._deployment,
            need=need,
            engine=self._engine.ability,
            gpu_share=None if spec.resources is None else spec.resources.gpu_share,
            selector=selector,
            gpus=gpus,
            gpu_only=not rules["cpu"] and (self._refuses("cpu") or self._refuses("partial_offload")),
            tiers=tiers,
            data_parallel_size=demand.data_parallel_size,
            gpu_utilization=demand.gpu_utilization,
        )
        beside = demand.host_bytes + demand.host_bytes_per_gpu * ask.demanded_gpus
        if not beside:
            return ask
        return msgspec.structs.replace(ask, need=msgspec.structs.replace(need, host_bytes=need.host_bytes + beside))

    # Contradictions

    def _agreed(self, name: str, here: Any, of_engine: Any) -> Any:
        if None not in (here, of_engine) and here != of_engine:
            said = f"is {here}, but the engine is set to {of_engine}; keep one of them"
            self._problems.add((*self._path, camel_case(name)), said)
        return of_engine if here is None else here

    def _refuses(self, name: str) -> bool:
        """Whether the document sets a field to an explicit `false`."""
        return not getattr(self._spec, name) and self._problems.written((*self._path, camel_case(name)))

    def _check_tiers(self, tiers: tuple[Tier, ...]) -> None:
        path, written = self._path, self._problems.written((*self._path, "tiers"))
        if written and not tiers:
            self._problems.add((*path, "tiers"), "must not be empty; leave it out to allow the usual ones")
        for index, tier in enumerate(tiers):
            if tier in tiers[:index]:
                self._problems.add((*path, "tiers", index), f"{tier.written} is listed twice")
        for tier, field in ALLOWED_BY.items() if tiers else ():
            where = (*path, camel_case(field))
            given = getattr(self._spec, field)
            if self._problems.written(where) and given is not (tier in tiers):
                listed = "lists" if tier in tiers else "does not list"
                self._problems.add(
                    where, f"is {str(given).lower()}, and tiers {listed} {tier.written}; keep one of them"
                )

    def _check_sizes(self, need: Need, rules: dict[str, Any]) -> None:
        """Check that the demanded numbers of GPUs fit together and divide the model evenly."""
        size, sizes, path = rules["tensor_parallel_size"], need.tensor_parallel_sizes, self._path
        if size is not None and size > 1 and not self._engine.ability.tensor_parallel:
            self._problems.add((*path, "tensorParallelSize"), f"engine {self._engine.name} has no tensor parallelism")
        elif size is not None and sizes and size not in sizes:
            of = f"{self._deployment} cannot be divided among {size} GPUs"
            self._problems.add((*path, "tensorParallelSize"), f"{of}; sizes: {', '.join(map(str, sizes))}")
        stages = rules["pipeline_parallel_size"] or len(rules.get("stage_layers", ())) or None
        if stages is not None and sizes and stages > need.layers:
            self._problems.add(
                (*path, "pipelineParallelSize"), f"the model has {need.layers} layers, fewer than {stages}"
            )
        count, split = rules["gpu_count"], (size or 1) * (stages or 1) * self._demand.data_parallel_size
        if count is not None and sizes and (count % split or (None not in (size, stages) and count != split)):
            self._problems.add(
                (*path, "gpuCount"), f"is {count}, and the parallel sizes take {split}; keep one of them"
            )
        wants_several = max(split, count or 1) > 1
        if wants_several and not self._spec.several_gpus and not self._spec.several_workers:
            self._problems.add(
                (*path, "severalGpus"), f"is false, and the instance must have {max(split, count or 1)} GPUs"
            )

    def _layers(self, need: Need, rules: dict[str, Any], tiers: tuple[Tier, ...]) -> dict[str, Any]:
        """Check the engine's settings for layers on GPUs, and return the rules that follow from these settings."""
        demand, found = self._demand, dict[str, Any]()
        layers = demand.gpu_layers
        if layers is not None and need.layers > 1:
            found["gpu_layers"] = layers
            partly = 0 < layers < need.layers
            told = f"the engine is set to have {layers} of {need.layers} layers on GPUs"
            if partly and tiers and Tier.PARTIAL_OFFLOAD not in tiers:
                self._problems.add((*self._path, "tiers"), f"does not list partial-offload, but {told}")
            elif partly and self._refuses("partial_offload"):
                self._problems.add((*self._path, "partialOffload"), f"is false, but {told}")
            elif partly:
                found["partial_offload"] = True
            elif layers and rules["cpu"]:
                self._problems.add((*self._path, "cpu"), f"is true, but {told}")
            elif not layers and (self._spec.gpus or self._spec.gpu_models or self._refuses("cpu")):
                self._problems.add(self._path, f"asks for GPUs, but {told}")
        if demand.stage_layers:
            found["stage_layers"] = demand.stage_layers
            if sum(demand.stage_layers) != need.layers:
                of = f"the engine is set to have stages of {list(demand.stage_layers)} layers"
                self._problems.add(self._path, f"{of}, but the model has {need.layers}")
        if demand.stage_shares:
            found["gpu_count"] = self._agreed("gpu_count", rules["gpu_count"], len(demand.stage_shares))
            if (layers is None or layers >= need.layers) and len(demand.stage_shares) > 1:
                found["stage_layers"] = layers_by_share(need.layers, demand.stage_shares)
        return found

    # The need of an instance

    def _need(self, rules: dict[str, Any]) -> Need | None:
        spec, engine, problems, path = self._spec, self._engine, self._problems, self._path
        if spec.resources is not None:
            return self._by_hand(spec.resources, rules)
        weights = engine.weights
        files = spec.model_files or (weights.path if weights is not None else "")
        located = packaged(files) if files.startswith("package:") else Path(files)
        if not files or located is None or not located.exists():
            return None  # the files are not on this machine
        told = weights.context if weights is not None and weights.estimated_as == "vllm" else None
        if told is not None and spec.context is not None and spec.context != told:
            problems.add((*path, "context"), f"is {spec.context}, but the engine is set to {told}; keep one of them")
        context = spec.context or (weights.context if weights is not None else None) or DEFAULT_CONTEXT
        concurrency = spec.concurrency or (weights.concurrency if weights is not None else 1)
        kind = (
            weights.estimated_as if weights is not None else "llama.cpp" if engine.ability.partial_offload else "vllm"
        )
        more: dict[str, Any] = {}
        if weights is not None:
            more = {"kv_dtype": weights.kv_dtype, "batch_tokens": weights.batch_tokens}
            more |= {"max_sequences": weights.max_sequences, "quantization": weights.quantization}
            more |= {"draft": weights.draft} if weights.draft and Path(weights.draft).exists() else {}
            if weights.draft and not more.get("draft"):
                problems.warn(path, f"the draft model {weights.draft} is not on this machine; it is not counted")
        try:
            return estimate(located, context=context, concurrency=concurrency, engine=kind, **more).need
        except UnreadableModel as error:
            if spec.model_files:
                problems.add((*path, "modelFiles"), str(error))
            else:  # the engine may support formats that the estimate does not
                problems.warn(path, f"the need of {self._deployment} is not known ({error}); set placement.resources")
        except PointsmanError as error:  # an invalid parameter of the engine
            problems.add(path, str(error))
        return None

    def _by_hand(self, resources: ResourcesSpec, rules: dict[str, Any]) -> Need:
        if not resources.gpus:
            return Need(model=self._deployment, host_bytes=resources.memory or 0, tensor_parallel_sizes=())
        where = (*self._path, "resources", "gpus")
        size, stages = rules["tensor_parallel_size"], rules["pipeline_parallel_size"]
        split = (size or 1) * (stages or 1) * self._demand.data_parallel_size
        said = self._problems.written(where) or resources.gpus != ResourcesSpec().gpus
        gpus = resources.gpus if said else max(split, rules["gpu_count"] or 1)
        told = split > 1 or size == 1
        if (told and (gpus % split or (size is not None and stages is not None and gpus != split))) or (
            rules["gpu_count"] not in (None, gpus)
        ):
            other = split if told and gpus != split else rules["gpu_count"]
            self._problems.add(where, f"is {gpus}, and the parallel sizes or gpuCount say {other}; keep one of them")
            return Need()
        each = gpus // ((stages or 1) * self._demand.data_parallel_size)
        if said or resources.gpu_memory or gpus > 1:
            rules["gpu_count"] = gpus
        return Need.fixed(resources.gpu_memory or 0, resources.memory or 0, each, self._deployment, stages or 1)


def layers_by_share(layers: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Layers on each GPU, as the tensor split of llama.cpp divides them. The output counts as one more layer."""
    total, ends = sum(shares), list[float]()
    for share in shares:
        ends.append((ends[-1] if ends else 0.0) + share / total)
    held = [0] * len(shares)
    for layer in range(layers):
        at = next((index for index, end in enumerate(ends) if layer / (layers + 1) < end), len(shares) - 1)
        held[at] += 1
    return tuple(held)


def _selector(spec: PlacementSpec, problems: Problems, path: FieldPath) -> LabelSelector | None:
    expressions = []
    for index, expression in usable(spec.selector.match_expressions):
        if INVALID in msgspec.structs.astuple(expression):
            return None
        try:
            expression.check()
        except ValueError as error:
            problems.add((*path, "selector", "matchExpressions", index), str(error))
            return None
        expressions.append(expression)
    return LabelSelector(spec.selector.match_labels, expressions)


def _gpu(written: str, problems: Problems, path: FieldPath) -> tuple[str, int] | None:
    worker, slash, index = written.rpartition("/")
    if not slash or not worker or not index.isdecimal():
        problems.add(path, f'expected a GPU as WORKER/INDEX, such as w1/0, found "{written}"')
        return None
    return worker, int(index)
