"""A test bed for gRPC: a real gateway, and applications whose replicas are real processes."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec

from pointsman.config import load_application
from pointsman.config.schema import GatewaySpec
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.grpc.server import SERVICE, PredictRequest, PredictResponse
from pointsman.gateway.listeners import GrpcListener
from pointsman.gateway.pipelines.applications import Applications
from pointsman.reasons import Reason
from pointsman.runtimes.local.runtime import LocalReplicaAccess
from pointsman.runtimes.machine.memory import SharedFolder
from pointsman.types import ExecutionInstance
from tests.gateway.bed import LoopThread
from tests.gateway.wire import TIMEOUT_S
from tests.replica.replicas import SECRET, replica

NODES = Path(__file__).with_name("nodes.py")
METHODS = ("echo", "as_bytes", "boom", "context", "count", "words", "large", "half", "forever")
"""One application per method, all on the same replica."""
SHOP = """
kind: Application
name: shop
nodes: [{name: everything, class: nodes.py:Everything}]
calls: [{id: c, node: everything, method: order, args: [{$input: [item]}, {$input: [count]}]}]
output: {$step: c}
ingress: {schema: nodes.py:Order}
"""
APP = """
kind: Application
name: %s
nodes: [{name: everything, class: nodes.py:Everything, maxConcurrency: 8}]
calls: [{id: c, node: everything, method: %s, args: [{$input: []}]}]
output: {$step: c}
"""
PAIR = """
kind: Application
name: pair
nodes: [{name: everything, class: nodes.py:Everything}]
calls:
- {id: a, node: everything, method: echo, args: [{$input: [left]}]}
- {id: b, node: everything, method: echo, args: [{$input: [right]}]}
output: {a: {$step: a}, b: {$step: b}}
"""


class Refusal(NamedTuple):
    """The error of a call."""

    code: str
    why: str
    metadata: Mapping[str, Any]


class GrpcBed:
    """A gateway with a gRPC listener on its own loop, and a client."""

    def __init__(self, thread: LoopThread, everything: int, shop_ingress: int, shared: Path) -> None:
        self.thread = thread
        self.is_ready = True
        folder = NODES.parent
        plans = [load_application(text, folder) for text in (*(APP % (one, one) for one in METHODS), SHOP, PAIR)]
        self._ports = {"ingress": shop_ingress, "everything": everything}
        self.gateway = thread.call(
            lambda: Gateway(GatewaySpec(listen="127.0.0.1:0", allowed_hosts=["gateway"]), thread.loop)
        )
        self.applications = Applications(self.gateway)
        access = LocalReplicaAccess(shared, shared)
        access.secret, access.memory = SECRET, SharedFolder(shared)
        self.applications.trust(access.secret, access.memory)
        thread.call(lambda: self.gateway.traffic.configure([one for plan in plans for one in plan.deployments]))
        thread.call(lambda: self.applications.configure(plans))
        for plan in plans:
            for deployment in plan.deployments:
                self.admit(deployment.name)
        self.listener = GrpcListener(self.gateway, self.applications, lambda: self.is_ready)
        self.port = thread.run(self.listener.open("127.0.0.1:0"))
        self.channel = grpc.insecure_channel(self.listener.address)
        self.one = _method(self.channel.unary_unary, "Predict")
        self.many = _method(self.channel.unary_stream, "PredictStream")

    def admit(self, deployment: str) -> None:
        """Add an instance to a deployment."""
        port = self._ports[deployment.rpartition(".")[2]]
        instance = ExecutionInstance(
            instance_id=f"{deployment}-1", host="127.0.0.1", port=port, model_name=deployment, max_concurrency=8
        )
        self.thread.call(lambda: self.gateway.traffic.admit(deployment, instance))

    def leave(self, deployment: str) -> None:
        """Remove the instance of a deployment."""
        self.thread.call(lambda: self.gateway.traffic.withdraw(deployment, f"{deployment}-1", Reason("it left")))

    # Calls

    def predict(self, application: str, value: Any = None, metadata: Mapping[str, str] | None = None) -> Any:
        """The decoded response of a call."""
        return msgspec.json.decode(self.fetch(application, value, metadata).json)

    def fetch(
        self, application: str, value: Any = None, metadata: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        return self.one(request(application, value), metadata=tuple((metadata or {}).items()), **_with_timeout(options))

    def stream(self, application: str, value: Any = None, **options: Any) -> Any:
        return self.many(request(application, value), **_with_timeout(options))

    def refusal(self, application: str, value: Any = None, metadata: Mapping[str, str] | None = None) -> "Refusal":
        """The error of a call that must fail."""
        return refusal(lambda: self.fetch(application, value, metadata))

    @contextmanager
    def settings(self, **changed: Any) -> Iterator[None]:
        """Change settings for the duration of a block."""
        before = self.gateway.settings
        after = msgspec.structs.replace(before, **changed)
        self.thread.call(lambda: self.gateway.configure(after))
        try:
            yield
        finally:
            self.thread.call(lambda: self.gateway.configure(before))

    def close(self) -> None:
        self.channel.close()
        self.thread.run(self.listener.close(1.0))
        self.thread.call(self.gateway.close)


@contextmanager
def running_grpc_bed(folder: Path) -> Iterator[GrpcBed]:
    """A test bed. Raises AssertionError at the end if a request is left over."""
    with (
        replica(folder, code=f"{NODES}:Everything", threads=8) as everything,
        replica(folder, kind="ingress", app="shop", node="ingress", schema=f"{NODES}:Order") as ingress,
    ):
        thread = LoopThread()
        try:
            grpc_bed = GrpcBed(thread, everything.port, ingress.port, folder / "shm")
            try:
                yield grpc_bed
                thread.run(_settled(grpc_bed))
            finally:
                grpc_bed.close()
        finally:
            thread.close()
    assert thread.errors == []


def refusal(call: Callable[[], object]) -> Refusal:
    """The error of a call that must fail."""
    try:
        response = call()
    except grpc.RpcError as error:
        trailing: Any = error.trailing_metadata()
        return Refusal(error.code().name, error.details() or "", dict(trailing))
    raise AssertionError(f"the call succeeded: {response}")


def request(application: str, value: Any) -> Any:
    return PredictRequest(application=application, json=msgspec.json.encode(value).decode())


def _method(kind: Any, name: str) -> Any:
    return kind(
        f"/{SERVICE}/{name}",
        request_serializer=PredictRequest.SerializeToString,
        response_deserializer=PredictResponse.FromString,
    )


def _with_timeout(options: dict[str, Any]) -> dict[str, Any]:
    return {"timeout": TIMEOUT_S} | options


async def _settled(grpc_bed: GrpcBed) -> None:
    """Wait until no request is in flight."""
    for _ in range(500):
        if not grpc_bed.gateway.in_flight and not len(grpc_bed.applications):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"requests are left over: {list(grpc_bed.gateway.upstream.in_flight)}")
