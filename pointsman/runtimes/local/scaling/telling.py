"""A deployment that is scaled, as it is told: in short, in full, and what has come so far. Plain data."""

from typing import Any

import msgspec

from pointsman.runtimes.local.scaling.scaled import Scaled
from pointsman.runtimes.traffic import Lane
from pointsman.scaling.view import DeploymentView


def in_short(one: Scaled) -> dict[str, Any]:
    """For the status of its deployment."""
    last = next((record for record in reversed(one.records) if record.after != record.before), None)
    return {
        "policy": one.policy_name,
        "desired": one.target,
        "wanted": one.wanted,
        "min": one.guard.limits.min_replicas,
        "max": one.guard.limits.max_replicas,
        "override": None if one.guard.ordered is None else msgspec.to_builtins(one.guard.ordered),
        "problem": one.guard.problem,
        "last": "" if last is None else last.in_words(),
    }


def in_full(one: Scaled, lane: Lane, now: float) -> dict[str, Any]:
    """For `pointsman explain deployment`, and for scalers of others."""
    ordered, presence = one.guard.ordered, one.presence
    told = in_short(one)
    if ordered is not None:
        left = None if ordered.until is None else max(ordered.until - now, 0.0)
        told["override"] = {**told["override"], "for_s": left}
    return {
        "deployment": one.name,
        **told,
        "ongoing": lane.dispatcher.running,
        "queued": len(lane.dispatcher) - lane.dispatcher.running,
        "ready": presence.ready,
        "starting": presence.starting,
        "unplaced": presence.unplaced,
        "start_up_s": one.start_up_s,
        "trouble": presence.trouble,
        "limits": msgspec.to_builtins(one.guard.limits),
        "records": msgspec.to_builtins(list(one.records)),
    }


def load_seen(one: Scaled, lane: Lane, now: float) -> dict[str, Any]:
    """What has come so far, and what it takes to rehearse a policy on it."""
    view = one.view(lane, now)
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
        "parameters": one.parameters,
    }


def _request_s(view: DeploymentView) -> float | None:
    """How long a request takes: of those that ended of late, else by how many came and were here in the longest window
    in which any came. None: nobody did."""
    if view.latency_ms.mean:
        return view.latency_ms.mean / 1000
    for seconds in sorted(view.ongoing_windows, reverse=True):
        here, rate = view.ongoing_windows[seconds].mean, view.arrivals_per_s.get(seconds)
        if here and rate:
            return here / rate
    return None
