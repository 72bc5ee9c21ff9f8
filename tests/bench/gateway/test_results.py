"""Medians over rounds, and ratios within them."""

import pytest

from bench.gateway.measuring import DIRECT, Figures, Memory
from bench.gateway.report import tables
from bench.gateway.results import MeasuredProxy, Results
from bench.gateway.scenarios import FIRST_TOKEN, PLAIN
from bench.gateway.warm_start import WarmStart

FAILED = Figures(0.0, 0, 0, 1.0, 1, "it fell over", 0.0, 0.0, 0.0, 0.0)


def figures(us: float, *, first_us: float = 0.0, errors: int = 0) -> Figures:
    return Figures(us * 100, 100, 0, 500.0, errors, "", 0.5, 1.0, 2.0, first_us)


def results(scenario: str, **rounds: list[Figures]) -> Results:
    made = Results(kind="C")
    for name, runs in rounds.items():
        for run in runs:
            made.add(scenario, name, run)
    return made


def test_a_ratio_is_taken_within_each_round() -> None:
    """A machine that gets slower doubles both sides of a ratio."""
    made = results(
        "plain", ours=[figures(10), figures(20), figures(400)], envoy=[figures(20), figures(40), figures(50)]
    )
    assert made.median("plain", "ours", lambda run: run.us_per_request) == 20
    assert made.minimum("plain", "ours", lambda run: run.us_per_request) == 10
    assert made.ratio("plain", "ours", "envoy", lambda run: run.us_per_request) == 0.5


def test_a_failed_round_is_no_figure_but_an_error() -> None:
    made = results("plain", ours=[FAILED, figures(20)], envoy=[figures(10), figures(40)])
    assert made.median("plain", "ours", lambda run: run.us_per_request) == 20
    assert made.ratio("plain", "ours", "envoy", lambda run: run.us_per_request) == 0.5
    assert made.errors("plain", "ours") == 1
    assert made.first_errors() == {"ours": "plain: it fell over"}


def test_nothing_measured_is_no_figure() -> None:
    made = results("plain", ours=[FAILED])
    assert made.median("plain", "ours", lambda run: run.us_per_request) is None
    assert made.ratio("plain", "ours", "envoy", lambda run: run.us_per_request) is None


def test_added_time_is_over_the_direct_connection_of_the_same_round() -> None:
    direct, ours = (
        [figures(1, first_us=30), figures(1, first_us=300)],
        [figures(1, first_us=130), figures(1, first_us=400)],
    )
    assert results("first", **{DIRECT: direct, "ours": ours}).added_us("first", "ours") == [100, 100]


def test_figures_are_per_request_chunk_and_byte() -> None:
    run = Figures(5000.0, 100, 50, 500.0, 0, "", 0.5, 1.0, 2.0, 0.0)
    assert (run.us_per_request, run.us_per_chunk, run.ns_per_byte, run.requests_per_s) == (50, 100, 100, 200)
    assert run.core_share == pytest.approx(0.01)


def test_the_tables_say_who_is_missing_and_what_was_missed() -> None:
    plain = PLAIN[32].name
    made = results(plain, direct=[figures(0)], envoy=[figures(50)], pointsman=[figures(75)])
    made.add(FIRST_TOKEN.name, DIRECT, figures(1, first_us=30))
    made.add(FIRST_TOKEN.name, "envoy", figures(1, first_us=130))
    made.add(FIRST_TOKEN.name, "pointsman", figures(1, first_us=80))
    made.proxies = [MeasuredProxy("envoy", "round robin", "1.40.0"), MeasuredProxy("pointsman", "prefix", "")]
    made.unavailable = {"nginx": "nginx is not installed"}
    made.memory = {"pointsman": Memory(30.0, 45.0, 256)}
    made.warm_starts = [WarmStart(0.5, 2.5)]
    lines = [" ".join(line.split()) for line in tables(made).splitlines()]
    assert "pointsman prefix 75.0 75.0 1.50 200 2% 1.00 2.00 0" in lines
    assert "CPU per request / envoy at 32 connections at most 1 1.50 1.50 to 1.50 NO" in lines
    assert "added time to first token / envoy at most 1 0.50 0.50 to 0.50 yes" in lines
    assert "MB with 256 open streams at most 60 45.00 45.00 to 45.00 yes" in lines
    assert "warm start, s at most 3 2.50 2.50 to 2.50 yes" in lines
    assert "Not measured: nginx: nginx is not installed" in lines
