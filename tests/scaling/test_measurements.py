"""Observations in, a view out."""

import json
from typing import Any

import pytest

from pointsman.scaling import (
    Budget,
    DeploymentView,
    MaxOf,
    Measurements,
    Panic,
    QueueDepth,
    Rate,
    TargetOngoing,
    windows_of,
)


def view_of(measured: Measurements, now: float, **facts: Any) -> DeploymentView:
    return measured.view(name="chat", now=now, replicas=2, target=3, **facts)


def test_an_empty_view() -> None:
    view = view_of(Measurements(), 0.0)
    assert (view.ongoing, view.queued, view.load) == (0.0, 0.0, 0.0)
    assert view.ongoing_windows[30.0].mean is None
    assert view.arrivals_per_s == {30.0: 0.0, 300.0: 0.0, 3600.0: 0.0}
    assert (view.slo_attainment, view.tokens_per_s, view.start_up_s, view.idle_s) == (None, None, None, None)
    assert (view.ttft_ms.count, view.kv_usage.last, view.metrics, view.history) == (0, None, {}, ())


def test_every_observation_is_in_the_view() -> None:
    measured = Measurements(bin_s=60.0)
    for second in range(120):
        now = float(second)
        measured.sample(now, ongoing=6.0, queued=second % 2, kv_usage=0.5, gpu_usage=0.9)
        measured.arrived(now, 3)
        measured.ended(now, latency_ms=400.0, ttft_ms=80.0, tpot_ms=20.0, met_slo=second % 4 > 0, tokens=500.0)
        measured.metric(now, "pages", float(second))
    measured.started(20.0)
    measured.started(40.0)
    measured.started(600.0)
    view = view_of(measured, 120.0, unplaced=1, since_up_s=7.0, state={"seen": 1})
    assert (view.ongoing, view.queued, view.replicas, view.target, view.unplaced) == (6.0, 1.0, 2, 3, 1)
    assert view.load == 7.0
    assert view.ongoing_windows[30.0].mean == 6.0
    assert view.queued_windows[30.0].mean == pytest.approx(0.5)
    assert view.arrivals_per_s[30.0] == pytest.approx(3.0)
    assert view.arrivals_per_s[3600.0] == pytest.approx(3.0), "since it began"
    assert view.history == (Rate(0.0, 3.0), Rate(60.0, 3.0))
    assert view.bin_s == 60.0
    assert view.ttft_ms.p90 == pytest.approx(80.0, rel=0.01)
    assert view.tpot_ms.count == view.latency_ms.count == 120
    assert view.slo_attainment == pytest.approx(0.75)
    assert view.tokens_per_s == pytest.approx(500.0, rel=0.05)
    assert (view.kv_usage.last, view.gpu_usage.mean) == (0.5, 0.9)
    assert (view.metrics["pages"].last, view.metrics["pages"].max) == (119.0, 119.0)
    assert view.start_up_s == 40.0
    assert (view.since_up_s, view.idle_s, view.state) == (7.0, None, {"seen": 1})


def test_unmeasured_latencies_are_none() -> None:
    measured = Measurements()
    measured.ended(0.0, latency_ms=400.0)
    view = view_of(measured, 1.0)
    assert (view.latency_ms.count, view.ttft_ms.count, view.tpot_ms.count) == (1, 0, 0)
    assert (view.slo_attainment, view.tokens_per_s) == (None, None)


def test_windows_have_their_lengths() -> None:
    measured = Measurements()
    for second in range(4000):
        ongoing, usage = second % 2 + (10.0 if second < 2000 else 0.0), 0.2 if second < 3900 else 0.8
        measured.sample(float(second), ongoing=ongoing, queued=0.0, kv_usage=usage, gpu_usage=usage)
    view = view_of(measured, 4000.0)
    assert view.ongoing_windows[3600.0].mean == pytest.approx(0.5 + 10 * 1600 / 3600, rel=0.02)
    assert view.kv_usage.mean == view.gpu_usage.mean == pytest.approx(0.4), "200 s of 0.2, and 100 s of 0.8"


def test_the_start_up_time_is_the_median_of_the_last_twenty() -> None:
    measured = Measurements()
    for seconds in [100.0] * 30 + [1.0] * 10:
        measured.started(seconds)
    assert measured.start_up_s == 50.5


def test_a_view_does_not_change_afterwards() -> None:
    goes_on, stops = Measurements(), Measurements()
    for measured in (goes_on, stops):
        measured.sample(0.0, ongoing=2.0, queued=1.0)
        measured.arrived(0.0, 30)
        measured.sample(6.0, ongoing=3.0, queued=0.0)
    seen = view_of(goes_on, 10.0)
    goes_on.arrived(10.0, 900)
    goes_on.sample(10.0, ongoing=50.0, queued=50.0)
    goes_on.sample(12.0, ongoing=7.0, queued=7.0)
    for name in ("ongoing_windows", "queued_windows", "arrivals_per_s"):
        assert dict(getattr(seen, name)) == dict(getattr(view_of(stops, 10.0), name)), name


def test_idle_time_counts_from_the_last_request() -> None:
    measured = Measurements()
    measured.sample(0.0, ongoing=0.0, queued=0.0)
    assert view_of(measured, 5.0).idle_s is None, "there never was one"
    measured.sample(10.0, ongoing=1.0, queued=0.0)
    assert view_of(measured, 15.0).idle_s is None
    measured.sample(20.0, ongoing=0.0, queued=0.0)
    measured.sample(30.0, ongoing=0.0, queued=0.0)
    assert view_of(measured, 35.0).idle_s == 15.0
    measured.arrived(33.0)
    measured.arrived(34.0, 0)
    assert view_of(measured, 35.0).idle_s == 2.0, "it came and went between two samples"


def test_stale_custom_metrics_are_dropped() -> None:
    measured = Measurements()
    measured.metric(0.0, "pages", 3.0)
    assert "pages" in view_of(measured, 100.0).metrics
    assert "pages" not in view_of(measured, 1000.0).metrics
    for number in range(1000):
        measured.metric(1000.0, f"m{number}", 1.0)
    assert next(iter(view_of(measured, 1000.0).metrics)) == "m900", "the number of names is limited"
    assert len(view_of(measured, 1000.0).metrics) == 100


def test_history_and_start_ups_survive_a_restart() -> None:
    measured = Measurements(bin_s=60.0)
    measured.sample(0.0, ongoing=0.0, queued=0.0)
    measured.arrived(30.0, 60)
    measured.started(45.0)
    again = Measurements(bin_s=60.0, saved=json.loads(json.dumps(measured.state())))
    again.arrived(90.0, 30)
    view = view_of(again, 130.0)
    assert view.history == (Rate(0.0, 1.0), Rate(60.0, 0.5))
    assert view.start_up_s == 45.0


def test_policies_get_the_windows_that_they_name() -> None:
    assert windows_of([TargetOngoing(), Panic(), lambda view: 1]) == (6.0, 30.0, 60.0, 300.0, 3600.0)
    inner = MaxOf([TargetOngoing(look_back_s=7.0), QueueDepth(look_back_s=8.0)])
    assert windows_of([Budget(inner, per_hour=1.0)]) == (7.0, 8.0, 30.0, 300.0, 3600.0)
    measured = Measurements(windows_of([Panic()]))
    measured.sample(0.0, ongoing=2.0, queued=0.0)
    assert view_of(measured, 6.0).ongoing_windows[6.0].mean == 2.0
