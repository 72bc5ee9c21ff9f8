"""What runs and how it is doing, as plain data: the fields of the admin API and of `pointsman status`."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec

from pointsman.control.desired import Desired, DesiredDeployment
from pointsman.control.instances import InstanceStatus, Phase
from pointsman.placement.fleet import Fleet
from pointsman.placement.hints import why_never
from pointsman.reasons import Reason

SOON_S = 10.0
"""Requests wait for an instance if it is restarted or comes back within this time."""


class Prospects(NamedTuple):
    """What scaling can do for a deployment that has no instances that take requests."""

    may_start: bool = False
    """Whether a waiting request leads to the start of an instance."""
    may_find_room: bool = False
    """Whether other deployments may make room for this one."""


NO_PROSPECTS = Prospects()


class Unavailable(msgspec.Struct, frozen=True):
    """What clients are told if no instance of a deployment takes requests: why, and when an instance may."""

    why: Reason
    retry_s: float | None = None
    """Seconds until an instance may take requests; None if unknown."""
    none_expected: bool = False
    """Whether no instance is starting, restarting or about to come back, so that waiting is of no use."""


def unavailability(
    deployment: str,
    instances: Iterable[InstanceStatus],
    start_up_s: float | None,
    now: float,
    prospects: Prospects = NO_PROSPECTS,
) -> Unavailable:
    """Why none of a deployment's instances takes requests: the reason of the instance that will be ready first.

    `instances` are those of all deployments. `start_up_s` is how long a start takes; None if unknown. The details of
    failures are for operators, in `pointsman status`.
    """
    known = list(instances)
    room = prospects.may_find_room or any(_gives_place(one) for one in known)
    mine = [one for one in known if one.deployment == deployment]
    expected = [one for one in mine if _is_expected(one, room, now)]
    found = [_unavailability(one, start_up_s, now) for one in expected or mine]
    first = min(found, key=lambda one: float("inf") if one.retry_s is None else one.retry_s, default=NONE_WANTED)
    if first.why.code == DOWN:
        down = sum(one.why.code == DOWN for one in found)
        first = msgspec.structs.replace(first, why=first.why.having(endpoints=down))
    none_yet = all(one.leaving or one.endpoint is not None for one in mine)
    if expected or (prospects.may_start and none_yet):
        return first
    return Unavailable(first.why, first.retry_s, none_expected=True)


DOWN = "endpoint-down"
NONE_WANTED = Unavailable(Reason("none-wanted"))


def _gives_place(one: InstanceStatus) -> bool:
    return one.phase in (Phase.DRAINING, Phase.STOPPING) and one.place is not None


def _is_expected(one: InstanceStatus, room: bool, now: float) -> bool:
    """Whether an instance is worth waiting for. `room`: whether an instance without a place may get a place."""
    is_soon = one.until is None or one.until - now <= SOON_S
    if one.leaving or one.halted or one.final or one.drain_asked:
        return False
    if one.unplaced or one.phase is Phase.DRAINING:  # the instance was evicted
        return room
    if one.endpoint is not None and one.phase is Phase.STARTING:
        return not one.has_failed
    if one.endpoint is not None or one.phase in (Phase.READY, Phase.UNHEALTHY, Phase.EJECTED):
        return one.in_service and is_soon
    return not one.given_up and (is_soon or one.phase is not Phase.BACKING_OFF)


def _unavailability(one: InstanceStatus, start_up_s: float | None, now: float) -> Unavailable:
    if one.unplaced:
        return Unavailable(Reason("no-place-yet", {"instance": one.id}))
    if one.final and one.reason is not None:
        return Unavailable(Reason("never-starts", {"instance": one.id, "cause": _cause(one.reason)}))
    if one.endpoint is not None:
        left_s = None if one.probe_at is None else max(one.probe_at - now, 0.0)
        code = "endpoint-starting" if one.phase is Phase.STARTING and not one.has_failed else DOWN
        return Unavailable(Reason(code, {"instance": one.id}), left_s)
    if one.phase is Phase.STARTING:
        left_s = None if start_up_s is None else max(start_up_s - (now - one.since), 0.0)
        return Unavailable(Reason("starting", {"instance": one.id, "for_s": round(now - one.since)}), left_s)
    if one.phase is Phase.BACKING_OFF and one.until is not None:
        left_s = max(one.until - now, 0.0)
        if one.hindered:
            return Unavailable(Reason("hindered", {"instance": one.id}), left_s + (start_up_s or 0.0))
        facts = {"instance": one.id, "failures": one.restarts + 1, "restart_in_s": round(left_s)}
        return Unavailable(Reason("restarting", facts), left_s + (start_up_s or 0.0))
    return Unavailable(Reason("in-phase", {"instance": one.id, "phase": one.phase.value}))


def _cause(reason: Reason) -> str:
    """The code of the reason why an instance cannot start. The facts are left out, because they are for operators."""
    while isinstance(inner := reason.facts.get("why"), Reason):
        reason = inner
    return reason.code


def given_up(instances: Iterable[InstanceStatus]) -> list[Reason]:
    """Instances that are not tried again until they are applied again, and the reasons, grouped by deployment."""
    by_deployment: dict[str, list[tuple[Reason | None, list[str]]]] = {}
    for one in instances:
        if one.final or one.halted:
            groups = by_deployment.setdefault(one.deployment, [])
            alike = next((names for reason, names in groups if reason == one.reason), None)
            if alike is None:
                groups.append((one.reason, [one.id]))
            else:
                alike.append(one.id)
    found = [group for groups in by_deployment.values() for group in groups]
    return [Reason("given-up", {"instances": names, "why": reason}) for reason, names in found]


def nothing_can_start(desired: Desired, instances: Iterable[InstanceStatus], fleet: Fleet | None) -> list[Reason]:
    """For each deployment, one reason why it can never start an instance; empty if a deployment can or may start one.
    `fleet` is None if no instance has needed a place."""
    mine: dict[str, list[InstanceStatus]] = {name: [] for name in desired.deployments}
    for one in instances:
        mine.setdefault(one.deployment, []).append(one)
    found: list[Reason] = []
    for name, members in mine.items():
        spec = desired.deployments.get(name)
        whys = [_why_never(one, spec, fleet) for one in members]
        if not whys or None in whys:
            return []
        found.append(Reason("given-up", {"instances": [one.id for one in members], "why": whys[0]}))
    return found


def _why_never(one: InstanceStatus, spec: DesiredDeployment | None, fleet: Fleet | None) -> Reason | None:
    if one.final and one.reason is not None:
        inner = one.reason.facts["why"]
        return inner if isinstance(inner, Reason) else one.reason
    if one.unplaced and spec is not None and spec.ask is not None and fleet is not None:
        return why_never(msgspec.structs.replace(spec.ask, instance_id=one.id), fleet)
    return None


def is_ready(deployments: Iterable[str], instances: Iterable[InstanceStatus], at_zero: Set[str]) -> bool:
    """Whether each deployment has an instance that takes requests, or is scaled to zero."""
    served = {one.deployment for one in instances if one.phase is Phase.READY}
    return all(name in served or name in at_zero for name in deployments)


UNKNOWN_LOAD = {
    "in_flight": 0,
    "max_concurrency": None,
    "waiting": None,
    "running": None,
    "kv_cache_usage": None,
    "metrics_age_s": None,
    "paused_s": None,
    "silence": None,
}
"""The load of an instance that is not in service."""
NO_REQUESTS: dict[str, Any] = {"strategy": "", "policies": [], "waiting": 0, "running": 0, "instances": {}}
"""The requests of a deployment that is not in service."""


def deployments_status(
    desired: Desired,
    instances: Sequence[InstanceStatus],
    load_of: Callable[[str], Mapping[str, Any] | None],
    internal: Container[str],
    now: float,
) -> list[dict[str, Any]]:
    """The desired deployments in their order, then the deployments that are being removed.

    `load_of` returns a deployment's requests, or None if the deployment takes no requests. `internal`: deployments that
    only applications call.
    """
    members: dict[str, list[InstanceStatus]] = {name: [] for name in desired.deployments}
    for one in instances:
        members.setdefault(one.deployment, []).append(one)
    return [
        {"name": name, **_deployment_status(desired.deployments.get(name), found, load_of(name) or NO_REQUESTS, now)}
        | {"internal": name in internal}
        for name, found in members.items()
    ]


def _deployment_status(
    wanted: DesiredDeployment | None, members: Sequence[InstanceStatus], load: Mapping[str, Any], now: float
) -> dict[str, Any]:
    return {
        "model": "" if wanted is None else wanted.model,
        "aliases": [] if wanted is None else list(wanted.names[1:]),
        "internal": False,
        "desired": 0 if wanted is None else wanted.replicas + len(wanted.endpoints),
        "ready": sum(one.phase is Phase.READY for one in members),
        "strategy": load["strategy"],
        "policies": load["policies"],
        "waiting": load["waiting"],
        "running": load["running"],
        "instances": [_instance_status(one, load["instances"].get(one.id, UNKNOWN_LOAD), now) for one in members],
    }


def _instance_status(instance: InstanceStatus, load: Mapping[str, Any], now: float) -> dict[str, Any]:
    host = f"[{instance.host}]" if ":" in instance.host else instance.host
    scheme = "https" if instance.tls else "http"
    return {
        "id": instance.id,
        "phase": instance.phase.value,
        "url": f"{scheme}://{host}:{instance.port}" if host else "",
        "process": instance.process,
        "restarts": instance.restarts,
        "halted": instance.halted,
        "final": instance.final,
        "unplaced": instance.unplaced,
        "reason": "" if instance.reason is None else str(instance.reason),
        "cause": None if instance.reason is None else instance.reason.as_dict(),
        "place": "" if instance.place is None else str(instance.place),
        "since_s": round(now - instance.since, 3),
        "until_s": None if instance.until is None else round(max(instance.until - now, 0.0), 3),
        **load,
    }
