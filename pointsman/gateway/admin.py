"""The admin API: status, decisions with their reasons, and changes, for clients that have its key or connect to the
local listener.

Enters: a request under `/admin/v1`. Leaves: JSON. The one rule: the API passes requests to the plane, and decides
nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any, TypeAlias
from urllib.parse import parse_qs, unquote

import msgspec

from pointsman.config.changes import NotConfirmed
from pointsman.config.revision import ManifestText
from pointsman.errors import (
    ConfigError,
    NotStored,
    PointsmanError,
    UnknownName,
    in_words,
)
from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.connection import GatewayConnection, PendingAnswer
from pointsman.gateway.event_admin import EventAdmin, wants_stream
from pointsman.gateway.gateway import Gateway, GatewayPage
from pointsman.gateway.lookup import (
    AdminCall,
    AskGateways,
    BadQuery,
    NotFound,
    RequestAdmin,
    number_in,
    of_another_kind,
)
from pointsman.gateway.openai import error_body, error_kind
from pointsman.gateway.pages import SharedPage
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.recording import RecordingAdmin
from pointsman.gateway.shadows import ShadowAdmin
from pointsman.gateway.tenants import Tenant
from pointsman.http.heads import HttpRequest
from pointsman.render.text import one_line
from pointsman.runtimes.event_log import Asker
from pointsman.runtimes.interface import Operations

PREFIX = b"/admin/v1/"
HARMLESS = (("POST", "plan"), ("POST", "recording"))
"""Requests that change nothing, each as its method and the last part of its path."""
MAX_OVERRIDE_S = 366 * 86400.0
"""Longest time limit of a scaling override."""
MAX_AUTHOR = 100
"""Maximum number of characters in an operator's name."""
AUTHOR = b"x-pointsman-author"
"""The header in which operators name themselves."""
UNNAMED = "the admin API"
ON_THIS_MACHINE = "this machine"
"""Names for operators who do not name themselves: those with the admin key, and those on the local listener."""


Handler: TypeAlias = Callable[[AdminCall], Coroutine[Any, Any, Any]]


class DocumentRequest(ManifestText, frozen=True):
    """A document to put in force."""

    confirmation: str = ""
    """Confirms a destructive change."""

    @property
    def document(self) -> ManifestText:
        return ManifestText(self.text, self.folder, self.file)


class RollbackRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Return to an earlier version."""

    generation: int | None = None
    """Generation of the manifest; None means the previous one. Applications have no generations."""
    confirmation: str = ""


class DocumentAdmin:
    """Plans and applies manifests; `/admin/v1/applications` deploys, shows, rolls back and deletes applications."""

    def __init__(self, plane: Operations, status: Callable[[], dict[str, Any]]) -> None:
        self._plane = plane
        self._status = status

    async def every(self, call: AdminCall) -> dict[str, Any]:
        return {"applications": self._status()["applications"]}

    async def one(self, call: AdminCall) -> dict[str, Any]:
        name = call.parts[1]
        text, status = self._plane.documents.application(name), self._status()
        [application] = [one for one in status["applications"] if one["name"] == name]
        mine = {deployment for node in application["nodes"] for deployment in node["deployments"]}
        deployments = [one for one in status["deployments"] if one["name"] in mine]
        return {**application, "yaml": text, "deployments": deployments}

    async def plan(self, call: AdminCall) -> dict[str, Any]:
        return self._plane.documents.plan(msgspec.json.decode(call.body, type=ManifestText)).as_dict()

    async def deploy(self, call: AdminCall) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body, type=DocumentRequest)
        return (await self._plane.documents.deploy(asked.document, asked.confirmation, call.asker)).as_dict()

    async def apply(self, call: AdminCall) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body, type=DocumentRequest)
        return (await self._plane.documents.apply(asked.document, asked.confirmation, call.asker)).as_dict()

    async def rollback(self, call: AdminCall) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body or b"{}", type=RollbackRequest)
        return (await self._plane.documents.rollback(call.parts[1], asked.confirmation, call.asker)).as_dict()

    async def history(self, call: AdminCall) -> dict[str, Any]:
        kept = self._plane.documents.history()
        told = [
            {
                "generation": one.generation,
                "at": datetime.fromtimestamp(one.at, UTC).isoformat(timespec="seconds"),
                "file": one.document.file,
                "summary": one.summary,
                "restores": one.restores,
                "in_force": one is kept[0],
            }
            for one in kept
        ]
        return {"manifests": told}

    async def restore(self, call: AdminCall) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body or b"{}", type=RollbackRequest)
        return (await self._plane.documents.restore(asked.generation, asked.confirmation, call.asker)).as_dict()

    async def delete(self, call: AdminCall) -> dict[str, Any]:
        return (await self._plane.documents.delete(call.parts[1], call.asker)).as_dict()


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of replicas to hold, whatever the policy decides."""

    replicas: Annotated[int, msgspec.Meta(ge=0)] | None
    """None if the policy decides again."""
    for_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """None if the number holds until further notice."""
    by: str = ""
    """The operator who asks for this; if empty, the sender of the request."""


