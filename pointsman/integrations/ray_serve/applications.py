"""`app.to_ray_serve()`: a Pointsman pipeline as an application of plain Ray Serve.

Enters: an application. Leaves: a bound Serve application. It has a deployment for each node, with the node's options
and policies, and an ingress that runs the graph. The one rule: replicas load the code of nodes by its name, from the
folder of the application or from their working directory; the replicas of our own runtimes do the same.
"""

import asyncio
import inspect
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.context import _get_global_client

from pointsman.config.problems import Problems
from pointsman.config.schema import ScalingSpec
from pointsman.config.validation import Validator
from pointsman.errors import PointsmanError
from pointsman.integrations.ray_serve.router import pointsman_routing
from pointsman.integrations.ray_serve.scaling import pointsman_scaling
from pointsman.pipeline import Run
from pointsman.pipeline.application import Application
from pointsman.pipeline.flow import Flow, InputValue, StepResult, flow_of, input_value, part_of
from pointsman.pipeline.graph import CALL, Graph, HandleTo, Node, NodeKind, filled, references
from pointsman.pipeline.options import NodeOptions, batching_of, joined, parted
from pointsman.replica.target import load

INGRESS_NAME = "ingress"


class NodeHandle:
    """A handle to a node, for the code of another node: `await handle.method(x)`, or
    `handle.method.remote(x).result()`."""

    def __init__(self, handle: Any, method: str = CALL) -> None:
        self._handle = handle
        self._method = method

    def __getattr__(self, name: str) -> "NodeHandle":
        if name.startswith("_"):
            raise AttributeError(name)
        return NodeHandle(self._handle, name)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._handle.call.remote(self._method, args, kwargs)

    __call__ = remote


class ServeNode:
    """A node in a replica of Serve: the user's function, or an object of the user's class."""

    def __init__(self, node: Node, folder: str, python_path: Sequence[str], handles: Mapping[str, Any]) -> None:
        [body] = loaded([node.code], folder, python_path)
        self._threads = ThreadPoolExecutor(node.options.threads)
        """A thread pool for plain code. It has as many threads as the node's options allow."""

        def handle(to: HandleTo) -> NodeHandle:
            return NodeHandle(handles[to.node])

        self._target = body
        if node.kind is NodeKind.CLASS:
            self._target = body(*filled(node.args, handle), **filled(node.kwargs, handle))

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        """Call a method; `__call__` stands for the function or the object itself."""
        function = self._target if method == CALL else getattr(self._target, method)
        batched = batching_of(function) is not None  # Serve passes calls one at a time
        if batched:
            args, kwargs = joined([(args, kwargs)])
        is_async = inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )
        if is_async:
            made = await function(*args, **kwargs)
        else:
            here = partial(_to_completion, function, args, kwargs)
            made = await asyncio.get_running_loop().run_in_executor(self._threads, here)
        if hasattr(made, "__aiter__"):
            made = [piece async for piece in made]
        return parted(made, 1, method)[0] if batched else made

    async def reconfigure(self, config: Any) -> None:
        if config is not None and hasattr(self._target, "reconfigure"):
            done = self._target.reconfigure(config)
            if inspect.isawaitable(done):
                await done


