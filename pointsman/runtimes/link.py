"""The messages between a plane and its gateways in other processes, and the frames of these messages.

The plane sends each gateway documents, instances, metrics and the state of the other gateways. A gateway sends the
plane reports about requests, instances and usage, and the records of requests.

A message is a msgpack array that begins with the name of the message. A frame is the length of the message in four
bytes, followed by the message. The gateway opens an HTTP connection for the frames: the plane sends its frames as the
pieces of one long response, and the gateway sends its frames as bodies of requests.
"""

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from pointsman.config.revision import ManifestText
from pointsman.control.status import Unavailable
from pointsman.reasons import Reason
from pointsman.routing.endpoints import Metrics
from pointsman.routing.outliers import Outlier
from pointsman.routing.peers import News
from pointsman.runtimes.serving import Ending
from pointsman.types import ExecutionInstance

SHARE_S = 0.1
"""Interval between reports if something has changed."""
BEAT_S = 1.0
"""Interval between reports if nothing has changed."""
MAX_FRAME = 64 * 1024 * 1024


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message between a plane and a gateway."""


# Messages of the plane


class UseDocuments(LinkMessage, frozen=True):
    """The documents in force, and where to listen."""

    manifest: ManifestText | None
    applications: dict[str, ManifestText]
    listen: str
    grpc_listen: str
    processes: int
    """Number of gateways among which the limits are divided."""


class InstanceReady(LinkMessage, frozen=True):
    """An instance takes requests, or one of its properties has changed."""

    deployment: str
    instance: ExecutionInstance


class InstanceGone(LinkMessage, frozen=True):
    """An instance is gone: its requests are sent to other instances."""

    deployment: str
    instance_id: str
    why: Reason


class KnownInstances(LinkMessage, frozen=True):
    """All instances of the plane, in service or not. Instances that are not in the list are gone."""

    instance_ids: list[str]


class AwaitIdle(LinkMessage, frozen=True):
    """Send `BecameIdle` as soon as no request is in flight on an instance."""

    deployment: str
    instance_id: str


class EngineMetrics(LinkMessage, frozen=True):
    deployment: str
    instance_id: str
    metrics: Metrics
    text: str | None
    """The text from which the metrics were read, if extractors need it."""


class RestInstance(LinkMessage, frozen=True):
    """An instance is idle, and is observed less often until it is sent a request."""

    deployment: str
    instance_id: str
    for_s: float | None
    """Seconds until the instance is measured again; None if it is not measured."""


class UnavailabilityNotice(LinkMessage, frozen=True):
    """Why no instance of a deployment takes requests. `why` is None if an instance takes requests."""

    deployment: str
    start_up_s: float | None
    why: Unavailable | None


class PeerNews(LinkMessage, frozen=True):
    """A sign of life from another gateway, and the changes at that gateway, by deployment."""

    peer: str
    news: dict[str, News]


class PeerEnded(LinkMessage, frozen=True):
    peer: str


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A grant of a tenant's limits, in requests, tokens and cost."""

    give: tuple[float, float, float]
    take: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Amounts to return, unless they are used or reserved."""
    period_left_s: float | None = None
    """Seconds until the budget is renewed; None if it is not used up."""


class Grants(LinkMessage, frozen=True):
    tenants: dict[str, Grant]


class Readiness(LinkMessage, frozen=True):
    """Whether every deployment has an instance that takes requests, or is scaled to zero."""

    ready: bool


class Inquiry(LinkMessage, frozen=True):
    """A question, to be answered with `InquiryAnswer`."""

    number: int
    about: str
    """The subject: metrics, request, requests, shadow, canary or recording."""
    details: dict[str, str]


class StopServing(LinkMessage, frozen=True):
    """Accept no new requests, finish those in flight, and end. Requests that take longer than this are cut off."""

    within_s: float


PlaneMessage: TypeAlias = (
    UseDocuments | InstanceReady | InstanceGone | KnownInstances | AwaitIdle | EngineMetrics | RestInstance
    | UnavailabilityNotice | PeerNews | PeerEnded | Grants | Readiness | Inquiry | StopServing
)  # fmt: skip

# Messages of a gateway


class TenantUse(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway has used of a tenant's limits since its last report, in requests, tokens and cost."""

    used: tuple[float, float, float]
    returned: tuple[float, float, float]
    needed: tuple[float, float, float]
    """Some requests were refused because too little was left. These amounts were missing for the largest of them."""
    held: tuple[float, float, float]
    """Amounts that are granted and not yet used."""
    in_flight: int = 0
    reserved: tuple[float, float] = (0.0, 0.0)
    """Reserved tokens and cost."""


class Joining(LinkMessage, frozen=True):
    """The first message of a connection."""

    gateway: str
    tenants: dict[str, TenantUse]
    url: str = ""
    """The address at which the gateway listens; empty if it does not listen yet."""


