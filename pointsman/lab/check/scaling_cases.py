"""Cases for scaling policies: views of a deployment, from nothing measured and no replica to everything at once."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pointsman.lab.check.seeded_random import drawn
from pointsman.scaling import DeploymentView, Rate, Window

NOW = 1_741_176_000.0
"""A Wednesday at noon."""
WINDOW_LENGTHS_S = (30.0, 300.0, 3600.0)

DEFAULT_VIEW = DeploymentView(name="chat", now=NOW, replicas=1, target=1, max_replicas=8, cost_per_replica_hour=1.0)


def flat(value: float, seconds: float = 300.0) -> Window:
    """A window in which the value did not change."""
    return Window(seconds, value, value, value, value, value, value, 10)


def _windows(*values: float) -> tuple[Window, ...]:
    return (Window(300.0), *map(flat, values))


def _by_length(*values: float) -> tuple[dict[float, Window], ...]:
    return ({}, *({length: flat(value, length) for length in WINDOW_LENGTHS_S} for value in values))


def _history(bins: int) -> tuple[Rate, ...]:
    return tuple(Rate(NOW - (bins - n) * 600.0, float(n % 7)) for n in range(bins))


VIEW_VALUES: Mapping[str, Sequence[Any]] = {
    "now": tuple(NOW + hours * 3600.0 for hours in range(14 * 24)),
    "replicas": range(7),
    "starting": range(3),
    "target": range(9),
    "min_replicas": range(3),
    "max_replicas": range(2, 9),
    "max_concurrency": (None, 1, 4, 16),
    "ongoing": (0.0, 1.0, 7.0, 40.0),
    "queued": (0.0, 0.0, 1.0, 50.0),
    "ongoing_windows": _by_length(0.0, 0.5, 40.0),
    "queued_windows": _by_length(0.0, 0.5, 50.0),
    "arrivals_per_s": ({}, *(dict.fromkeys(WINDOW_LENGTHS_S, rate) for rate in (0.0, 0.1, 3.0, 100.0))),
    "history": tuple(_history(bins) for bins in (0, 1, 6, 7, 60)),
    "ttft_ms": _windows(1.0, 250.5, 10_000.0),
    "tpot_ms": _windows(1.0, 37.5, 500.0),
    "latency_ms": _windows(1.0, 800.5, 100_000.0),
    "slo_attainment": (None, 0.0, 0.5, 0.99, 1.0),
    "kv_usage": _windows(0.0, 0.5, 1.0),
    "gpu_usage": _windows(0.0, 0.5, 1.0),
    "tokens_per_s": (None, 0.0, 0.5, 1000.0, 100_000.0),
    "metrics": ({}, {"pages": flat(0.0)}, {"depth": flat(-10.0)}, {"pages": flat(1000.0), "depth": flat(0.5)}),
    "start_up_s": (None, 0.0, 30.0, 600.0),
    "cost_per_replica_hour": (None, 0.5, 2.0),
    "since_up_s": (None, 0.0, 59.5, 4000.0),
    "since_down_s": (None, 0.0, 59.5, 4000.0),
    "idle_s": (None, 0.0, 59.5, 4000.0),
    "unplaced": range(3),
}


def scaling_cases(count: int) -> list[DeploymentView]:
    """The same views on every run, the default one first."""
    rng = random.Random(0)
    views = [DeploymentView(name="chat", **drawn(VIEW_VALUES, rng)) for _ in range(count)]
    possible = [msgspec.structs.replace(view, unplaced=min(view.unplaced, view.starting)) for view in views]
    return [DEFAULT_VIEW, *possible]


def smaller_views(view: DeploymentView) -> Iterator[DeploymentView]:
    """The same with one value as in the default view."""
    for name in view.__struct_fields__:
        if name != "state" and getattr(view, name) != getattr(DEFAULT_VIEW, name):
            yield msgspec.structs.replace(view, **{name: getattr(DEFAULT_VIEW, name)}, state={})


def shown(view: DeploymentView) -> str:
    """Its values that differ from the default view, on one line."""
    values = {
        name: _brief(getattr(view, name))
        for name in view.__struct_fields__
        if name in ("replicas", "target") or getattr(view, name) != getattr(DEFAULT_VIEW, name)
    }
    return "    a view with " + ", ".join(f"{name} {value}" for name, value in values.items() if name != "state")


def _brief(value: Any) -> str:
    if isinstance(value, Window):
        return "unmeasured" if value.mean is None else f"{value.mean:g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_brief(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple):
        return f"of {len(value)} bins"
    if value is None:
        return "unknown"
    return f"{value:g}" if isinstance(value, float) else str(value)
