"""Who asks what of a replica, and when it has had enough."""

import asyncio
import hmac
import traceback
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Any

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.http.server import Connection, ServerExchange, listen
from pointsman.pipeline.context import CallContext
from pointsman.replica.batches import Batches
from pointsman.replica.calling import Calling, Threads
from pointsman.replica.calls import ReplicaCall, error_answer, problem
from pointsman.replica.ingress import Request
from pointsman.replica.methods import Method
from pointsman.replica.target import Handles, Recipe, Surroundings, Target
from pointsman.wire import CallHead, HandleAt, SharedMemory, arguments, decode_call, decode_plain

# Numbers of the author's own, as a replica tells them to whoever asks.


MOST = 100
"""Names that are kept; beyond that, the one that was recorded longest ago goes."""
KIND = "text/plain; version=0.0.4; charset=utf-8"


class CustomMetrics:
    """The last value of each. Any thread may record."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def record(self, name: str, value: float) -> None:
        """It is this from now on."""
        values = {other: known for other, known in self._values.items() if other != name}
        values[name] = value
        if len(values) > MOST:
            del values[next(iter(values))]
        self._values = values  # in one step: others may be reading

    def text(self) -> bytes:
        """As Prometheus reads it."""
        lines = ["# TYPE pointsman_custom_metric gauge"]
        lines += [f'pointsman_custom_metric{{name="{_escaped(name)}"}} {value}' for name, value in self._values.items()]
        return ("\n".join(lines) + "\n").encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


OK = b'{"status":"ok"}'
SECRET = b"x-pointsman-secret"
LOADING = "its code is being loaded"
STOPPING = "it is being stopped"


class ReplicaServer:
    """One replica."""

    def __init__(self, recipe: Recipe, surroundings: Surroundings) -> None:
        self._recipe = recipe
        self._secret = surroundings.secret.encode()
        self._config = surroundings.user_config
        self._loop = asyncio.get_running_loop()
        self._shared = SharedMemory(surroundings.shared_memory) if surroundings.shared_memory else None
        threads = Threads(recipe.threads, "call")
        self._calling = Calling(threads, may_wait=recipe.holds_handles)
        self._handles = Handles(recipe, surroundings, self._shared)
        self._metrics = CustomMetrics()
        self._target = Target(recipe, self._handles, self._calling, threads, self._shared, self._metrics.record)
        self._batches: dict[Method, Batches] = {}
        self._in_flight: set[ReplicaCall] = set()
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_ready = LOADING
        """Why no call is taken; empty: they are."""
        self._loaded = asyncio.Event()
        self._stopping = False
        self._done = asyncio.Event()
        self._routes: Mapping[tuple[bytes, bytes], tuple[bool, Callable[[ServerExchange], None]]] = {
            (b"GET", b"/health"): (False, self._health),
            (b"GET", b"/ready"): (False, self._ready),
            (b"GET", b"/metrics"): (False, lambda exchange: exchange.respond(200, self._metrics.text(), KIND)),
            (b"POST", b"/configure"): (True, lambda exchange: self._soon(self._configure(exchange))),
            (b"POST", b"/call"): (True, self._call),
        }
        """(needs the secret, what is done)"""

    # From its beginning to its end

    async def listen(self, host: str, port: int) -> int:
        """Take connections; the port that was taken."""
        self._listener, taken = await listen(host, port, self._handle, self._connections)
        return taken

    async def load(self) -> None:
        """Make the object and configure it; calls are taken from then on. Raises what that raises."""
        await self._target.load()
        if self._config is not None:
            await self._target.configure(self._config)
        self._loaded.set()
        if not self._stopping:
            self._not_ready = ""

    def stop(self) -> None:
        """Take no more calls, finish what is under way, then be `done`."""
        self._stopping = True
        self._not_ready = STOPPING  # who asks is told so: a connection that is merely closed looks like a failure
        self._done_if_nothing_is_left()

    async def done(self) -> None:
        """Wait until it was stopped, everything has ended, and the answers are out."""
        await self._done.wait()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close()
        for _ in range(200):
            if not self._connections:
                break
            await asyncio.sleep(0.005)
        if self._shared is not None:
            self._shared.close()

    # Requests

    def _handle(self, exchange: ServerExchange) -> None:
        route = self._routes.get((exchange.method, exchange.path))
        if self._stopping:
            exchange.hang_up()
        if route is None:
            exchange.respond(404, problem("UnknownPath", f"{exchange.asked} is nothing that a replica answers"))
            return
        needs_secret, answer = route
        if needs_secret and not hmac.compare_digest(exchange.headers.get(SECRET, b""), self._secret):
            exchange.respond(403, problem("Forbidden", "x-pointsman-secret is not that of this plane"))
            return
        try:
            answer(exchange)
        except Exception as error:  # of ours: whoever asked must hear of it, and so must the log
            traceback.print_exception(error)
            exchange.respond(*error_answer(error))

    def _ready(self, exchange: ServerExchange) -> None:
        if self._not_ready:
            exchange.respond(503, problem("NotReady", self._not_ready))
        else:
            exchange.respond(200, OK)

    def _health(self, exchange: ServerExchange) -> None:
        self._soon(_done_or_why(exchange, self._target.check_health()))

    async def _configure(self, exchange: ServerExchange) -> None:
        try:
            config = msgspec.json.decode(exchange.body)
        except msgspec.DecodeError as error:
            exchange.respond(400, problem("BadRequest", f"the user config is not JSON: {error}"))
            return
        await self._loaded.wait()
        await _done_or_why(exchange, self._target.configure(config))

    def _call(self, exchange: ServerExchange) -> None:
        if self._not_ready:
            exchange.respond(503, problem("NotReady", self._not_ready))
            return
        assert self._target.methods is not None
        handed: list[HandleAt] = []

        def handle(to: HandleAt) -> Any:
            handed.append(to)
            return self._handles(to)

        try:
            head, blobs = decode_call(exchange.body)
            if head.deadline_s is not None and head.deadline_s <= 0:
                exchange.respond(504, problem("DeadlineExceeded", f"the time for {head.method} was over already"))
                return
            method = self._target.methods.find(head.method)
            args, kwargs = arguments(head, blobs, self._shared, handle)
            if head.http is not None:
                args = [Request(head.http, decode_plain(blobs[0]) if blobs else b"")]
        except UnknownName as error:
            exchange.respond(404, problem("UnknownMethod", str(error)))
            return
        except PointsmanError as error:
            exchange.respond(400, problem(type(error).__name__, str(error)))
            return
        call = ReplicaCall(exchange, head, method, args, kwargs, self._context(head), self._shared, self._ended)
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
        deadline = None if head.deadline_s is None else monotonic() + head.deadline_s
        return CallContext(
            app=recipe.app,
            node=recipe.node,
            rank=recipe.rank,
            shards=recipe.shards,
            request_id=head.request_id,
            step=head.step,
            priority=head.priority,
            tenant=head.tenant,
            deadline=deadline,
            clock=monotonic,  # the loop's own stands still while it waits
            recorder=self._metrics.record,
        )

    def _batch_of(self, method: Method) -> Batches:
        batches = self._batches.get(method)
        if batches is None:
            assert method.batching is not None
            batches = self._batches[method] = Batches(method, method.batching, self._calling)
        return batches

    def _ended(self, call: ReplicaCall) -> None:
        self._in_flight.discard(call)
        if self._stopping:
            self._done_if_nothing_is_left()

    def _done_if_nothing_is_left(self) -> None:
        if not self._in_flight:
            self._loop.call_soon(self._done.set)  # after the answer is written

    def _soon(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _done_or_why(exchange: ServerExchange, work: Awaitable[None]) -> None:
    """Answer when it is done, or with what it raised."""
    try:
        await work
    except Exception as error:
        exchange.respond(*error_answer(error))
    else:
        exchange.respond(200, OK)
