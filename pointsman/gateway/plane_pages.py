"""Pages about the plane as a whole, at a gateway in its own process. The plane answers requests for these pages."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TypeAlias

from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.connection import GatewayConnection, PendingAnswer
from pointsman.gateway.event_admin import wants_stream
from pointsman.gateway.gateway import READ, Gateway, GatewayPage
from pointsman.gateway.pages import PROMETHEUS
from pointsman.gateway.tenants import Tenant
from pointsman.http.client import NoResponse, StreamedResponse
from pointsman.http.heads import HttpRequest
from pointsman.http.responses import CONTENT_TYPE as EVENT_STREAM
from pointsman.http.server import ResponseStream

ANSWER_S = 10.0
"""Time limit for the plane's answer."""
AskPlane: TypeAlias = Callable[[HttpRequest], AbstractAsyncContextManager[StreamedResponse]]
"""Sends a client's request to the plane, and opens its answer. Raises `NoResponse`."""


class ForwardedStream(PendingAnswer):
    """A stream from the plane for a client of this gateway. The gateway reads it as fast as the client reads."""

    def __init__(self, client: GatewayConnection) -> None:
        super().__init__(client)
        self.task: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    async def pass_on(self, response: StreamedResponse) -> None:
        """Send the stream to the client. The stream ends when the plane ends; an event source then reconnects."""
        client = self.client
        if client is None:
            return
        stream = ResponseStream(client, b"content-type: %b\r\ncache-control: no-store\r\n" % EVENT_STREAM)
        with suppress(NoResponse):
            async for piece in response.pieces():
                stream.write(piece)
                await self._may_write.wait()
        stream.end()

    def abandon(self) -> None:
        super().abandon()
        if self.task is not None:
            self.task.cancel()

    def pause(self) -> None:
        self._may_write.clear()

    def resume(self) -> None:
        self._may_write.set()


class PlanePages:
    """Pages about the plane as a whole, which the plane answers itself."""

    def __init__(self, gateway: Gateway, ask: AskPlane) -> None:
        self._gateway = gateway
        self._ask = ask
        self._running: set[asyncio.Task[None]] = set()
        gateway.pages.exact[b"/metrics"] = GatewayPage(self._forward, gateway.admission.page_reader, READ)
        gateway.pages.trees[b"/admin/v1/"] = GatewayPage(self._forward, self._check)

    def _check(self, request: HttpRequest, client: GatewayConnection) -> None:
        if not self._gateway.admission.keys.opens_admin(request):
            why = "the admin API needs its key: authorization: Bearer KEY (gateway.adminKeySha256)"
            raise NotAdmitted(401, why, "invalid_admin_key")

    def _forward(self, client: GatewayConnection, request: HttpRequest, tenant: Tenant | None) -> None:
        running = ForwardedStream(client) if wants_stream(request) else PendingAnswer(client)
        client.serving = running
        task = self._gateway.loop.create_task(self._answer(running, request))
        if isinstance(running, ForwardedStream):
            running.task = task
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, running: PendingAnswer, request: HttpRequest) -> None:
        kind = PROMETHEUS if request.path == b"/metrics" else b"application/json"
        try:
            async with asyncio.timeout(ANSWER_S) as limit, self._ask(request) as response:
                status = response.status
                if status == 200 and isinstance(running, ForwardedStream):
                    limit.reschedule(None)
                    await running.pass_on(response)
                    return
                body = await response.read()
        except (NoResponse, TimeoutError):
            if running.client is not None:
                why = "the plane behind this gateway does not answer; requests to models are served all the same"
                running.client.error(503, why, "no_plane", b"retry-after: 1\r\n")
            return
        if running.client is not None:
            running.client.answer(status, body, kind)
