"""The server of a replica: its life cycle, its pages, and the calls that it accepts."""

import asyncio
import hmac
import traceback
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Any

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.http.heads import HttpRequest
from pointsman.http.server import HttpServer, ServerConnection
from pointsman.pipeline.context import CallContext
from pointsman.pipeline.flow import NoSuchPart
from pointsman.replica.calling import Batches, Calling, Threads
from pointsman.replica.calls import ReplicaCall, error_answer, problem
from pointsman.replica.ingress import request_of
from pointsman.replica.methods import Method
from pointsman.replica.target import Handles, Recipe, Surroundings, Target
from pointsman.wire import (
    BufferSource,
    CallHead,
    Fetcher,
    HandleAt,
    SharedBuffers,
    StoredFile,
    UnreadableBlob,
    arguments,
    decode_call,
    decode_plain,
)

MAX_METRICS = 100
"""Maximum number of metrics. If there are more, the metric with the oldest value is dropped."""
KIND = b"text/plain; version=0.0.4; charset=utf-8"


class RecordedMetrics:
    """Metrics that user code records: the last value of each. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def record(self, name: str, value: float) -> None:
        values = {other: known for other, known in self._values.items() if other != name}
        values[name] = value
        if len(values) > MAX_METRICS:
            del values[next(iter(values))]
        self._values = values  # in one step: another thread may be reading

    def text(self) -> bytes:
        """The metrics, in the format of Prometheus."""
        lines = ["# TYPE pointsman_custom_metric gauge"]
        lines += [f'pointsman_custom_metric{{name="{_escaped(name)}"}} {value}' for name, value in self._values.items()]
        return ("\n".join(lines) + "\n").encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


OK = b'{"status":"ok"}'
SECRET = b"x-pointsman-secret"


class CallsInFlight:
    """The calls of a replica that are running or wait for their batch."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        calling: Calling,
        handles: Handles,
        shared: SharedBuffers | None,
        fetcher: Fetcher | None,
        recorder: Callable[[str, float], None],
    ) -> None:
        self._recipe = recipe
        self._target = target
        self._calling = calling
        self._handles = handles
        self._shared = shared
        self._fetcher = fetcher
        self._fetching: set[asyncio.Task[None]] = set()
        """Calls whose arguments are being fetched from other nodes."""
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._in_flight: set[ReplicaCall] = set()
        self._batches: dict[Method, Batches] = {}
        self._when_idle: Callable[[], object] | None = None

    def when_idle(self, call: Callable[[], object]) -> None:
        self._when_idle = call
        self._look_if_idle()

    def begin(self, client: ServerConnection, request: HttpRequest) -> None:
        """Start a call. If the call cannot be made, answer with the reason."""
        try:
            head, blobs = decode_call(request.body)
            away = [] if self._fetcher is None else self._fetcher.elsewhere(blobs)
        except PointsmanError as error:
            client.answer(400, problem(type(error).__name__, str(error)))
            return
        if not away:
            self._begin(client, head, blobs, self._shared)
            return
        task = self._loop.create_task(self._fetch_and_begin(client, head, blobs, away))
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)

    async def _fetch_and_begin(
        self, client: ServerConnection, head: CallHead, blobs: list[memoryview], away: list[StoredFile]
    ) -> None:
        assert self._fetcher is not None
        began = monotonic()
        try:
            source = await self._fetcher.source(away)
        except UnreadableBlob as error:
            client.answer(503, problem(type(error).__name__, str(error)))
            self._loop.call_soon(self._look_if_idle)  # when this task has ended
            return
        if head.deadline_s is not None:
            head.deadline_s -= monotonic() - began
        self._begin(client, head, blobs, source)
        self._loop.call_soon(self._look_if_idle)

    def _begin(
        self, client: ServerConnection, head: CallHead, blobs: list[memoryview], source: BufferSource | None
    ) -> None:
        assert self._target.methods is not None
        handed: list[HandleAt] = []

        def handle(to: HandleAt) -> Any:
            handed.append(to)
            return self._handles(to)

        try:
            if head.deadline_s is not None and head.deadline_s <= 0:
                client.answer(504, problem("DeadlineExceeded", f"the deadline of {head.method} was exceeded already"))
                return
            method = self._target.methods.find(head.method)
            args, kwargs = arguments(head, blobs, source, handle)
            if head.http is not None:
                args = [request_of(head.http, decode_plain(blobs[0]) if blobs else b"")]
        except UnknownName as error:
            client.answer(404, problem("UnknownMethod", str(error)))
            return
        except NoSuchPart as error:
            client.answer(*error_answer(error))
            return
        except PointsmanError as error:
            client.answer(400, problem(type(error).__name__, str(error)))
            return
        call = ReplicaCall(client, head, method, args, kwargs, self._context(head), self._shared, self._ended)
        call.handed_handles = bool(handed)
        self._in_flight.add(call)
        if head.deadline_s is not None:
            call.watch(self._loop, head.deadline_s)
        if method.batching is None:
            self._calling.begin(call)
        else:
            self._batch_of(method).add(call)

    def _context(self, head: CallHead) -> CallContext:
        recipe = self._recipe
        return CallContext(
            app=recipe.app,
            node=recipe.node,
            rank=recipe.rank,
            shards=recipe.shards,
            request_id=head.request_id,
            step=head.step,
            priority=head.priority,
            tenant=head.tenant,
            deadline=None if head.deadline_s is None else monotonic() + head.deadline_s,
            clock=monotonic,  # the clock of the loop is cached per turn
            recorder=self._recorder,
        )

    def _batch_of(self, method: Method) -> Batches:
        batches = self._batches.get(method)
        if batches is None:
            assert method.batching is not None
            batches = self._batches[method] = Batches(method, method.batching, self._calling)
        return batches

    def _ended(self, call: ReplicaCall) -> None:
        self._in_flight.discard(call)
        self._look_if_idle()

    def _look_if_idle(self) -> None:
        if self._when_idle is not None and not self._in_flight and not self._fetching:
            self._when_idle()


