"""What runs and how it is doing, as plain data for JSON: the words of the admin API and of `pointsman status`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from pointsman.config.nodes import deployment_name
from pointsman.config.plan import ApplicationPlan, PointsmanPlan
from pointsman.control import Desired, DesiredDeployment, InstanceStatus, Phase
from pointsman.errors import UnknownName
from pointsman.pipeline.building import INGRESS
from pointsman.pipeline.graph import NodeKind
from pointsman.runtimes.local.scaling.scaled import Scaled
from pointsman.runtimes.local.scaling.telling import in_short
from pointsman.runtimes.traffic import Traffic, Unavailable

# Why no instance of a deployment takes requests, for clients who waited for one: in words, and for how long still.
#
# What went wrong inside is not for clients: `pointsman status` tells it to operators.


NOBODY = Unavailable("none is wanted now; the operator may start some")


def absence_of(instances: Iterable[InstanceStatus], start_up_s: float | None, now: float) -> Unavailable:
    """Of all instances of a deployment, none of which takes requests, whoever comes first. `start_up_s`: how long a
    start takes, as far as that is known."""
    found = [_absence(one, start_up_s, now) for one in instances if one.endpoint is None]
    return min(found, key=lambda one: float("inf") if one.retry_s is None else one.retry_s, default=NOBODY)


def _absence(one: InstanceStatus, start_up_s: float | None, now: float) -> Unavailable:
    if one.unplaced:
        return Unavailable(f"there is no place for {one.id} yet")
    if one.phase is Phase.STARTING:
        left_s = None if start_up_s is None else max(start_up_s - (now - one.since), 0.0)
        return Unavailable(f"{one.id} is being started, for {now - one.since:.0f} s so far", left_s)
    if one.phase is Phase.BACKING_OFF and one.until is not None:
        times = "once" if one.restarts == 0 else f"{one.restarts + 1} times"
        left_s = max(one.until - now, 0.0)
        why = f"{one.id} has failed {times}, and is started again in {left_s:.0f} s"
        return Unavailable(why, left_s + (start_up_s or 0.0))
    return Unavailable(f"{one.id} is {one.phase.value}")


UNKNOWN_LOAD = {
    "in_flight": 0,
    "max_concurrency": None,
    "waiting": None,
    "running": None,
    "kv_cache_usage": None,
    "metrics_age_s": None,
}
"""Of an instance that is not in service."""


def is_ready(plan: PointsmanPlan, instances: Iterable[InstanceStatus], resting: Set[str] = frozenset()) -> bool:
    """Whether every deployment has an instance that takes requests; those that rest have one when it is asked for."""
    served = {one.deployment for one in instances if one.phase is Phase.READY}
    return all(one.name in served or one.name in resting for one in plan.deployments)


def worker_labels(plan: PointsmanPlan) -> dict[str, str]:
    """What the manifest says of this machine, which is the only one there is here."""
    return {name: value for worker in plan.workers for name, value in worker.labels.items()}


def applications_status(plan: PointsmanPlan) -> list[dict[str, Any]]:
    """Applications and their nodes, with the deployments that run them; of a model, those of the manifest."""
    models = {name: one.name for one in plan.deployments if not one.internal for name in one.names}
    return [{"name": one.name, "path": f"/{one.name}", "nodes": [*_nodes(one, models)]} for one in plan.applications]


def _nodes(plan: ApplicationPlan, models: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for node in plan.graph.nodes:
        if node.kind is NodeKind.MODEL:
            yield {"name": node.name, "kind": "model", "deployments": [models.get(node.code, node.code)]}
        else:
            ranks = range(node.options.shards) if node.options.shards > 1 else [None]
            names = [deployment_name(plan.name, node.name, rank) for rank in ranks]
            yield {"name": node.name, "kind": node.kind.value, "deployments": names}
    if plan.graph.has_ingress:
        yield {"name": INGRESS, "kind": INGRESS, "deployments": [deployment_name(plan.name, INGRESS)]}


def deployments_status(
    desired: Desired, instances: Sequence[InstanceStatus], traffic: Traffic, now: float
) -> list[dict[str, Any]]:
    """Those that are wanted, in their order; then those of which something is left."""
    members: dict[str, list[InstanceStatus]] = {name: [] for name in desired.deployments}
    for one in instances:
        members.setdefault(one.deployment, []).append(one)
    wanted = desired.deployments
    return [deployment_status(name, wanted.get(name), there, traffic, now) for name, there in members.items()]


def with_scaling(told: Iterable[dict[str, Any]], scaled: Iterable[Scaled]) -> Iterator[dict[str, Any]]:
    """Deployments as they are told, and who decides how many there are of those that are scaled."""
    known = {one.name: in_short(one) for one in scaled}
    return (one | ({"scaling": known[one["name"]]} if one["name"] in known else {}) for one in told)


def _is_internal(traffic: Traffic, deployment: str) -> bool:
    lane = traffic.lanes.get(deployment)
    return lane is not None and lane.plan.internal


def deployment_status(
    name: str, wanted: DesiredDeployment | None, members: Sequence[InstanceStatus], traffic: Traffic, now: float
) -> dict[str, Any]:
    """A deployment and its instances; `wanted` is None for one that is on its way out."""
    try:
        load: dict[str, Any] = traffic.status(name)
    except UnknownName:  # nothing of it is in service any more
        load = {"strategy": "", "waiting": 0, "running": 0, "instances": {}}
    return {
        "name": name,
        "model": "" if wanted is None else wanted.model,
        "aliases": [] if wanted is None else list(wanted.aliases),
        "internal": _is_internal(traffic, name),
        "desired": 0 if wanted is None else wanted.replicas + len(wanted.endpoints),
        "ready": sum(one.phase is Phase.READY for one in members),
        "strategy": load["strategy"],
        "waiting": load["waiting"],
        "running": load["running"],
        "instances": [instance_status(one, load["instances"].get(one.id, UNKNOWN_LOAD), now) for one in members],
    }


def instance_status(instance: InstanceStatus, load: dict[str, Any], now: float) -> dict[str, Any]:
    """One instance: where it is in its life, and its load."""
    host = f"[{instance.host}]" if ":" in instance.host else instance.host
    scheme = "https" if instance.tls else "http"
    return {
        "id": instance.id,
        "phase": instance.phase.value,
        "url": f"{scheme}://{host}:{instance.port}" if host else "",
        "pid": instance.pid,
        "restarts": instance.restarts,
        "halted": instance.halted,
        "unplaced": instance.unplaced,
        "reason": instance.reason,
        "place": "" if instance.place is None else str(instance.place),
        "since_s": round(now - instance.since, 3),
        **load,
    }