class DeploymentAdmin:
    """`/admin/v1/deployments`: replica counts, their reasons, and overrides."""

    def __init__(self, plane: Operations) -> None:
        self._plane = plane

    async def scaling(self, call: AdminCall) -> dict[str, Any]:
        return self._plane.scaling.status(call.parts[1])

    async def load(self, call: AdminCall) -> dict[str, Any]:
        return self._plane.scaling.load_history(call.parts[1])

    async def scale(self, call: AdminCall) -> dict[str, Any]:
        wanted = msgspec.json.decode(call.body, type=ScaleRequest)
        if wanted.for_s is not None and wanted.for_s > MAX_OVERRIDE_S:
            raise PointsmanError(
                f"for_s may be at most a year, which is {MAX_OVERRIDE_S:.0f}, found {wanted.for_s:.10g}; "
                "leave it out to hold the number until further notice"
            )
        by = one_line(wanted.by, MAX_AUTHOR) or call.asker.name
        self._plane.scaling.scale(call.parts[1], wanted.replicas, wanted.for_s, by)
        return self._plane.scaling.status(call.parts[1])


class Admin:
    """Answers requests under `/admin/v1`."""

    def __init__(
        self,
        gateway: Gateway,
        plane: Operations,
        status: Callable[[], dict[str, Any]],
        stop: Callable[[], None],
        applications: Applications | None = None,
        ask: AskGateways | None = None,
        shadows: ShadowAdmin | None = None,
        recording: RecordingAdmin | None = None,
    ) -> None:
        """`status` returns the status of plane and gateway, `stop` stops both, and `ask` asks gateways in other
        processes."""
        self._shadows = shadows
        self._recording = recording
        self._gateway = gateway
        self._plane = plane
        self._stop = stop
        self._status = status
        self._status_page = SharedPage(lambda: msgspec.json.encode(status()))
        self._fleet_page = SharedPage(lambda: msgspec.json.encode(plane.control.fleet()))
        self._documents = DocumentAdmin(plane, status)
        self._deployments = DeploymentAdmin(plane)
        self._events = EventAdmin(plane.events)
        self._requests = RequestAdmin(gateway, status, applications, ask)
        self._tasks: set[asyncio.Task[None]] = set()
        gateway.pages.trees[PREFIX] = GatewayPage(self.serve, self._check)

    def _check(self, request: HttpRequest, client: GatewayConnection) -> None:
        if not client.is_local and not self._gateway.admission.keys.opens_admin(request):
            why = "the admin API needs its key: authorization: Bearer KEY (gateway.adminKeySha256)"
            raise NotAdmitted(401, why, "invalid_admin_key")

    def serve(self, client: GatewayConnection, request: HttpRequest, tenant: Tenant | None) -> None:
        parts = [unquote(part) for part in request.path.removeprefix(PREFIX).decode("latin-1").split("/")]
        query = {name: values[-1] for name, values in parse_qs(request.query.decode("latin-1")).items()}
        author = request.headers.get(AUTHOR, b"").decode("latin-1")
        # A gateway process passes its client's request on over the local socket, with the client's key.
        key = self._gateway.admission.keys.admin_fingerprint(request)
        by = one_line(author, MAX_AUTHOR) or (ON_THIS_MACHINE if client.is_local and not key else UNNAMED)
        call = AdminCall(parts, query, bytes(request.body), Asker(by, key))
        method = "GET" if request.method == b"HEAD" else request.method.decode("latin-1")
        handler = self.handler(method, parts)
        if handler is None:
            client.error(404, f"there is no {method} {request.path.decode('latin-1')[:200]}", "not_found")
            return
        if parts == ["events"] and wants_stream(request):
            try:
                self._events.follow(client, request, query)
            except BadQuery as error:
                client.error(400, str(error))
            return
        running = PendingAnswer(client)
        client.serving = running
        task = self._gateway.loop.create_task(self._answer(running, handler(call), method, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def handler(self, method: str, parts: list[str]) -> Handler | None:
        """The handler for a method and a path below the prefix; None if there is no such handler."""
        match method, parts:
            case "GET", ["status"]:
                return self._get_status
            case "GET", ["fleet"]:
                return self._fleet
            case "POST", ["plan"] | ["applications", "plan"]:
                return self._documents.plan
            case "POST", ["apply"]:
                return self._documents.apply
            case "GET", ["events"]:
                return self._events.read
            case "GET", ["history"]:
                return self._documents.history
            case "POST", ["rollback"]:
                return self._documents.restore
            case "GET", ["requests"]:
                return self._requests.newest
            case "GET", ["requests", _]:
                return self._requests.one
            case "GET", ["applications"]:
                return self._documents.every
            case "POST", ["applications"]:
                return self._documents.deploy
            case "GET", ["applications", _]:
                return self._documents.one
            case "POST", ["applications", _, "rollback"]:
                return self._documents.rollback
            case "DELETE", ["applications", _]:
                return self._documents.delete
            case "GET", ["deployments", _, "scaling"]:
                return self._deployments.scaling
            case "GET", ["deployments", _, "load"]:
                return self._deployments.load
            case "POST", ["deployments", _, "scale"]:
                return self._deployments.scale
            case "POST", ["recording"] if self._recording is not None:
                return self._recording.read
            case "GET", ["shadow"] if self._shadows is not None:
                return self._shadows.shadow
            case "GET", ["promotions"] if self._shadows is not None:
                return self._shadows.promotions
            case "POST", ["promotions"] if self._shadows is not None:
                return self._shadows.promote
            case "GET", ["promotions", _] if self._shadows is not None:
                return self._shadows.promotion
            case "DELETE", ["promotions", _] if self._shadows is not None:
                return self._shadows.stop
            case "GET", ["instances", _, "logs"]:
                return self._logs
            case "POST", ["instances", _, "drain"]:
                return self._drain
            case "POST", ["down"]:
                return self._down
        return None

    async def _answer(self, running: PendingAnswer, work: Awaitable[Any], method: str, call: AdminCall) -> None:
        """Answer a request. Every attempted change appears in the next status and among the events."""
        try:
            answer = await self._named(work)
            status, body = 200, answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        except ConfigError as error:
            problems = msgspec.to_builtins(error.problems)
            status, body = 422, error_body(str(error), error_kind(422), "invalid_manifest", problems=problems)
        except (NotFound, UnknownName) as error:
            status, body = 404, error_body(str(error), error_kind(404), "not_found")
        except NotConfirmed as error:
            again = f'{error}. To change it, send the same again with "confirmation": "{error.changes.confirmation}"'
            asked = error.changes.as_dict()
            status, body = 409, error_body(again, error_kind(409), "confirmation_needed", **asked)
        except NotStored as error:
            status, body = 503, error_body(str(error), error_kind(503), "not_stored")
        except msgspec.ValidationError as error:
            status, body = 400, error_body(f"the body does not match the API: {in_words(error)}", error_kind(400))
        except msgspec.MsgspecError as error:
            status, body = 400, error_body(f"the body is not JSON: {error}", error_kind(400))
        except PointsmanError as error:
            status, body = 400, error_body(str(error), error_kind(400))
        except Exception as error:
            what = f"this failed inside the plane ({type(error).__name__}: {error}); it may be a bug, please report it"
            status, body = 500, error_body(what, error_kind(500))
        if method != "GET":
            self._status_page.forget()
            self._fleet_page.forget()
            if (method, call.parts[-1]) not in HARMLESS:
                self._events.note(method, call, status)
        if running.client is not None:
            running.client.answer(status, body)

    async def _named(self, work: Awaitable[Any]) -> Any:
        """The answer. If an unknown name belongs to something of another kind, the error says so."""
        try:
            return await work
        except UnknownName as error:
            told = of_another_kind(error.kind, error.name, self._status())
            if told:
                raise NotFound(told) from error
            raise

    async def _get_status(self, call: AdminCall) -> bytes:
        return self._status_page.content()

    async def _fleet(self, call: AdminCall) -> bytes:
        return self._fleet_page.content()

    async def _logs(self, call: AdminCall) -> dict[str, Any]:
        name = call.parts[1]
        return {"instance": name, "text": await self._plane.instances.logs(name, number_in(call.query, "lines", 100))}

    async def _drain(self, call: AdminCall) -> dict[str, Any]:
        self._plane.control.drain(call.parts[1])
        return {"instance": call.parts[1], "draining": True}

    async def _down(self, call: AdminCall) -> dict[str, Any]:
        self._gateway.loop.call_soon(self._stop)
        return {"stopping": True}
