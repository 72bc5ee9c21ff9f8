"""`PointsmanRouter`: a request router of Ray Serve that decides with Pointsman's dispatcher.

Enters: the requests and replicas that Serve passes to its router. Leaves: a replica for each request. The one rule:
Serve sends and retries requests, as with any router; the lane decides which request goes next, and to which replica.
"""

import asyncio
import base64
import logging
import pickle
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from os import getpid
from pathlib import Path
from random import sample
from typing import Any
from uuid import uuid4

import msgspec
import ray
from ray import cloudpickle
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pointsman.config.yaml import read_yaml, text_of
from pointsman.errors import ConfigError
from pointsman.gateway.openai import BadRequest, ClientHeaders, metadata, read_body, settings_in_headers
from pointsman.integrations.ray_serve.lanes import (
    Replica,
    ReplicaLane,
    RequestRefused,
    RouterSettings,
    lane_of,
    problems_of,
    routing_plan,
)
from pointsman.integrations.ray_serve.records import REPORT_S, RouterReport, records_keeper
from pointsman.reasons import Reason
from pointsman.runtimes.tasks import Tasks
from pointsman.strategies import SchedulingPolicy
from pointsman.types import MAX_NAME, RequestMetadata

REPORTS_ENDS = hasattr(RequestRouter, "on_request_completed")
"""Ray 2.55 and newer notify a router when a request has ended."""
EXTENSION = "pointsman"
"""The keyword argument of a handle call with settings for the router: priority, deadline_ms, session and so on."""
OURS = "pointsman_request"
"""The attribute of Serve's pending request that holds Pointsman's request."""
PROBE_S = 0.02
"""While requests wait, replicas that other routers also use are asked for their load at this interval."""
logger = logging.getLogger("ray.serve")


class RefusedByPolicy(BackPressureError):  # type: ignore[misc]
    """A request was not sent to any replica; the message has the reason. Over HTTP, the answer is a 429 or a 503."""

    def __init__(self, message: str, status_code: int = 503) -> None:
        Exception.__init__(self, message, status_code)
        # Serve's proxy sends the message only for these statuses; for any other, it sends a 500 without a reason.
        shown = status_code if status_code in (408, 429, 503) else 503
        self._message, self._status_code, self._retry_after_s = message, shown, None

    def __str__(self) -> str:
        return str(self._message)


def pointsman_routing(
    policy: str | SchedulingPolicy = "",
    *,
    parameters: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | Path | str | None = None,
    time_limit: str | float | None = None,
    max_waiting: int = RouterSettings().max_waiting,
    wait_s: float = 0.0,
    seed: int = 0,
    stats_period_s: float | None = None,
) -> RequestRouterConfig:
    """The `request_router_config` of a deployment. Raises `ConfigError` with all problems.

    `policy`: a built-in name, `module:Name`, or an object. `config`: plugins and profiles, as a mapping or a YAML file.
    Without both, the default profile decides. `stats_period_s`: how often replicas report their routing stats.
    """
    settings = RouterSettings(
        policy=policy if isinstance(policy, str) else "",
        parameters=dict(parameters or {}),
        config=_inline(config),
        time_limit=time_limit,
        pickled="" if isinstance(policy, str) else base64.b64encode(cloudpickle.dumps(policy)).decode(),
        max_waiting=max_waiting,
        wait_s=wait_s,
        seed=seed,
    )
    given: object = policy
    if not isinstance(given, str | SchedulingPolicy):
        raise ConfigError([f"policy: expected a name or a SchedulingPolicy, found {given!r:.60}"])
    routing_plan("router", settings, None if isinstance(policy, str) else policy)
    kwargs = {name: value for name, value in msgspec.to_builtins(settings).items() if value not in ("", None, {})}
    more = {} if stats_period_s is None else {"request_routing_stats_period_s": stats_period_s}
    return RequestRouterConfig(request_router_class=PointsmanRouter, request_router_kwargs=kwargs, **more)