ReplicaRoute = Callable[[ServerConnection, HttpRequest], None]


class ReplicaServer:
    def __init__(self, recipe: Recipe, surroundings: Surroundings) -> None:
        self._secret = surroundings.secret.encode()
        self._config = surroundings.user_config
        self._loop = asyncio.get_running_loop()
        folder, home = surroundings.shared_memory, surroundings.memory_home
        self._shared = SharedBuffers(folder, home) if folder else None
        fetcher = Fetcher(self._shared, surroundings.secret) if self._shared is not None and home else None
        threads = Threads(recipe.threads, "call")
        self._calling = Calling(threads, may_wait=recipe.holds_handles)
        self._handles = Handles(recipe, surroundings, self._shared, fetcher)
        self._metrics = RecordedMetrics()
        self._target = Target(recipe, self._handles, self._calling, threads, self._shared, self._metrics.record)
        self._calls = CallsInFlight(
            recipe, self._target, self._calling, self._handles, self._shared, fetcher, self._metrics.record
        )
        self._http = HttpServer(self._handle)
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_ready = "its code is loading"
        """Why calls are refused; empty if they are accepted."""
        self._loaded = asyncio.Event()
        self._done = asyncio.Event()
        self._routes: Mapping[tuple[bytes, bytes], tuple[bool, ReplicaRoute]] = {
            (b"GET", b"/health"): (False, self._health),
            (b"GET", b"/ready"): (False, self._ready),
            (b"GET", b"/metrics"): (False, lambda client, _: client.answer(200, self._metrics.text(), KIND)),
            (b"POST", b"/configure"): (True, self._configure),
            (b"POST", b"/call"): (True, self._call),
        }
        """For each page: whether a request needs the secret, and the handler."""

    # Life cycle

    async def listen(self, host: str, port: int) -> int:
        """Start to accept connections. Returns the port."""
        return await self._http.listen(host, port)

    async def load(self) -> None:
        """Make the object and configure it, then accept calls. Raises the errors of both."""
        await self._target.load()
        if self._config is not None:
            await self._target.configure(self._config)
        self._loaded.set()
        if not self._http.draining:
            self._not_ready = ""

    def stop(self) -> None:
        """Refuse new calls, and finish the calls in flight. After that, `done` returns."""
        self._http.draining = True
        self._not_ready = "it is stopping"  # the answer to new calls: a closed connection looks like a failure
        self._calls.when_idle(lambda: self._loop.call_soon(self._done.set))  # after the answer is written

    async def done(self) -> None:
        """Wait until the server was stopped, all calls have ended, and their answers are sent."""
        await self._done.wait()
        self._http.stop_listening()
        for connection in list(self._http.connections):
            connection.close()
        for _ in range(200):
            if not self._http.connections:
                break
            await asyncio.sleep(0.005)
        if self._shared is not None:
            self._shared.close()

    # Requests

    def _handle(self, client: ServerConnection, request: HttpRequest) -> None:
        route = self._routes.get((request.method, request.path))
        if route is None:
            line = (b"%b %b" % (request.method, request.path)).decode("latin-1")
            client.answer(404, problem("UnknownPath", f"{line} is unknown to a replica"))
            return
        needs_secret, answer = route
        if needs_secret and not hmac.compare_digest(request.headers.get(SECRET, b""), self._secret):
            client.answer(403, problem("Forbidden", "x-pointsman-secret is not that of this plane"))
            return
        try:
            answer(client, request)
        except Exception as error:  # a defect of this server: the caller must see it, and so must the log
            traceback.print_exception(error)
            client.answer(*error_answer(error))

    def _ready(self, client: ServerConnection, _: HttpRequest) -> None:
        if self._not_ready:
            client.answer(503, problem("NotReady", self._not_ready))
        else:
            client.answer(200, OK)

    def _health(self, client: ServerConnection, _: HttpRequest) -> None:
        self._soon(_answer_with(client, self._target.check_health()))

    def _configure(self, client: ServerConnection, request: HttpRequest) -> None:
        try:
            config = msgspec.json.decode(request.body)
        except msgspec.DecodeError as error:
            client.answer(400, problem("BadRequest", f"the user config is not JSON: {error}"))
            return
        self._soon(_answer_with(client, self._configured(config)))

    async def _configured(self, config: Any) -> None:
        await self._loaded.wait()
        await self._target.configure(config)

    def _call(self, client: ServerConnection, request: HttpRequest) -> None:
        if self._not_ready:
            client.answer(503, problem("NotReady", self._not_ready))
        else:
            self._calls.begin(client, request)

    def _soon(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answer_with(client: ServerConnection, work: Awaitable[None]) -> None:
    """Answer when the work is done. If the work raises an error, answer with the error."""
    try:
        await work
    except Exception as error:
        client.answer(*error_answer(error))
    else:
        client.answer(200, OK)
