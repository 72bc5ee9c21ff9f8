"""Pages that the gateway answers itself: health, readiness, metrics and models."""

from collections.abc import Callable
from urllib.parse import unquote_to_bytes

import msgspec

from pointsman.errors import shown
from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway, GatewayPage
from pointsman.http.parser import HttpRequest

PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


def add_pages(gateway: Gateway, is_ready: Callable[[], bool]) -> None:
    def health(client: GatewayConnection, _: HttpRequest) -> None:
        client.answer(200, b'{"status":"ok"}')

    def ready(client: GatewayConnection, _: HttpRequest) -> None:
        if gateway.draining:
            client.error(503, "shutting down", "shutting_down")
        elif not is_ready():
            client.error(503, "no instance is ready yet; see: pointsman status", "not_ready", b"retry-after: 1\r\n")
        else:
            client.answer(200, b'{"status":"ready"}')

    def metrics(client: GatewayConnection, _: HttpRequest) -> None:
        client.answer(200, gateway.metrics.text(gateway.traffic, len(gateway.clients)).encode(), PROMETHEUS)

    def models(client: GatewayConnection, request: HttpRequest) -> None:
        try:
            gateway.admission.tenant_of(request, client)
        except NotAdmitted as error:
            client.refuse(error)
            return
        by_model = gateway.traffic.by_model
        listed = [_model(name, lane.name) for name, lane in by_model.items()]
        wanted = unquote_to_bytes(request.path.removeprefix(b"/v1/models").strip(b"/")).decode("utf-8", "replace")
        if not wanted:
            client.answer(200, msgspec.json.encode({"object": "list", "data": listed}))
        elif wanted in by_model:
            client.answer(200, msgspec.json.encode(_model(wanted, by_model[wanted].plan.name)))
        else:
            client.error(404, f'there is no model "{shown(wanted)}"', "model_not_found")

    for path, page in ((b"/health", health), (b"/ready", ready), (b"/metrics", metrics), (b"/v1/models", models)):
        gateway.pages[path] = only_read(page)
    gateway.page_trees[b"/v1/models/"] = only_read(models)


def only_read(page: GatewayPage) -> GatewayPage:
    """The page, for GET and HEAD only."""

    def read(client: GatewayConnection, request: HttpRequest) -> None:
        if request.method in (b"GET", b"HEAD"):
            page(client, request)
        else:
            client.error(405, "only GET and HEAD are allowed here", lines=b"allow: GET, HEAD\r\n")

    return read


def _model(name: str, deployment: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": deployment}