def _inline(config: Mapping[str, Any] | Path | str | None) -> dict[str, Any] | None:
    if config is None or isinstance(config, Mapping):
        return None if config is None else dict(config)
    data, problems = read_yaml(text_of(Path(config)), str(config))
    problems.raise_if_any()
    if not isinstance(data, dict):
        raise ConfigError([f"{config}: expected a mapping with plugins and schedulingProfiles"])
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(data))
    return plain


# Settings of a request


def describe(pending: PendingRequest, request_id: str, now: float) -> RequestMetadata:
    """The dispatcher's form of a request, from the headers of an HTTP request, or from the arguments of a handle call.

    A call may have the keyword argument `pointsman`: a mapping with the same settings as the gateway's headers. The
    replica does not get this argument. The first argument may be a prompt, or a request body of the OpenAI API.
    """
    told, extension = pending.metadata, pending.kwargs.pop(EXTENSION, None)
    raw: dict[bytes, bytes] = {}
    if told.is_http_request:
        raw = _headers(pending)
    body = {} if told.is_http_request or told.is_grpc_request else _body(pending)
    if isinstance(extension, Mapping):
        body |= {"pointsman": extension}
    if session := getattr(told, "session_id", ""):  # Ray 2.55 and newer
        raw[b"x-session-id"] = session.encode()[:MAX_NAME]
    try:
        if told.is_http_request:
            settings = settings_in_headers(raw)
            made = RequestMetadata(
                request_id,
                priority=int(settings.priority or 0),
                slo_deadline_ms=settings.deadline_ms,
                user_id=settings.tenant,
                arrival_time=now,
                cost_budget=settings.cost_budget,
                timeout_s=settings.timeout_s,
                headers=ClientHeaders(raw),
            )
        else:
            made = metadata(request_id, read_body(msgspec.json.encode(body, enc_hook=str)), raw, now, "")
    except (BadRequest, TypeError, ValueError) as error:
        raise RefusedByPolicy(f"the settings of the request cannot be read: {error}") from None
    return msgspec.structs.replace(made, model_name=told.multiplexed_model_id[:MAX_NAME])


def _headers(pending: PendingRequest) -> dict[bytes, bytes]:
    """The headers of the request that the proxy passes on. The proxy itself has created the bytes that are read."""
    first = pending.args[0] if pending.args else None
    if isinstance(first, bytes):
        with suppress(Exception):  # if a version of Serve passes something else, the request has no headers
            return dict(pickle.loads(first).asgi_scope.get("headers", ()))
    return {}


def _body(pending: PendingRequest) -> dict[str, Any]:
    """The parts of the first argument that the gateway would read from a request body."""
    first = pending.args[0] if pending.args else pending.kwargs.get("request", pending.kwargs.get("prompt"))
    if isinstance(first, str):
        return {"prompt": first}
    if not isinstance(first, Mapping):
        dump = getattr(first, "model_dump", None)  # a pydantic model, as in Serve's LLM deployments
        first = dump(exclude_unset=True, mode="json") if callable(dump) else {}
    known = ("messages", "prompt", "input", "system", "tools", "max_tokens", "cache_salt", EXTENSION)
    return {name: first[name] for name in known if first.get(name) is not None}


# The router. It adds what earlier versions of Ray Serve (2.50 and newer) lack.


class ReportingReplica(RunningReplica):  # type: ignore[misc]
    """A replica that itself notifies the router when a try has ended, whether or not the replica took the request."""

    def __init__(self, info: Any, ended: Callable[[Any, str], None]) -> None:
        """`ended`: a function that is called on any thread, with the ids of replica and request."""
        super().__init__(info)
        self._ended = ended

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> Any:
        result = super().try_send_request(pr, with_rejection=with_rejection)
        result.add_done_callback(lambda _: self._ended(self.replica_id, pr.metadata.internal_request_id))
        return result


