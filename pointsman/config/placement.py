"""The `placement` of a deployment -> what is asked of the placer for each of its instances."""

from pathlib import Path

from pointsman.config.manifest import PlacementSpec, ResourcesSpec
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.validation import INVALID, usable
from pointsman.engines import Engine
from pointsman.parameters import packaged
from pointsman.placement.asks import Arrangement, Ask
from pointsman.placement.estimate import UnreadableModel, estimate
from pointsman.placement.needs import Need
from pointsman.selection import LabelExpression, LabelSelector

DEFAULT_CONTEXT = 8192
"""Tokens of a request that room is kept for, where neither the document nor the engine says."""


def ask_of(
    spec: PlacementSpec, deployment: str, engine: Engine, problems: Problems, path: FieldPath, notes: list[str]
) -> Ask | None:
    """An ask for an instance without a name; None: what it needs is not known, or something is wrong and was noted."""
    selector = _selector(spec, problems, path)
    gpus = frozenset(
        found for place, gpu in usable(spec.gpus) if (found := _gpu(gpu, problems, (*path, "gpus", place)))
    )
    need = _need(spec, deployment, engine, problems, path, notes)
    if need is None or selector is None or INVALID in (spec.arrangement, spec.cpus, spec.priority):
        return None
    return Ask(
        instance_id="",
        deployment=deployment,
        need=need,
        engine=engine.ability,
        cpus=spec.cpus,
        gpu_share=None if spec.resources is None else spec.resources.gpu_share,
        exclusive=spec.exclusive,
        gpu_models=frozenset(spec.gpu_models),
        selector=selector,
        workers=frozenset(spec.workers),
        gpus=gpus,
        arrangement=Arrangement(spec.arrangement),
        several_gpus=spec.several_gpus,
        several_workers=spec.several_workers,
        partial_offload=spec.partial_offload,
        cpu=spec.cpu or not need.tensor_parallel_sizes,
        mixed_gpus=spec.mixed_gpus,
        priority=spec.priority,
        preempts=spec.preempts,
        near=spec.near,
        all_or_nothing=spec.all_or_nothing,
        overcommit=spec.overcommit,
    )


def _selector(spec: PlacementSpec, problems: Problems, path: FieldPath) -> LabelSelector | None:
    expressions = []
    for place, given in usable(spec.selector.match_expressions):
        expression = LabelExpression(given.key, given.operator, tuple(given.values))
        try:
            expression.check()
        except ValueError as error:
            problems.add((*path, "selector", "matchExpressions", place), str(error))
            return None
        expressions.append(expression)
    return LabelSelector(spec.selector.match_labels, expressions)


def _gpu(written: str, problems: Problems, path: FieldPath) -> tuple[str, int] | None:
    worker, slash, index = written.rpartition("/")
    if not slash or not worker or not index.isdecimal():
        problems.add(path, f'expected a GPU as WORKER/INDEX, such as w1/0, found "{written}"')
        return None
    return worker, int(index)


def _need(
    spec: PlacementSpec, deployment: str, engine: Engine, problems: Problems, path: FieldPath, notes: list[str]
) -> Need | None:
    if spec.resources is not None:
        return None if spec.resources is INVALID else _by_hand(spec.resources, deployment)
    files = spec.model_files or (engine.weights.path if engine.weights is not None else "")
    located = _located(files)
    if located is None:
        return None
    weights = engine.weights
    context = spec.context or (weights.context if weights is not None else None) or DEFAULT_CONTEXT
    concurrency = spec.concurrency or (weights.concurrency if weights is not None else 1)
    kind = weights.estimated_as if weights is not None else "llama.cpp" if engine.ability.partial_offload else "vllm"
    try:
        return estimate(located, context=context, concurrency=concurrency, engine=kind).need
    except UnreadableModel as error:
        if spec.model_files:
            problems.add((*path, "modelFiles"), str(error))
        else:  # an engine may know more formats than we do
            notes.append(f"{deployment}: what it needs is not known ({error}); placement.resources can say it")
        return None


def _by_hand(resources: ResourcesSpec, deployment: str) -> Need:
    if not resources.gpus:
        return Need(model=deployment, host_bytes=resources.memory or 0, tensor_parallel_sizes=())
    return Need.fixed(resources.gpu_memory or 0, resources.memory or 0, resources.gpus, deployment)


def _located(files: str) -> Path | None:
    """Where files are on this machine; None: they are not."""
    if not files:
        return None
    found = packaged(files) if files.startswith("package:") else Path(files)
    return found if found is not None and found.exists() else None
