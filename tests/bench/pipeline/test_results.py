"""Medians over rounds, ratios within them, and what the tables make of both."""

import pytest

from bench.pipeline.load import Loaded
from bench.pipeline.report import OURS, P50, RATE, RAY, tables
from bench.pipeline.results import Copying, Diamond, Handing, InProcess, Results, Round, of_diamond, of_handing


def a_diamond(rate: float, p50_ms: float, errors: int = 0) -> Diamond:
    complaint = "status 500: no" if errors else ""
    requests = int(rate * 2)
    return Diamond(Loaded(requests, requests, errors, complaint, 2.0, p50_ms, 2 * p50_ms), cpu_ms=1.0)


def a_round(ours: Diamond | None, rays: Diamond | None, handed_ms: float | None = None) -> Round:
    found = Round(Copying(again_ms=0.5, fresh_ms=5.0))
    found.diamonds = {name: {1: diamond} for name, diamond in ((OURS, ours), (RAY, rays)) if diamond}
    if handed_ms:
        found.handings[OURS] = Handing(handed_ms, handed_ms + 1)
    return found


@pytest.fixture
def results() -> Results:
    """Both were slower in the second round; in the third Ray was not there; in the fourth nothing was right."""
    return Results(
        versions={RAY: "2.60.0", OURS: ""},
        rounds=[
            a_round(a_diamond(2000, 0.5), a_diamond(50, 20.0), 0.8),
            a_round(a_diamond(1000, 1.0), a_diamond(20, 40.0), 1.5),
            a_round(a_diamond(900, 1.5), None),
            a_round(a_diamond(0, 0.0, errors=1), a_diamond(50, 20.0)),
        ],
    )


def test_a_figure_is_the_median_of_the_rounds_that_have_it(results: Results) -> None:
    assert results.values(of_diamond(OURS, 1, RATE)) == [2000, 1000, 900]
    assert results.median(of_diamond(OURS, 1, RATE)) == 1000
    assert results.median(of_diamond(OURS, 8, RATE)) is None
    assert results.median(of_handing(RAY, lambda handing: handing.read_ms)) is None


def test_ratios_are_of_the_same_round(results: Results) -> None:
    assert results.ratios(of_diamond(OURS, 1, RATE), of_diamond(RAY, 1, RATE)) == [40, 50]
    assert results.ratios(of_diamond(OURS, 1, P50), of_diamond(RAY, 1, P50)) == [0.025, 0.025]


def test_a_server_that_errs_is_named(results: Results) -> None:
    assert results.complaints() == {OURS: "1 clients: status 500: no"}


def targets_met(results: Results) -> dict[str, str]:
    """What was aimed at -> yes or NO, from the table."""
    lines = tables(results).partition("Targets\n")[2].partition("\n\n")[0].splitlines()[2:]
    return {line.split("  ")[0]: line.split()[-1] for line in lines}


def test_targets_are_judged_by_the_median(results: Results) -> None:
    results.in_process = InProcess(execute_us=31.0, plain_us=0.1)
    assert targets_met(results) == {
        "requests/s / ray serve, 1 clients": "yes",
        "p50 / ray serve, 1 clients": "yes",
        "execute in one process, us": "NO",
        "10 MB to the next replica / array.copy()": "NO",
    }


def test_what_was_not_measured_is_said_and_not_judged() -> None:
    results = Results(versions={OURS: ""}, missing={RAY: "Ray is not installed"}, rounds=[a_round(None, None)])
    assert targets_met(results) == {}
    assert "Not measured: ray serve: Ray is not installed" in tables(results)