class CommonRouter(RequestRouter):  # type: ignore[misc]
    """`RequestRouter` with the hooks that our router needs, for all versions of Ray."""

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        if REPORTS_ENDS:
            return super().create_replica_wrapper(replica_info)
        loop = self._event_loop
        return ReportingReplica(replica_info, lambda *of: loop.call_soon_threadsafe(self.on_request_completed, *of))

    def on_new_queue_len_info(self, replica_id: Any, info: Any) -> None:
        """`info`: the queue length, or an object that has it (2.55 and older)."""
        super().on_new_queue_len_info(replica_id, info)
        self.on_queue_length(replica_id, getattr(info, "num_ongoing_requests", info))

    def on_queue_length(self, replica_id: Any, number: int) -> None:
        """Take in how many requests a replica runs."""

    def record_wait(self, pending: PendingRequest) -> None:
        """Record the wait in Serve's own metric (2.53 and newer)."""
        if hasattr(RequestRouter, "_record_queue_wait_time"):
            self._record_queue_wait_time(pending)


class PointsmanRouter(CommonRouter):
    """Chooses replicas by a Pointsman strategy or profile; while none has room, requests wait in its order."""

    def initialize_state(self, **kwargs: Any) -> None:
        """`kwargs`: the arguments that `pointsman_routing` has checked; see docs/from-ray-serve.md."""
        deployment = f"{self._deployment_id.app_name}/{self._deployment_id.name}"
        self._lane = lane_of(deployment, kwargs, self._event_loop, cloudpickle.loads)
        self._lane.revoke_request = self._revoke
        self._by_name: dict[str, RunningReplica] = {}
        self._sent: defaultdict[tuple[str, str], list[RequestMetadata]] = defaultdict(list)
        """Sent requests by Serve's id and replica, oldest first: all calls that one request makes have the same id."""
        self._rejected: Counter[tuple[str, str]] = Counter()
        """For each id and replica, the number of rejected tries whose ends Serve has yet to report."""
        self._results: dict[str, Any] = {}
        """Results of requests that were routed, by the id of their record."""
        self._reporter = Reporter(self._lane, deployment)
        self._tasks = Tasks(self._event_loop)
        me = weakref.ref(self)  # Serve drops the router of a handle without a notification
        self._tasks.complete("reports", lambda: report(me))
        self._tasks.complete("replicas", lambda: ask_replicas_of_others(me))

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Choose the replica for a request. This is the method that Serve calls."""
        key = pending_request.metadata.internal_request_id
        request: RequestMetadata | None = getattr(pending_request, OURS, None)
        if request is None:
            request = self._described(pending_request, key)
            setattr(pending_request, OURS, request)
            future = self._lane.choose(request)
        else:
            self._not_taken(key, request)
            future = self._lane.choose_again(request)
        try:
            while (replica := self._by_name.get(await future)) is None:
                future = self._lane.choose_again(request)
        except RequestRefused as error:
            raise RefusedByPolicy(str(error), error.refusal.status) from None
        except asyncio.CancelledError:
            self._lane.cancelled(request.request_id)
            raise
        self._sent[key, replica.replica_id.unique_id].append(request)
        self.record_wait(pending_request)
        return replica

    def _described(self, pending: PendingRequest, key: str) -> RequestMetadata:
        request_id = pending.metadata.request_id[:MAX_NAME]
        self._reporter.arrived += 1
        if not request_id or self._lane.dispatcher.records.get(request_id) is not None:
            request_id = f"{request_id or key}/{self._reporter.counted()}"  # a request may call a deployment often
        return describe(pending, request_id, self._lane.now())

    def _not_taken(self, key: str, request: RequestMetadata) -> None:
        """Note that a replica rejected the request: the end of that try is not the end of the request."""
        for (of, name), requests in self._sent.items():
            if of == key and request in requests:
                requests.remove(request)
                self._rejected[key, name] += 1
                return

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Two random replicas. Only callers that choose a replica without sending it a request use this."""
        return [sample(candidate_replicas, k=min(2, len(candidate_replicas)))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        request = getattr(pending_request, OURS, None)
        if request is not None:
            self._results[request.request_id] = result

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        key = (internal_request_id, replica_id.unique_id)
        if self._rejected[key]:
            self._rejected[key] -= 1
        elif requests := self._sent.get(key):
            request = requests.pop(0)
            self._results.pop(request.request_id, None)
            self._lane.ended(request.request_id)
        if not self._rejected[key]:
            del self._rejected[key]
            if not self._sent[key]:
                del self._sent[key]

    def on_queue_length(self, replica_id: Any, number: int) -> None:
        self._lane.replicas.reported(replica_id.unique_id, number)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        name = replica_id.unique_id
        self._by_name.pop(name, None)
        for key in [key for key in self._sent if key[1] == name]:
            for request in self._sent.pop(key):
                self._results.pop(request.request_id, None)
        self._lane.lost(name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._by_name = {one.replica_id.unique_id: one for one in replicas}
        self._lane.update(_replica(one) for one in replicas)

    def _revoke(self, request_id: str) -> None:
        """Stop a request, to make room for a more important one. Serve reports its end."""
        result = self._results.get(request_id)
        if result is not None:
            result.cancel()


async def report(of: "weakref.ref[PointsmanRouter]") -> None:
    """Report a router to the records of the cluster, until the router is gone."""
    wanted: list[str] = []
    keeper: Any = None
    while True:
        await asyncio.sleep(REPORT_S)
        if (router := of()) is None or not ray.is_initialized():  # looking up an actor would start another Ray
            return
        reporter = router._reporter
        del router
        reporter.log_problems()
        try:
            keeper = keeper or records_keeper()
            wanted = await keeper.report.remote(reporter.encoded(wanted))
        except ray.exceptions.RayError as error:  # the actor restarts, or the cluster ends
            keeper = None
            logger.warning("pointsman: no records of %s are kept now: %s", reporter.deployment, error)


async def ask_replicas_of_others(of: "weakref.ref[PointsmanRouter]") -> None:
    """Ask replicas that other routers also use how many requests they run: our own requests may not show this."""
    pause_s = REPORT_S
    while True:
        await asyncio.sleep(pause_s)
        if (router := of()) is None or not ray.is_initialized():
            return
        used = [router._by_name[name] for name in router._lane.replicas.used_by_others() if name in router._by_name]
        for replica, number in await router._probe_queue_lens(used, 0) if used else ():
            if number is not None:
                router._lane.replicas.reported(replica.replica_id.unique_id, number)
        pause_s = PROBE_S if router._lane.is_blocked else REPORT_S
        del router


def _replica(given: RunningReplica) -> Replica:
    return Replica(
        name=given.replica_id.unique_id,
        max_ongoing=given.max_ongoing_requests,
        node=given.node_id or "",
        zone=given.availability_zone or "",
        models=frozenset(given.multiplexed_model_ids),
        stats=given.routing_stats or {},
    )


class Reporter:
    """Makes a router's report once a second: the state of its lane, and the requests that ended since the last one."""

    def __init__(self, lane: ReplicaLane, deployment: str) -> None:
        self._lane = lane
        self.deployment = deployment
        self._name = f"{getpid()}-{uuid4().hex[:8]}"
        self.arrived = 0
        """Requests that have arrived since the last report."""
        self._counted = count(1)
        self._ended: deque[tuple[float, bool | None]] = deque(maxlen=100_000)
        self._logged: list[Reason] = []
        lane.dispatcher.listen(self._listen)

    def counted(self) -> int:
        """A number that differs for each request of this router."""
        return next(self._counted)

    def _listen(self, record: Any) -> None:
        if record.sent_at is not None and record.ended_at is not None:
            self._ended.append(((record.ended_at - record.arrived_at) * 1000, record.met_deadline))

    def encoded(self, wanted: list[str]) -> bytes:
        ended, self._ended = tuple(self._ended), deque(maxlen=self._ended.maxlen)
        arrived, self.arrived = self.arrived, 0
        found = {one: record for one in wanted if (record := self._lane.dispatcher.explain(one, self._lane.now()))}
        explained = {one: {"text": str(record), "record": record.as_dict()} for one, record in found.items()}
        made = RouterReport(
            router=self._name,
            deployment=self.deployment,
            status=self._lane.status(),
            arrived=arrived,
            ended=ended,
            explained=explained,
        )
        return msgspec.msgpack.encode(made, enc_hook=str)

    def log_problems(self) -> None:
        problems = problems_of(self._lane)
        for problem in problems:
            if not any(map(problem.is_like, self._logged)):
                logger.warning("pointsman: %s", problem)
        self._logged = problems
