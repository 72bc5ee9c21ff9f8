"""Several policies on the same load, in one table."""

import math
import random
from xml.etree import ElementTree

import pytest

from pointsman.lab.scaling import Comparison, Reactive, Series, Setting, compare, plots
from pointsman.lab.scaling.comparison import span
from pointsman.scaling import DeploymentView, ScalingLimits
from pointsman.scaling.policies.combined import MaxOf
from pointsman.scaling.policies.predictive import Predictive
from pointsman.scaling.policies.target_ongoing import TargetOngoing
from tests.lab.scaling.made_up import steps

SETTING = Setting(capacity=10.0, start_up_s=0.0, cost_per_replica_hour=3.0)


def sulks(view: DeploymentView) -> int:
    if view.replicas > 1:
        raise RuntimeError("too many for me")
    return 3


def compared(limits: ScalingLimits | None = None) -> Comparison:
    policies = {"reactive": Reactive(10.0, 1.0), "sulks": sulks}
    return compare(steps(10, 30, 10), SETTING, policies, limits)


def test_one_row_for_each_policy_and_reference() -> None:
    assert compared().as_text().splitlines() == [
        "steps: 3 bins of 10 min, 30 min in all; 16.67/s on average, 30/s at the peak",
        "a replica serves 10/s and starts in 0 s: 1.67 needed on average, 3 at the peak, 0.8 replica-hours at least",
        "called every 1 min; at least 1 replica",
        "",
        "policy                     replica-hours  times the least  unserved  changes  most replicas  cost",
        "-------------------------  -------------  ---------------  --------  -------  -------------  ----",
        "reactive                             0.8            1.000     0.00%        2              3  2.50",
        "sulks                                1.5            1.800     0.00%        1              3  4.50",
        "static peak                          1.5            1.800     0.00%        0              3  4.50",
        "clairvoyant with start-up            0.8            1.000     0.00%        2              3  2.50",
        "sulks: 29 of 30 answers did not count; it raised RuntimeError: too many for me",
    ]


def test_the_same_as_plain_data() -> None:
    document = compared().as_dict()
    assert document["load"] == {
        "name": "steps",
        "began": 0.0,
        "bin_s": 600.0,
        "bins": 3,
        "mean_per_s": pytest.approx(50 / 3),
        "peak_per_s": 30.0,
        "needed_at_mean": pytest.approx(5 / 3),
        "needed_at_peak": 3,
    }
    assert document["calls"] == 30
    assert [one["policy"] for one in document["policies"]] == ["reactive", "sulks"]
    assert [one["policy"] for one in document["references"]] == ["static peak", "clairvoyant with start-up"]
    reactive, sulky = document["policies"]
    assert (reactive["replica_hours"], reactive["cost"], reactive["problem"]) == (pytest.approx(5 / 6), 2.5, "")
    assert (sulky["problems"], sulky["problem"]) == (29, "raised RuntimeError: too many for me")


def test_limits_apply_and_are_shown() -> None:
    limits = ScalingLimits(
        min_replicas=0, max_replicas=2, down_delay_s=300.0, up_factor=0.5, max_step=1, idle_timeout_s=90.0
    )
    found = compared(limits)
    assert all(one.most <= 2 for one in found.policies.values())
    text = "0 to 2 replicas, downDelay 5 min, idleTimeout 90 s, upFactor 0.5, maxStep 1"
    assert found.as_text().splitlines()[2] == f"called every 1 min; {text}"


def test_progress_is_reported() -> None:
    reports: list[tuple[str, float]] = []
    policies = {"one": Reactive(10.0), "two": Reactive(10.0)}
    setting = Setting(capacity=10.0, interval_s=1.0)
    compare(steps(10, 30), setting, policies, progress=lambda name, share: reports.append((name, share)))
    assert reports == [(name, steps_done / 1200) for name in policies for steps_done in (0, 500, 1000)]


def test_one_plot_below_the_other() -> None:
    found = compared()
    picture = ElementTree.fromstring(plots(found.series, found.setting, found.policies))
    assert picture.get("height") == "520"
    [second] = picture.findall("{http://www.w3.org/2000/svg}g")
    assert second.get("transform") == "translate(0 260)"
    assert "steps: sulks" in "".join(second.itertext())
    assert "steps: reactive" in str(picture.findtext("{http://www.w3.org/2000/svg}title"))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *[(0, "0 s"), (0.2, "200 ms"), (1, "1 s"), (90, "90 s"), (600, "10 min"), (3600, "1 h"), (5400, "90 min")],
        *[(86400, "1 day"), (100_000, "27.8 h"), (14 * 86400, "14 days")],
    ],
)
def test_spans(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_a_target_beyond_what_a_replica_holds_is_a_warning() -> None:
    series = Series("load", 60.0, [2.0] * 60)
    setting = Setting(capacity=4.0, request_s=1.0)
    inside = MaxOf([TargetOngoing(40), TargetOngoing(2)])
    policies = {"low": TargetOngoing(4), "high": TargetOngoing(40), "inside": inside}
    told = compare(series, setting, policies)
    high, both = told.warnings()
    assert high == (
        "warning: high: 40 requests per replica are more than the 4 that a replica takes at once (capacity times "
        "duration of a request), so it wants too few replicas; lower its target"
    )
    assert "warning: inside: 40 requests per replica" in both
    assert high in told.as_text()
    assert told.as_dict()["warnings"] == [high, both]


def few_arrivals(peak: float, jumps: bool) -> Series:
    """Four days in bins of 10 minutes; with jumps, the load changes at once every 3 hours."""
    chance, level, rates = random.Random(1), 1.0, []
    for index in range(4 * 144):
        if jumps and index % 18 == 0:
            level = chance.choice([0.2, 0.5, 1.0, 1.0, 2.0])
        rates.append(peak * level * max(0.02, 0.5 - 0.5 * math.cos(2 * math.pi * index / 144)))
    return Series("few", 600.0, rates)


@pytest.mark.parametrize("start_up_s", [60.0, 600.0])
@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("peak", [0.004, 0.028])
def test_the_predictive_policy_is_not_beaten_at_low_rates(peak: float, jumps: bool, start_up_s: float) -> None:
    """A reactive policy must not be better on cost and on unserved requests at once."""
    each = peak / 12
    setting = Setting(capacity=each, request_s=1 / each, start_up_s=start_up_s, interval_s=120.0)
    made = compare(few_arrivals(peak, jumps), setting, {"mine": Predictive(each), "reactive": Reactive(each)})
    mine, reactive = made.policies["mine"], made.policies["reactive"]
    assert mine.hours < reactive.hours or mine.unserved < reactive.unserved
    assert mine.unserved < 0.01
