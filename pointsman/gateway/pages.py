"""Pages that the gateway answers itself: health, readiness, metrics and models. Clients share copies of costly
pages."""

import time
from collections.abc import Callable, Mapping
from urllib.parse import unquote_to_bytes

import msgspec

from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import READ, Gateway, GatewayPage, needs_no_key, unknown_model
from pointsman.http.heads import HttpRequest
from pointsman.runtimes.traffic import Lane, Traffic

PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
PAGE_SHARE = 0.05
"""Each page takes at most this share of a core, however many clients request it."""
PAGE_CREDIT_S = 0.02
"""Processor time that a page may take at once if it was not rendered for a while. Within this time, every client gets a
current page."""


class SharedPage:
    """A page that may be costly to render. If a page is costly, or clients request it very often, clients share a
    cached copy."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._content: bytes | None = None
        self._credit_s = PAGE_CREDIT_S
        self._credited_at = time.monotonic()

    @property
    def cached(self) -> bytes | None:
        """The cached copy if the page may not be rendered now; else None."""
        now = time.monotonic()
        self._credit_s = min(self._credit_s + (now - self._credited_at) * PAGE_SHARE, PAGE_CREDIT_S)
        self._credited_at = now
        return self._content if self._credit_s <= 0.0 else None

    def content(self) -> bytes:
        content = self.cached
        return self.rendered(self._make) if content is None else content

    def rendered(self, make: Callable[[], bytes]) -> bytes:
        """Render the page with this function, and keep a copy."""
        began = time.thread_time()  # this clock does not count the time of other processes
        content = self._content = make()
        self._credit_s -= time.thread_time() - began
        return content

    def forget(self) -> None:
        """Drop the cached copy, because a request has changed the content."""
        self._content = None


def add_pages(gateway: Gateway, is_ready: Callable[[], bool]) -> None:
    def health(client: GatewayConnection, *_: object) -> None:
        client.answer(200, b'{"status":"ok"}')

    def ready(client: GatewayConnection, *_: object) -> None:
        if gateway.draining:
            client.error(503, "shutting down", "shutting_down")
        elif not is_ready():
            client.error(503, "no instance is ready yet; see: pointsman status", "not_ready", b"retry-after: 1\r\n")
        else:
            client.answer(200, b'{"status":"ready"}')

    figures = SharedPage(lambda: gateway.metrics.text(gateway).encode())
    catalogue = ModelCatalogue(gateway.traffic)

    def metrics(client: GatewayConnection, *_: object) -> None:
        client.answer(200, figures.content(), PROMETHEUS)

    def models(client: GatewayConnection, request: HttpRequest, *_: object) -> None:
        by_model = gateway.traffic.by_model
        wanted = unquote_to_bytes(request.path.removeprefix(b"/v1/models").strip(b"/")).decode("utf-8", "replace")
        if not wanted:
            client.answer(200, catalogue.content())
        elif wanted in by_model:
            client.answer(200, msgspec.json.encode(_model(wanted, by_model[wanted].plan.name)))
        else:
            client.error(*unknown_model(wanted, list(by_model)))

    gateway.pages.exact[b"/health"] = GatewayPage(health, needs_no_key, READ)
    gateway.pages.exact[b"/ready"] = GatewayPage(ready, needs_no_key, READ)
    gateway.pages.exact[b"/metrics"] = GatewayPage(metrics, gateway.admission.page_reader, READ)
    gateway.pages.exact[b"/v1/models"] = gateway.pages.trees[b"/v1/models/"] = GatewayPage(
        models, gateway.admission.tenant_of, READ
    )


class ModelCatalogue:
    """The list of all models, encoded again only when the models change."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._of: Mapping[str, Lane] | None = None
        self._content = b""

    def content(self) -> bytes:
        by_model = self._traffic.by_model
        if self._of is not by_model:
            listed = [_model(name, lane.name) for name, lane in by_model.items()]
            self._of, self._content = by_model, msgspec.json.encode({"object": "list", "data": listed})
        return self._content


def _model(name: str, deployment: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": deployment}
