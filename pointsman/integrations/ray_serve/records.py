"""Records of all routers of a cluster: the actor to which the routers report, and the queries that it answers.

Enters: the reports of routers, once a second, with their state and the requests that have ended since the last report.
Leaves: `explain` for a request, `status` for routers and scaled deployments, and latencies for scaling policies. The
one rule: a router sends the full record of a request only on demand, so that records cost nothing until then.
"""

import asyncio
import time
from collections import deque
from functools import cache
from typing import Any

import msgspec
import ray

from pointsman.errors import UnknownName

ACTOR = "pointsman-records"
NAMESPACE = "pointsman"
REPORT_S = 1.0
"""Interval of a router's reports."""
SILENT_S = 10 * REPORT_S
"""A router that has not reported for this long counts as gone."""
EXPLAIN_S = 4 * REPORT_S
"""Minimum wait for a requested record: a router that has not reported yet may have the record."""
MAX_ENDED = 10_000
"""Maximum number of requests per deployment that are kept for scaling policies."""
MAX_ANSWERED = 1_000


class EndedRequest(msgspec.Struct, frozen=True):
    """The measurements of a request for scaling policies."""

    number: int
    """The request's number within its deployment, from 1."""
    latency_ms: float
    met_deadline: bool | None = None
    """Whether the request met its deadline; None if it had no deadline."""


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report of a router."""

    router: str
    deployment: str
    status: dict[str, Any]
    arrived: int = 0
    """The number of requests that have arrived since the router's last report."""
    ended: tuple[tuple[float, bool | None], ...] = ()
    """For each ended request: its latency in ms, and whether it met its deadline."""
    explained: dict[str, dict[str, Any]] = {}
    """The requested records, by request."""


class RecordsKeeper:
    """The actor that keeps the records. Each cluster has one, which ends with the cluster."""

    def __init__(self) -> None:
        self._routers: dict[str, tuple[float, RouterReport]] = {}
        self._ended: dict[str, deque[EndedRequest]] = {}
        self._numbers: dict[str, int] = {}
        self._arrived: dict[str, int] = {}
        self._scaled: dict[str, dict[str, Any]] = {}
        self._wanted: dict[str, tuple[str, dict[str, bool]]] = {}
        """For each requested record: the deployment, if given, and which of the asked routers have answered."""
        self._answers: dict[str, dict[str, Any]] = {}

    async def report(self, encoded: bytes) -> list[str]:
        """Take in a report. Returns the requests whose records the router must send."""
        report = msgspec.msgpack.decode(encoded, type=RouterReport)
        now, name = time.monotonic(), report.deployment
        self._routers[report.router] = (now, report)
        self._arrived[name] = self._arrived.get(name, 0) + report.arrived
        ended = self._ended.setdefault(name, deque(maxlen=MAX_ENDED))
        for latency_ms, met in report.ended:
            self._numbers[name] = number = self._numbers.get(name, 0) + 1
            ended.append(EndedRequest(number, latency_ms, met))
        for request_id, record in report.explained.items():
            self._answers[request_id] = record
            while len(self._answers) > MAX_ANSWERED:
                del self._answers[next(iter(self._answers))]
        asked = []
        for request_id, (deployment, told) in self._wanted.items():
            if deployment in ("", name):
                if report.router not in told:
                    asked.append(request_id)
                told[report.router] = report.router in told
        return asked

    async def explain(self, request_id: str, deployment: str = "") -> dict[str, Any] | None:
        """The record of a request; None if no router has it."""
        self._answers.pop(request_id, None)
        told: dict[str, bool] = {}
        self._wanted[request_id] = (deployment, told)
        began = time.monotonic()
        try:
            while request_id not in self._answers and (waited_s := time.monotonic() - began) < SILENT_S:
                # On a busy machine, routers report late.
                asked = [name for name, one in self._live().items() if deployment in ("", one.deployment)]
                if waited_s > EXPLAIN_S and all(told.get(name) for name in asked):
                    break
                await asyncio.sleep(REPORT_S / 20)
            return self._answers.get(request_id)
        finally:
            self._wanted.pop(request_id, None)

    async def status(self) -> dict[str, Any]:
        live = self._live()
        routers = [{"router": one.router, "deployment": one.deployment, **one.status} for one in live.values()]
        return {"routers": routers, "scaled": self._scaled}

    async def measured(self, deployment: str, after: int) -> tuple[int, list[EndedRequest]]:
        """How many requests have arrived, and the ended requests whose numbers are greater than `after`."""
        ended = self._ended.get(deployment, ())
        return self._arrived.get(deployment, 0), [one for one in ended if one.number > after]

    async def scaled(self, deployment: str, status: dict[str, Any]) -> None:
        """Take in a decision of a scaling policy, with its reason."""
        self._scaled[deployment] = status

    def _live(self) -> dict[str, RouterReport]:
        now = time.monotonic()
        self._routers = {name: one for name, one in self._routers.items() if now - one[0] < SILENT_S}
        return {name: report for name, (_, report) in self._routers.items()}


@cache
def _keeper_class() -> Any:
    options = {"name": ACTOR, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return ray.remote(RecordsKeeper).options(**options, num_cpus=0, max_restarts=-1)


def records_keeper() -> Any:
    """The actor, which is started if it is not running. The caller keeps the handle."""
    return _keeper_class().remote()


def _cluster_keeper() -> Any:
    """The same actor, for a program. A program without a connection is first connected to this machine's cluster."""
    if not ray.is_initialized():
        ray.init("auto")
    return records_keeper()


class Explanation(str):
    """The record of a request: text for people, and `data` for programs."""

    __slots__ = ("data",)
    data: dict[str, Any]


def explain(request_id: str, *, deployment: str = "") -> Explanation:
    """Why a request went where it went. `request_id`: the `x-request-id` of its answer. Raises `UnknownName`.

    `deployment` is `APP/NAME`; without it, any deployment that had a request with this id.
    """
    found = ray.get(_cluster_keeper().explain.remote(request_id, deployment))
    if found is None:
        raise UnknownName("request", request_id, ())
    made = Explanation(found["text"])
    made.data = found["record"]
    return made


def status() -> dict[str, Any]:
    """All routers and scaled deployments of the cluster: load, policies and their failures, as plain data."""
    found: dict[str, Any] = ray.get(_cluster_keeper().status.remote())
    return found