def _to_completion(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    made = function(*args, **kwargs)
    return list(made) if inspect.isgenerator(made) else made


class ServeIngress:
    """Accepts requests over HTTP and through handles, and runs the graph."""

    def __init__(
        self,
        flow: Flow,
        codes: tuple[str, str],
        folder: str,
        python_path: Sequence[str],
        handles: Mapping[str, Any],
    ) -> None:
        """`codes`: the names of the code of preprocessor and schema; a name is empty if there is no such code."""
        wanted = [code for code in codes if code]
        found = dict(zip(wanted, loaded(wanted, folder, python_path), strict=True))
        self._preprocessor, self._schema = map(found.get, codes)
        self._flow, self._handles = flow, handles

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and hasattr(args[0], "query_params"):
            given = await self._input_of(args[0])
        else:
            given = input_value(args, kwargs)
        flow = self._flow
        inputs = [part_of(given, part.path) for part in flow.inputs]
        results: list[Any] = [None] * len(flow.steps)

        def value(part: InputValue | StepResult) -> Any:
            return inputs[part.index] if isinstance(part, InputValue) else part.of(results[part.index])

        async def call(index: int) -> None:
            step = flow.steps[index]
            node = self._handles[step.node]
            results[index] = await node.call.remote(step.method, filled(step.args, value), filled(step.kwargs, value))

        await run_flow(flow, call)
        return filled(flow.output, value)

    async def _input_of(self, request: Any) -> Any:
        given = await request.body() if self._preprocessor is None else self._preprocessor(request)
        given = await given if inspect.isawaitable(given) else given
        if self._preprocessor is None:
            given = msgspec.json.decode(given) if given else None
        return given if self._schema is None else self._schema.model_validate(given)


def loaded(codes: Sequence[str], folder: str, python_path: Sequence[str]) -> list[Any]:
    """The code with these names, from the folder of the application, or from the working directory if this machine
    lacks that folder."""
    here = Path(folder) if Path(folder).is_dir() else Path.cwd()
    sys.path[:0] = [root for one in python_path if (root := str((here / one).resolve())) not in sys.path]
    return load(codes, str(here))


# Building


def to_ray_serve(application: Application) -> Any:
    """A bound Serve application, for `serve.run`. Raises `PointsmanError` if Serve cannot run the application."""
    graph, folder = application.graph, str(application.folder.absolute())
    _refuse(graph)
    bound: dict[str, Any] = {}

    def node(name: str) -> Any:
        if name not in bound:
            made = graph.node(name)
            needs = {one.node for one in references([*made.args, made.kwargs]) if isinstance(one, HandleTo)}
            handles = {needed: node(needed) for needed in sorted(needs)}
            deployment = serve.deployment(ServeNode).options(**serve_options(name, made.options))
            bound[name] = deployment.bind(made, folder, graph.python_path, handles)
        return bound[name]

    codes = (graph.preprocessor, graph.schema)
    handles = {one.name: node(one.name) for one in graph.nodes}
    front = serve.deployment(ServeIngress).options(**serve_options(INGRESS_NAME, graph.ingress))
    return front.bind(flow_of(graph), codes, folder, graph.python_path, handles)


def _refuse(graph: Graph) -> None:
    problems = []
    for one in graph.nodes:
        if one.kind is NodeKind.MODEL:
            problems.append(f'"{one.name}" is a model of a manifest, which only a Pointsman gateway serves')
        if one.options.shards > 1:
            problems.append(f'"{one.name}" has shards, which Serve does not have')
        if one.options.labels:
            problems.append(f'"{one.name}" has labels; Serve places replicas by resources')
    if problems:
        raise PointsmanError(f"Ray Serve cannot run this application: {'; '.join(problems)}")


def serve_options(name: str, options: NodeOptions) -> dict[str, Any]:
    """The options of a Serve deployment that correspond to the options of a node."""
    actor: dict[str, Any] = {"num_cpus": options.cpus, "num_gpus": options.gpu_share or options.gpus}
    if options.memory_bytes:
        actor["memory"] = options.memory_bytes
    if options.env:
        actor["runtime_env"] = {"env_vars": dict(options.env)}
    made: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": options.max_concurrency,
        "ray_actor_options": actor,
        "health_check_period_s": options.health_check_period_s,
        "health_check_timeout_s": options.health_check_timeout_s,
        "graceful_shutdown_timeout_s": options.graceful_shutdown_s,
    }
    if options.user_config is not None:
        made["user_config"] = options.user_config
    if options.scheduling is not None:
        given = dict(options.scheduling)
        given["time_limit"] = given.pop("timeLimit", None)
        made["request_router_config"] = pointsman_routing(**given)
    if options.scaling is None:
        return made | {"num_replicas": options.num_replicas}
    return made | {"autoscaling_config": autoscaling(dict(options.scaling), options.num_replicas)}


def autoscaling(section: dict[str, Any], initial: int) -> Any:
    """The autoscaling of a deployment, from the `scaling` section of a node."""
    problems = Problems("")
    spec: ScalingSpec = Validator(problems).value(section, ScalingSpec, ())
    problems.raise_if_any()
    most = max(spec.max_replicas, 1)
    return AutoscalingConfig(
        min_replicas=spec.min_replicas,
        max_replicas=most,
        initial_replicas=min(max(initial, spec.min_replicas), most),
        upscale_delay_s=spec.up_delay_s,
        downscale_delay_s=spec.down_delay_s,
        upscaling_factor=spec.up_factor,
        downscaling_factor=spec.down_factor,
        policy=pointsman_scaling(
            spec.policy, parameters=spec.parameters, time_limit_s=spec.time_limit_s, interval_s=spec.interval_s
        ),
    )


# Deploying


class ServeApplicationHandle:
    """An application on Serve: `handle.remote(1, 2).result()` calls it, and HTTP clients send requests to its URL."""

    def __init__(self, name: str, handle: Any, url: str) -> None:
        self.name = name
        self.url = url
        self._handle = handle

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the application; the answer has `result()` and can be awaited."""
        return self._handle.remote(*args, **kwargs)

    def close(self) -> None:
        """Delete the application; Serve keeps running."""
        serve.delete(self.name)


def deploy_on_serve(application: Application, *, route_prefix: str = "") -> ServeApplicationHandle:
    """Run an application on the Serve of this cluster, and wait until it is ready. Starts Serve if necessary."""
    prefix = route_prefix or f"/{application.name}"
    handle = serve.run(to_ray_serve(application), name=application.name, route_prefix=prefix)
    http = _get_global_client().http_config
    return ServeApplicationHandle(application.name, handle, f"http://{http.host}:{http.port}{prefix}")


async def run_flow(flow: Flow, call: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Run the steps of a flow. Each step begins as soon as the results that it needs exist. `call` makes the call of a
    step, and keeps its result. If a call fails, the other calls are cancelled, and the error of that call is raised."""
    run = Run(flow, time.monotonic())
    in_flight: dict[asyncio.Task[None], int] = {}

    def begin(indexes: Sequence[int]) -> None:
        for index in indexes:
            in_flight[asyncio.ensure_future(call(index))] = index

    begin(run.begin())
    try:
        while in_flight:
            ended, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                index = in_flight.pop(task)
                await task
                begin(run.finished(index, time.monotonic()))
    finally:
        for task in in_flight:
            task.cancel()
