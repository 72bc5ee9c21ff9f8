"""Lookups by name: records of requests, at this gateway and at other gateways, and hints for names of the wrong
kind."""

import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import msgspec

from pointsman.config.problems import a
from pointsman.errors import PointsmanError, command, listed, nearest, shown
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.records import SEARCHED, AnyRecord, newest_first, stored_of
from pointsman.routing.records import Record
from pointsman.runtimes.event_log import THE_PLANE, Asker

AskGateways: TypeAlias = Callable[[str, dict[str, str]], Awaitable[list[Any]]]
"""Asks the gateways in other processes. Takes (about, details), and returns the answers that arrive."""


class NotFound(PointsmanError):
    """Raised if a request names something that does not exist."""


class BadQuery(PointsmanError):
    """Raised if a query parameter is not valid."""


class AdminCall(msgspec.Struct):
    parts: list[str]
    query: dict[str, str]
    body: bytes
    asker: Asker = THE_PLANE


KINDS = ("deployment", "application", "instance", "model")
"""Kinds of names, in search order."""


def of_another_kind(kind: str, name: str, status: Mapping[str, Any]) -> str:
    """A message for a name that belongs to another kind of thing than the client asked for. It says what has this name,
    and what belongs to it; it is empty if nothing has this name. `kind` is the kind that the client asked for:
    application, deployment, instance or request."""
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


def record_at(gateway: Gateway, applications: Applications | None, request_id: str) -> dict[str, Any] | None:
    """All details of a request; None if this gateway has no record of it."""
    now = time.monotonic()
    found: AnyRecord | None = None if applications is None else applications.record_of(request_id)
    for lane in gateway.traffic.all_lanes() if found is None else ():
        found = found or lane.dispatcher.explain(request_id, now)
    found = found or gateway.history.kept_of(request_id)
    if found is None:
        return None
    closed = {name: _date(until, now) for name, until in _closed_until(found).items()}
    lines = [str(found), *(f"{name} gets no requests until {until}" for name, until in closed.items())]
    arrived = _date(found.arrived_at, now)
    return {**found.as_dict(), "arrived": arrived, "closed_until": closed, "text": "\n".join(lines)}


def _closed_until(found: AnyRecord) -> dict[str, float]:
    """The instances that were ejected or paused at the last try of a request, each with the time until which it gets no
    requests."""
    if not isinstance(found, Record):
        return {}
    each = list(found.reasons().items())
    for profile in () if found.trace is None else found.trace.profiles:
        each += [(str(one), why) for _, rejected in profile.stages for one, why in rejected]
    until = {name: why.facts.get("until") for name, why in each if why.code in ("ejected", "paused")}
    return {name: at for name, at in until.items() if isinstance(at, float)}  # a user's filter may have these names too


def newest_at(
    gateway: Gateway, applications: Applications | None, query: Mapping[str, str], limit: int
) -> tuple[list[dict[str, Any]], int]:
    """The newest requests from clients at this gateway, and their total number. Steps of pipelines are left out, unless
    the query names an instance or `steps`."""
    now, history = time.monotonic(), gateway.history
    steps = "instance" in query or "steps" in query
    lanes = [lane for lane in gateway.traffic.all_lanes() if steps or not lane.plan.internal]
    records: list[AnyRecord] = [one for lane in lanes for one in lane.dispatcher.records.newest()]
    records += history.kept()
    if applications is not None:
        records += applications.records.newest()
    found = newest_first([one for one in records if _matches(one.summary(), query)])
    return [{**one.summary(), "arrived": _date(one.arrived_at, now)} for one in found[:limit]], len(found)


class RequestAdmin:
    """`/admin/v1/requests`: records of requests."""

    def __init__(
        self,
        gateway: Gateway,
        status: Callable[[], dict[str, Any]],
        applications: Applications | None,
        ask: AskGateways | None,
    ) -> None:
        self._gateway = gateway
        self._status = status
        self._applications = applications
        self._ask = ask

    async def one(self, call: AdminCall) -> dict[str, Any]:
        request_id = call.parts[1]
        found = record_at(self._gateway, self._applications, request_id)
        if found is None and self._ask is not None:
            answers = await self._ask("request", {"id": request_id})
            found = max(filter(None, answers), key=lambda one: str(one["arrived"]), default=None)
        if found is not None:
            return found
        old = stored_of(self._gateway.history, request_id)
        if old is not None:
            return old.explained() | {"arrived": _iso(old.arrived)}
        kept = self._gateway.settings.keep_records
        raise NotFound(
            of_another_kind("request", request_id, self._status())
            or f'there is no record of a request "{shown(request_id)}"; the newest {kept} of each deployment are kept; '
            f"to list them: {command('requests')}"
        )

    async def newest(self, call: AdminCall) -> dict[str, Any]:
        query, history = call.query, self._gateway.history
        limit = number_in(query, "limit", 50)
        listed, found = newest_at(self._gateway, self._applications, query, limit)
        answers = [] if self._ask is None else await self._ask("requests", {**query, "limit": str(limit)})
        stored = history.stored(query)
        if answers:  # gateways outlive a plane, so their answers contain some of the stored records
            known = {one["request_id"] for theirs, _ in answers for one in theirs}
            stored = [one for one in stored if one.request_id not in known]
            listed, found = sum((theirs for theirs, _ in answers), listed), found + sum(count for _, count in answers)
            listed = sorted(listed, key=lambda one: str(one["arrived"]), reverse=True)[:limit]
        listed += [one.summary() | {"arrived": _iso(one.arrived)} for one in stored[: limit - len(listed)]]
        return {"requests": listed, "found": found + len(stored)}


def number_in(query: Mapping[str, str], name: str, default: int) -> int:
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
