"""The admin API: status, decisions with their reasons, and changes, for clients with its key or on the local listener.

Enters: a request under `/admin/v1`. Leaves: JSON. The one rule: it passes requests to the plane, and decides nothing.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeAlias
from urllib.parse import parse_qs, unquote

import msgspec

from pointsman.config.changes import Changes, NotConfirmed
from pointsman.config.problems import a
from pointsman.config.revision import ManifestText
from pointsman.errors import (
    ConfigError,
    NotStored,
    PointsmanError,
    UnknownName,
    command,
    in_words,
    listed,
    nearest,
    shown,
)
from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway, GatewayPage
from pointsman.gateway.openai import error_body, error_kind
from pointsman.gateway.pages import SharedPage
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.records import SEARCHED, AnyRecord, newest_first
from pointsman.gateway.tenants import Tenant
from pointsman.http.heads import HttpRequest
from pointsman.render.text import one_line
from pointsman.runtimes.interface import Operations

PREFIX = b"/admin/v1/"
MAX_OVERRIDE_S = 366 * 86400.0
"""Longest time limit of a scaling override."""
MAX_AUTHOR = 100
"""Characters of the author of an override."""
UNNAMED = "the admin API"
"""The author, if the request names none."""


class NotFound(PointsmanError):
    """The request names something that does not exist."""


class BadQuery(PointsmanError):
    """A query parameter is not valid."""


class AdminCall(msgspec.Struct):
    parts: list[str]
    query: dict[str, str]
    body: bytes


Handler: TypeAlias = Callable[[AdminCall], Coroutine[Any, Any, Any]]


def changes_body(changes: Changes) -> dict[str, Any]:
    """`destructive`: what is, in words; `confirmation` then confirms exactly this."""
    told = {"changes": msgspec.to_builtins(changes.steps), "text": str(changes)}
    asked = {"destructive": list(changes.dangers), "confirmation": changes.confirmation}
    return told | (asked if changes.dangers else {})


KINDS = ("deployment", "application", "instance", "model")
"""Of names, in the order in which they are searched."""


def of_another_kind(kind: str, name: str, status: Mapping[str, Any]) -> str:
    """What the name of something else is, where one of this kind was asked for, and what belongs to it; empty if
    nothing has this name. `kind`: application, deployment, instance or request."""
    rows = _rows(status)
    for other in KINDS:
        mine = [row for row in rows if name in row[other]] if other != kind else []
        if mine:
            what = f'"{shown(name)}" is {a(other)}, not {a(kind)}'
            if kind == "request":
                explain = f", or: {command('explain', 'deployment', name)}" if other == "deployment" else ""
                return f"{what}; to list requests: {command('requests')}{explain}"
            related = sorted({one for row in mine for one in row[kind]})
            if related:
                return f"{what}; {'it belongs to' if other == 'instance' else 'use'}: {listed(related)}"
            known = sorted({one for row in rows for one in row[kind]})
            return f"{what}; {f'known: {listed(known)}' if known else f'there is no {kind}'}; see: {command('status')}"
    if kind in KINDS and nearest(name, (one for row in rows for one in row[kind])) is None:
        for other in KINDS:
            near = nearest(name, (one for row in rows for one in row[other]))
            if near is not None:
                return f'unknown {kind} "{shown(name)}"; there is {a(other)} "{near}"'
    return ""


def _rows(status: Mapping[str, Any]) -> list[dict[str, list[str]]]:
    """The names that belong to each deployment, by their kind."""
    owners = {
        deployment: one["name"]
        for one in status.get("applications") or ()
        for node in one["nodes"]
        for deployment in node["deployments"]
    }
    return [
        {
            "deployment": [one["name"]],
            "application": [owners[one["name"]]] if one["name"] in owners else [],
            "instance": [instance["id"] for instance in one["instances"]],
            "model": [] if one["internal"] else [one["model"], *one["aliases"]],
        }
        for one in status["deployments"]
    ]


class DocumentRequest(ManifestText, frozen=True):
    """A document to put in force."""

    confirmation: str = ""
    """Of a destructive change."""

    @property
    def document(self) -> ManifestText:
        return ManifestText(self.text, self.folder, self.file)


class RollbackRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To an earlier version."""

    generation: int | None = None
    """Of the manifest; None: the one before that in force. Applications have none."""
    confirmation: str = ""