class InstanceLoad(msgspec.Struct, frozen=True, array_like=True):
    """The requests of one gateway on an instance, and what the gateway has learned about the instance."""

    requests: int
    in_flight: int
    worked_at: float | None
    """When the instance last answered a request, by the clock of the gateway; None if it never did."""
    latency_ms: float | None = None
    throughput: float | None = None
    paused_until: float | None = None
    silence: Reason | None = None
    """Why the gateway sends the instance no requests, if the instance is silent; None otherwise."""


class LaneLoad(msgspec.Struct, frozen=True, array_like=True):
    """The requests of a deployment at one gateway."""

    running: int = 0
    waiting: int = 0
    arrived: int = 0
    instances: dict[str, InstanceLoad] = {}


class LinkReport(LinkMessage, frozen=True):
    """The changes at a gateway."""

    now: float
    """The time on the clock of the gateway."""
    lanes: dict[str, LaneLoad]
    endings: dict[str, list[Ending]]
    news: dict[str, News]
    tenants: dict[str, TenantUse]
    connections: int = 0
    in_flight: int = 0
    requests: int = 0
    """Total number of requests that were answered."""
    problems: list[Reason] | None = None
    """The present problems; None if they have not changed."""
    summaries: dict[str, tuple[int, int, float, int]] | None = None
    """By deployment: answered requests, errors, total seconds of ended requests, and number of ended requests. None if
    nothing has changed."""


class Listens(LinkMessage, frozen=True):
    """Whether the gateway accepts requests as the last documents demand, or why it cannot."""

    url: str
    grpc: str = ""
    problem: str = ""
    calls: str = ""
    """The address at which the gateway takes calls from replicas, as host:port."""


class RequestsFailing(LinkMessage, frozen=True):
    instance_id: str
    why: Reason


class StoodOut(LinkMessage, frozen=True):
    outlier: Outlier


class Stirred(LinkMessage, frozen=True):
    """An instance that rested was sent a request."""

    instance_id: str


class InstanceWanted(LinkMessage, frozen=True):
    """A request waits, and no instance takes requests."""

    deployment: str


class BecameIdle(LinkMessage, frozen=True):
    instance_id: str


class RecordLines(LinkMessage, frozen=True):
    """Records of requests that have ended, for the file of the plane."""

    lines: list[bytes]


class InquiryAnswer(LinkMessage, frozen=True):
    number: int
    body: bytes
    """A record as JSON."""


class Stopped(LinkMessage, frozen=True):
    """The last message: the number of requests that were cut off."""

    cut_off: int


GatewayMessage: TypeAlias = (
    LinkReport
    | Listens
    | RequestsFailing
    | StoodOut
    | Stirred
    | InstanceWanted
    | BecameIdle
    | RecordLines
    | InquiryAnswer
    | Stopped
)

_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)
_OF_PLANE: msgspec.msgpack.Decoder[PlaneMessage] = msgspec.msgpack.Decoder(PlaneMessage)
_OF_GATEWAY: msgspec.msgpack.Decoder[GatewayMessage] = msgspec.msgpack.Decoder(GatewayMessage)
_JOINING = msgspec.msgpack.Decoder(Joining)


def frame(message: LinkMessage) -> bytes:
    body = _ENCODER.encode(message)
    return len(body).to_bytes(4, "big") + body


def joining(body: bytes) -> Joining:
    """Raises `msgspec.MsgspecError`."""
    return _JOINING.decode(body)


class Frames:
    """Reads messages from bytes as they arrive."""

    def __init__(self) -> None:
        self._received = bytearray()

    def plane(self, data: bytes) -> list[PlaneMessage]:
        return [_OF_PLANE.decode(body) for body in self._bodies(data)]

    def gateway(self, data: bytes) -> list[GatewayMessage]:
        return [_OF_GATEWAY.decode(body) for body in self._bodies(data)]

    def _bodies(self, data: bytes) -> Iterable[bytes]:
        received = self._received
        received += data
        bodies, start = [], 0
        while len(received) - start >= 4:
            end = start + 4 + int.from_bytes(received[start : start + 4], "big")
            if end - start > MAX_FRAME:
                raise msgspec.DecodeError(f"a frame has {end - start} bytes")
            if end > len(received):
                break
            bodies.append(bytes(received[start + 4 : end]))
            start = end
        del received[:start]
        return bodies


def portable(reason: Reason) -> Reason:
    """A reason whose facts are plain data and include its text, because the other side cannot render the facts."""
    told = reason.as_dict()
    return Reason(told["code"], {**told["facts"], "text": told["text"]})


def portable_instance(instance: ExecutionInstance) -> ExecutionInstance:
    if instance.closed is None:
        return instance
    return msgspec.structs.replace(instance, closed=portable(instance.closed))


def portable_unavailability(why: Unavailable) -> Unavailable:
    return msgspec.structs.replace(why, why=portable(why.why))
