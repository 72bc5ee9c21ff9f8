"""The nodes of an application as deployments."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pointsman.config.building import arguments_of, built
from pointsman.config.code import CodeInForce
from pointsman.config.deployments import Scheduling, parameters_in_force, scheduling
from pointsman.config.machines import ResourcesSpec, SelectorSpec
from pointsman.config.placement import ask_of
from pointsman.config.plan import DeploymentPlan
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.registry import engines
from pointsman.config.scaling import NodeScaling, first_wait_s
from pointsman.config.schema import PlacementSpec, SchedulingSpec
from pointsman.config.validation import INVALID, Validator
from pointsman.control.desired import PYTHON, DesiredDeployment, DesiredEngine, Lifecycle
from pointsman.pipeline.building import INGRESS
from pointsman.pipeline.graph import Graph, HandleTo, Node, NodeKind, filled
from pointsman.pipeline.options import NodeOptions
from pointsman.scaling.limits import ScalingPlan

PYTHON_PATH = "PYTHONPATH"
FIFO = SchedulingSpec(policy="fifo")


def deployment_name(application: str, node: str, rank: int | None = None) -> str:
    """diamond.m1, or diamond.m1.0 for a shard."""
    return f"{application}.{node}" if rank is None else f"{application}.{node}.{rank}"


class Nodes:
    """Builds a deployment for each node that runs code, for each of its shards, and for the ingress."""

    def __init__(self, application: str, graph: Graph, folder: Path, problems: Problems) -> None:
        self._application = application
        self._graph = graph
        self._folder = folder
        self._problems = problems
        self.scaling = NodeScaling(graph.scaling, problems)

    def deployments(self) -> list[DeploymentPlan]:
        """The deployments of all nodes. The result is empty if the document has a problem."""
        made = []
        for node, path in self._running():
            if not node.code:
                continue  # reported already
            how = self._scheduling(node.options, (*path, "scheduling"))
            scaled = self.scaling.of(node, path)
            code = self._code(node)
            for rank in ranks(node):
                plan = self._deployment(node, rank, how, scaled, code, path)
                if plan is not None:
                    made.append(plan)
        return made

    def user_configs(self) -> dict[str, Any]:
        return {
            deployment_name(self._application, node.name, rank): node.options.user_config
            for node, _ in self._running()
            for rank in ranks(node)
            if node.options.user_config is not None
        }

    def check_code(self) -> None:
        """Warn about missing code."""
        for node, path in self._running():
            self._check_code(node, path)

    def _running(self) -> Iterator[tuple[Node, FieldPath]]:
        """The nodes that run the user's code, each with its path in the document."""
        graph = self._graph
        for index, node in enumerate(graph.nodes):
            if node.kind is not NodeKind.MODEL:
                yield node, ("nodes", index)
        if graph.has_ingress:
            code, version = graph.preprocessor or graph.schema, graph.ingress_version
            ingress = Node(name=INGRESS, kind=NodeKind.FUNCTION, code=code, options=graph.ingress, version=version)
            yield ingress, (INGRESS,)

    def _deployment(
        self,
        node: Node,
        rank: int | None,
        how: Scheduling,
        scaled: ScalingPlan | None,
        code: CodeInForce,
        path: FieldPath,
    ) -> DeploymentPlan | None:
        name, options = deployment_name(self._application, node.name, rank), node.options
        kind = engines().find(PYTHON, self._problems, path)
        if kind is None:
            return None
        parameters = self._parameters(node, rank, code.version)
        validator = Validator(self._problems)
        engine = built(kind, parameters, path, validator)
        if engine is INVALID:
            return None
        ask = None
        if options.cpus or options.memory_bytes or options.gpus or options.labels:
            ask = ask_of(_placement(options), name, engine, self._problems, path)
        if len(self._problems):
            return None
        wanted = DesiredDeployment(
            name=name,
            model=name,
            replicas=options.num_replicas if scaled is None else scaled.limits.first,
            engine=DesiredEngine(PYTHON, parameters_in_force(kind, arguments_of(kind, parameters, path, validator))),
            max_concurrency=options.max_concurrency,
            lifecycle=Lifecycle(
                start_timeout_s=options.start_timeout_s,
                probe_interval_s=options.health_check_period_s,
                probe_timeout_s=options.health_check_timeout_s,
                drain_timeout_s=options.graceful_shutdown_s,
            ),
            ask=ask,
        )
        return DeploymentPlan(
            desired=wanted,
            policy=how.policy,
            picker=how.picker,
            scheduling_recipe=how.recipe,
            time_limit_s=how.time_limit_s,
            first_wait_s=first_wait_s(scaled, how.picker),
            engine=engine,
            scaling=None if rank else scaled,
            follows=deployment_name(self._application, node.name, 0) if rank and scaled is not None else "",
            internal=True,
            replica_code=code,
        )

    def _scheduling(self, options: NodeOptions, path: FieldPath) -> Scheduling:
        spec = FIFO
        if options.scheduling is not None:
            spec = Validator(self._problems).value(dict(options.scheduling), SchedulingSpec, path)
            if spec is not INVALID and spec.shadow:
                self._problems.add((*path, "shadow"), "candidates shadow deployments of a manifest, not nodes")
        return scheduling(spec, self._problems, path)

    def _parameters(self, node: Node, rank: int | None, code_version: str) -> dict[str, Any]:
        """The parameters that a replica starts with. If the parameters change, the replica is replaced."""
        is_ingress, options = node.name == INGRESS, node.options
        return {
            "app": self._application,
            "node": node.name,
            "kind": INGRESS if is_ingress else node.kind.value,
            "code": "" if is_ingress else node.code,
            "folder": str(self._folder),
            "args": self._arguments(list(node.args)),
            "kwargs": self._arguments(node.kwargs),
            "version": ".".join(filter(None, [node.version, code_version])),
            "threads": options.threads,
            "rank": rank,
            "shards": options.shards,
            "preprocessor": self._graph.preprocessor if is_ingress else "",
            "schema": self._graph.schema if is_ingress else "",
            "env": self._env(options),
        }

    def _env(self, options: NodeOptions) -> dict[str, str]:
        """The environment of a replica. PYTHONPATH includes the module folders of the application."""
        folders = [os.path.normpath(self._folder / folder) for folder in self._graph.python_path]
        own = options.env.get(PYTHON_PATH)
        found = os.pathsep.join([*folders, *([own] if own else [])])
        return {**options.env, **({PYTHON_PATH: found} if found else {})}

    def _arguments(self, template: Any) -> Any:
        def handle(reference: Any) -> Mapping[str, str]:
            if not isinstance(reference, HandleTo):
                return {}  # reported already
            node = {node.name: node for node in self._graph.nodes}.get(reference.node)
            if node is not None and node.kind is NodeKind.MODEL:
                return {"$model": node.code}
            return {"$handle": reference.node}

        return filled(template, handle)

    def _check_code(self, node: Node, path: FieldPath) -> None:
        source = node.code.rpartition(":")[0]
        if source.endswith(".py") and not (self._folder / source).is_file():
            self._problems.warn(path, f"there is no file {self._folder / source}")

    def _code(self, node: Node) -> CodeInForce:
        """The code of a node: its modules, and all modules that these import from the folders of the application."""
        graph = self._graph
        codes = [graph.preprocessor, graph.schema] if node.name == INGRESS else [node.code]
        return CodeInForce(codes, [self._folder, *(self._folder / root for root in graph.python_path)])


def ranks(node: Node) -> list[int | None]:
    """The ranks of the shards of a node; `[None]` if the node has no shards."""
    return [None] if node.options.shards == 1 else list(range(node.options.shards))


def _placement(options: NodeOptions) -> PlacementSpec:
    return PlacementSpec(
        selector=SelectorSpec(match_labels=dict(options.labels)),
        cpus=options.cpus,
        resources=ResourcesSpec(
            gpus=options.gpus,
            gpu_memory=options.gpu_memory_bytes or None,
            gpu_share=options.gpu_share,
            memory=options.memory_bytes or None,
        ),
    )