class DocumentAdmin:
    """Manifests are planned and applied; `/admin/v1/applications`: deployed, shown, rolled back and deleted."""

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
        return changes_body(self._plane.documents.plan(msgspec.json.decode(call.body, type=ManifestText)))

    async def deploy(self, call: AdminCall) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body, type=DocumentRequest)
        return changes_body(await self._plane.documents.deploy(asked.document, asked.confirmation))

    async def apply(self, call: AdminCall) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body, type=DocumentRequest)
        return changes_body(await self._plane.documents.apply(asked.document, asked.confirmation))

    async def rollback(self, call: AdminCall) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body or b"{}", type=RollbackRequest)
        return changes_body(await self._plane.documents.rollback(call.parts[1], asked.confirmation))

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
        return changes_body(await self._plane.documents.restore(asked.generation, asked.confirmation))

    async def delete(self, call: AdminCall) -> dict[str, Any]:
        return changes_body(await self._plane.documents.delete(call.parts[1]))


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of replicas to hold, whatever the policy decides."""

    replicas: Annotated[int, msgspec.Meta(ge=0)] | None
    """None: the policy decides again."""
    for_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """None: until further notice."""
    by: str = UNNAMED


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
        by = one_line(wanted.by, MAX_AUTHOR) or UNNAMED
        self._plane.scaling.scale(call.parts[1], wanted.replicas, wanted.for_s, by)
        return self._plane.scaling.status(call.parts[1])


class RequestAdmin:
    """`/admin/v1/requests`: records of requests."""

    def __init__(
        self, gateway: Gateway, status: Callable[[], dict[str, Any]], applications: Applications | None
    ) -> None:
        self._gateway = gateway
        self._status = status
        self._applications = applications

    async def one(self, call: AdminCall) -> dict[str, Any]:
        request_id, now = call.parts[1], time.monotonic()
        found = None if self._applications is None else self._applications.record_of(request_id)
        if found is not None:
            return {**found.as_dict(), "arrived": _date(found.arrived_at, now), "text": str(found)}
        for lane in self._gateway.traffic.all_lanes():
            record = lane.dispatcher.explain(request_id, now)
            if record is not None:
                return {**record.as_dict(), "arrived": _date(record.arrived_at, now), "text": str(record)}
        old = self._gateway.history.find(request_id)
        if isinstance(old, dict):
            return {**old, "arrived": _iso(old["arrived"])}
        if old is not None:
            return {**old.as_dict(), "arrived": _date(old.arrived_at, now), "text": str(old)}
        kept = self._gateway.settings.keep_records
        raise NotFound(
            of_another_kind("request", request_id, self._status())
            or f'there is no record of a request "{shown(request_id)}"; the newest {kept} of each deployment are kept; '
            f"to list them: {command('requests')}"
        )

    async def newest(self, call: AdminCall) -> dict[str, Any]:
        """Of clients; those of pipelines without their steps, unless an instance or `steps` is asked for."""
        now, query, history = time.monotonic(), call.query, self._gateway.history
        limit = _number(query, "limit", 50)
        steps = "instance" in query or "steps" in query
        lanes = [lane for lane in self._gateway.traffic.all_lanes() if steps or not lane.plan.internal]
        records: list[AnyRecord] = [one for lane in lanes for one in lane.dispatcher.records.newest()]
        records += history.kept()
        if self._applications is not None:
            records += self._applications.records.newest()
        found = newest_first([one for one in records if _matches(one.summary(), query)])
        listed = [{**one.summary(), "arrived": _date(one.arrived_at, now)} for one in found[:limit]]
        stored = history.stored(query)
        for at, line in stored[: limit - len(listed)]:
            old = msgspec.json.decode(line)
            listed.append({name: old[name] for name in old if name not in ("details", "text")} | {"arrived": _iso(at)})
        return {"requests": listed, "found": len(found) + len(stored)}


class Admin:
    """Answers requests under `/admin/v1`."""

    def __init__(
        self,
        gateway: Gateway,
        plane: Operations,
        status: Callable[[], dict[str, Any]],
        stop: Callable[[], None],
        applications: Applications | None = None,
    ) -> None:
        """`status`: of plane and gateway. `stop` stops both."""
        self._gateway = gateway
        self._plane = plane
        self._stop = stop
        self._status = status
        self._status_page = SharedPage(lambda: msgspec.json.encode(status()))
        self._fleet_page = SharedPage(lambda: msgspec.json.encode(plane.control.fleet()))
        self._documents = DocumentAdmin(plane, status)
        self._deployments = DeploymentAdmin(plane)
        self._requests = RequestAdmin(gateway, status, applications)
        self._tasks: set[asyncio.Task[None]] = set()
        gateway.pages.trees[PREFIX] = GatewayPage(self.serve, self._check)

    def _check(self, request: HttpRequest, client: GatewayConnection) -> None:
        if not client.is_local and not self._gateway.admission.keys.opens_admin(request):
            why = "the admin API needs its key: authorization: Bearer KEY (gateway.adminKeySha256)"
            raise NotAdmitted(401, why, "invalid_admin_key")

    def serve(self, client: GatewayConnection, request: HttpRequest, tenant: Tenant | None) -> None:
        parts = [unquote(part) for part in request.path.removeprefix(PREFIX).decode("latin-1").split("/")]
        query = {name: values[-1] for name, values in parse_qs(request.query.decode("latin-1")).items()}
        call = AdminCall(parts, query, bytes(request.body))
        method = "GET" if request.method == b"HEAD" else request.method.decode("latin-1")
        handler = self.handler(method, parts)
        if handler is None:
            client.error(404, f"there is no {method} {request.path.decode('latin-1')[:200]}", "not_found")
            return
        running = AdminRequest(client)
        client.serving = running
        task = self._gateway.loop.create_task(self._answer(running, handler(call), reads=method == "GET"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def handler(self, method: str, parts: list[str]) -> Handler | None:
        """What answers a method at a path below the prefix; None if nothing does."""
        match method, parts:
            case "GET", ["status"]:
                return self._get_status
            case "GET", ["fleet"]:
                return self._fleet
            case "POST", ["plan"] | ["applications", "plan"]:
                return self._documents.plan
            case "POST", ["apply"]:
                return self._documents.apply
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
            case "GET", ["instances", _, "logs"]:
                return self._logs
            case "POST", ["instances", _, "drain"]:
                return self._drain
            case "POST", ["down"]:
                return self._down
        return None

    async def _answer(self, running: "AdminRequest", work: Awaitable[Any], *, reads: bool) -> None:
        """`reads`: it changes nothing; whatever may have been changed shows in the next status."""
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
            asked = changes_body(error.changes)
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
        if not reads:
            self._status_page.forget()
            self._fleet_page.forget()
        if running.client is not None:
            running.client.answer(status, body)

    async def _named(self, work: Awaitable[Any]) -> Any:
        """The answer. An unknown name that is the name of something else is told as such."""
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
        return {"instance": name, "text": await self._plane.instances.logs(name, _number(call.query, "lines", 100))}

    async def _drain(self, call: AdminCall) -> dict[str, Any]:
        self._plane.control.drain(call.parts[1])
        return {"instance": call.parts[1], "draining": True}

    async def _down(self, call: AdminCall) -> dict[str, Any]:
        self._gateway.loop.call_soon(self._stop)
        return {"stopping": True}


class AdminRequest:
    """An admin request in flight."""

    def __init__(self, client: GatewayConnection) -> None:
        self.client: GatewayConnection | None = client

    def abandon(self) -> None:
        """The client has disconnected; its request is still carried out."""
        self.client = None

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    """Raises `BadQuery`."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise BadQuery(f'{name} is "{text[:60]}"; it must be a whole number')
    return int(text)


def _date(at: float, now: float) -> str:
    """A time of the monotonic clock, in ISO format."""
    return (datetime.now(UTC) - timedelta(seconds=now - at)).isoformat(timespec="milliseconds")


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _matches(summary: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    return all(query.get(name, summary[name]) == summary[name] for name in SEARCHED)
