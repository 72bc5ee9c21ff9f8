"""Views to try scaling policies on: from nothing measured and nobody there to everything at once."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st

from pointsman.lab.check.shrinking import smallest
from pointsman.scaling import DeploymentView, Rate, Window

NOW = 1_741_176_000.0
"""A Wednesday at noon."""

PLAIN = DeploymentView(name="chat", now=NOW, replicas=1, target=1, max_replicas=8, cost_per_replica_hour=1.0)
"""What a view has in it where nothing is said."""


def flat(value: float, seconds: float = 300.0) -> Window:
    """It was this all the time."""
    return Window(seconds, value, value, value, value, value, value, 10)


def _windows(values: st.SearchStrategy[float]) -> st.SearchStrategy[Window]:
    return st.just(Window(300.0)) | values.map(flat)


def _by_length(values: st.SearchStrategy[float]) -> st.SearchStrategy[dict[float, Window]]:
    lengths = (30.0, 300.0, 3600.0)
    return st.just({}) | values.map(lambda value: {length: flat(value, length) for length in lengths})


SIGHTS = st.builds(
    DeploymentView,
    name=st.just("chat"),
    now=st.integers(0, 14 * 24).map(lambda hours: NOW + hours * 3600.0),
    replicas=st.integers(0, 6),
    starting=st.integers(0, 2),
    target=st.integers(0, 8),
    min_replicas=st.integers(0, 2),
    max_replicas=st.integers(2, 8),
    max_concurrency=st.none() | st.integers(1, 16),
    ongoing=st.integers(0, 40).map(float),
    queued=st.sampled_from([0.0, 0.0, 1.0, 50.0]),
    ongoing_windows=_by_length(st.floats(0, 40)),
    queued_windows=_by_length(st.floats(0, 50)),
    arrivals_per_s=st.just({}) | st.floats(0, 100).map(lambda rate: {30.0: rate, 300.0: rate, 3600.0: rate}),
    history=st.integers(0, 60).map(
        lambda bins: tuple(Rate(NOW - (bins - n) * 600.0, float(n % 7)) for n in range(bins))
    ),
    ttft_ms=_windows(st.floats(1, 10_000)),
    tpot_ms=_windows(st.floats(1, 500)),
    latency_ms=_windows(st.floats(1, 100_000)),
    slo_attainment=st.none() | st.floats(0, 1),
    kv_usage=_windows(st.floats(0, 1)),
    gpu_usage=_windows(st.floats(0, 1)),
    tokens_per_s=st.none() | st.floats(0, 100_000),
    metrics=st.dictionaries(st.sampled_from(["pages", "depth"]), st.floats(-10, 1000).map(flat)),
    start_up_s=st.none() | st.floats(0, 600),
    cost_per_replica_hour=st.sampled_from([None, 0.5, 2.0]),
    since_up_s=st.none() | st.floats(0, 4000),
    since_down_s=st.none() | st.floats(0, 4000),
    idle_s=st.none() | st.floats(0, 4000),
    unplaced=st.integers(0, 2),
).map(lambda view: msgspec.structs.replace(view, unplaced=min(view.unplaced, view.starting)))


def plainest(view: DeploymentView, shows: Callable[[DeploymentView], bool]) -> DeploymentView:
    """The view that says least and still shows it."""
    return smallest(view, _plainer, shows)


def _plainer(view: DeploymentView) -> Iterator[DeploymentView]:
    """The same with one thing as it is where nothing is said."""
    for name in view.__struct_fields__:
        if name != "state" and getattr(view, name) != getattr(PLAIN, name):
            yield msgspec.structs.replace(view, **{name: getattr(PLAIN, name)}, state={})


def shown(view: DeploymentView) -> str:
    """What is said in it, on one line."""
    said = {
        name: _brief(getattr(view, name))
        for name in view.__struct_fields__
        if name in ("replicas", "target") or getattr(view, name) != getattr(PLAIN, name)
    }
    return "    a view with " + ", ".join(f"{name} {value}" for name, value in said.items() if name != "state")


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
