"""A scaled deployment as plain data: for status, for `explain deployment`, and for rehearsals."""

from collections.abc import Iterable
from typing import Any

import msgspec

from pointsman.scaling.deployment import Load, ScaledDeployment
from pointsman.scaling.view import DeploymentView


def scaling_summary(one: ScaledDeployment) -> dict[str, Any]:
    """For the status of its deployment."""
    last = next((record for record in reversed(one.records) if record.after != record.before), None)
    return {
        "policy": one.policy_name,
        "desired": one.target,
        "wanted": one.wanted,
        "min": one.guard.limits.min_replicas,
        "max": one.guard.limits.max_replicas,
        "override": None if one.guard.override is None else msgspec.to_builtins(one.guard.override),
        "problem": "" if one.guard.problem is None else str(one.guard.problem),
        "last": None if last is None else last.as_dict(),
        "reasons": {"problem": None if one.guard.problem is None else one.guard.problem.as_dict()},
    }


def scaling_status(one: ScaledDeployment, load: Load, now: float) -> dict[str, Any]:
    """For `pointsman explain deployment`, and for external scalers."""
    override, replicas = one.guard.override, one.observed.replicas
    status = scaling_summary(one)
    status["reasons"]["trouble"] = None if replicas.trouble is None else replicas.trouble.as_dict()
    if override is not None:
        left = None if override.until is None else max(override.until - now, 0.0)
        status["override"] = {**status["override"], "for_s": left}
    return {
        "deployment": one.name,
        **status,
        "ongoing": load.running,
        "queued": load.waiting,
        "ready": replicas.ready,
        "starting": replicas.starting,
        "unplaced": replicas.unplaced,
        "start_up_s": one.observed.start_up_s,
        "trouble": "" if replicas.trouble is None else str(replicas.trouble),
        "limits": msgspec.to_builtins(one.guard.limits),
        "records": [record.as_dict() for record in one.records],
    }


def load_history(one: ScaledDeployment, load: Load, now: float) -> dict[str, Any]:
    """Past arrivals, and what else a rehearsal of a policy needs."""
    view = one.view(load, now)
    # A policy of an application sees all its nodes, and cannot be rehearsed on one.
    parameters = None if one.plan.policy is None else msgspec.json.decode(one.deciding.recipe)[1]
    return {
        "deployment": one.name,
        "bin_s": view.bin_s,
        "bins": msgspec.to_builtins(view.history),
        "start_up_s": view.start_up_s,
        "request_s": _request_s(view),
        "max_concurrency": view.max_concurrency,
        "cost_per_replica_hour": view.cost_per_replica_hour,
        "limits": msgspec.to_builtins(one.guard.limits),
        "policy": one.policy_name,
        "parameters": parameters,
    }


def policy_problems(deployments: Iterable[ScaledDeployment]) -> list[str]:
    """Policies that fail."""
    return [
        f'the scaling policy {one.policy_name} of "{one.name}" {one.guard.problem}; the target stays {one.target}'
        for one in deployments
        if one.guard.problem is not None
    ]


def _request_s(view: DeploymentView) -> float | None:
    """How long a request takes: the mean latency of late, else by Little's law over the longest window with arrivals.
    None if none came."""
    if view.latency_ms.mean:
        return view.latency_ms.mean / 1000
    for seconds in sorted(view.ongoing_windows, reverse=True):
        here, rate = view.ongoing_windows[seconds].mean, view.arrivals_per_s.get(seconds)
        if here and rate:
            return here / rate
    return None
