"""A client's connection to the gateway, over HTTP, with errors in the form of the OpenAI API."""

from typing import TYPE_CHECKING

from pointsman.gateway.messages import MESSAGES, error_form
from pointsman.gateway.openai import error_body, error_kind
from pointsman.http.server import ConnectionOwner, ServerConnection
from pointsman.reasons import Reason

if TYPE_CHECKING:
    from pointsman.gateway.admission import Keys, NotAdmitted
    from pointsman.gateway.tenants import Tenant


class GatewayConnection(ServerConnection):
    __slots__ = ("is_local", "is_replica", "key_memo")

    def __init__(self, owner: ConnectionOwner, *, is_local: bool = False, is_replica: bool = False) -> None:
        super().__init__(owner)
        self.is_replica = is_replica
        """Whether the client connected to the address for replicas, where every call needs the replicas' secret."""
        self.is_local = is_local
        """Whether the client connected over the socket in the state directory, whose owner may do anything."""
        self.key_memo: tuple[Keys, bytes, Tenant] | None = None
        """The last credentials on this connection, and the tenant that they belong to."""

    def error(
        self, status: int, message: str | Reason, code: str | None = None, lines: bytes = b"", path: bytes = b""
    ) -> None:
        """Answer the current request with an error, in the form of its API; a `Reason` is added as `error.reason`.
        `path` is the path of the request if its body has not arrived yet."""
        extra = {"reason": message.as_dict()} if isinstance(message, Reason) else {}
        if (path if self.request is None else self.request.path).startswith(MESSAGES):
            self.answer(status, error_form(status, str(message), code=code, **extra), lines=lines)
            return
        self.answer(status, error_body(str(message), error_kind(status), code, **extra), lines=lines)

    def refuse(self, error: "NotAdmitted", path: bytes = b"") -> None:
        """Refuse a request that is not admitted: the current one, or one whose body has not arrived yet."""
        self.error(error.status, str(error), error.code, error.lines, path)


class PendingAnswer:
    """A request that a coroutine answers. The coroutine continues if its client disconnects."""

    def __init__(self, client: GatewayConnection) -> None:
        self.client: GatewayConnection | None = client
        """The connection; None once the client has disconnected."""

    def abandon(self) -> None:
        self.client = None

    def pause(self) -> None: ...

    def resume(self) -> None: ...
