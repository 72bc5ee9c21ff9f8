"""Promotions on virtual time: conditions, verdicts, and what ends them early."""

import pytest

from pointsman.routing.canary import CanaryCounts, ShareCounts, ShareLatencies
from pointsman.routing.promotion import MIN_REQUESTS, Promotion, WrongCondition, read_condition


def share(requests: int, ttft_ms: float, errors: int = 0) -> ShareCounts:
    made = ShareCounts(requests=requests, errors=errors)
    for number in range(requests - errors):
        made.ttft.note(ttft_ms * (1 + number % 10 / 100))
    return made


def promotion(condition: str = "ttft_p90 < -5%") -> Promotion:
    return Promotion("run", "chat", "new", read_condition(condition), 0.1, 600.0, 1000.0, CanaryCounts("run"))


def counts(candidate: ShareCounts, in_force: ShareCounts, **more: int | str) -> CanaryCounts:
    return CanaryCounts("run", in_force, candidate, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("candidate_ms", "at", "state", "code"),
    [
        (80.0, 1599.0, None, None),
        (80.0, 1600.0, "promoted", "condition-met"),
        (97.0, 1600.0, "rolled back", "condition-not-met"),
        (130.0, 1600.0, "rolled back", "condition-not-met"),
        (200.0, 1001.0, "rolled back", "candidate-much-worse"),
    ],
)
def test_the_verdict_follows_from_both_shares(
    candidate_ms: float, at: float, state: str | None, code: str | None
) -> None:
    one = promotion()
    verdict = one.observe(counts(share(200, candidate_ms), share(1800, 100.0)), at)
    assert (None if verdict is None else (verdict.state, verdict.why.code)) == (
        None if state is None else (state, code)
    )


def test_too_few_requests_leave_the_policy_in_force() -> None:
    one = promotion()
    verdict = one.observe(counts(share(MIN_REQUESTS - 1, 10.0), share(1800, 100.0)), 1600.0)
    assert verdict is not None
    assert (verdict.state, verdict.why.code) == ("rolled back", "too-few-to-compare")


def test_a_candidate_without_answers_goes_back_at_once() -> None:
    one = promotion()
    verdict = one.observe(counts(share(5, 10.0), share(50, 100.0), failures=3, problem="raised"), 1001.0)
    assert verdict is not None
    assert verdict.why.code == "candidate-without-answer"


def test_a_candidate_whose_requests_fail_goes_back_at_once() -> None:
    one = promotion()
    assert one.observe(counts(share(100, 10.0, errors=1), share(900, 100.0)), 1001.0) is None
    verdict = one.observe(counts(share(100, 10.0, errors=5), share(900, 100.0)), 1002.0)
    assert verdict is not None
    assert verdict.why.code == "candidate-errs"


def test_a_verdict_stays() -> None:
    one = promotion()
    first = one.observe(counts(share(200, 80.0), share(1800, 100.0)), 1600.0)
    assert one.observe(counts(share(200, 800.0), share(1800, 100.0)), 1700.0) is first


def test_all_terms_of_a_condition_must_hold() -> None:
    one = promotion("ttft_p50 < 0% and errors <= 0%")
    verdict = one.observe(counts(share(200, 80.0, errors=1), share(1800, 100.0)), 1600.0)
    assert verdict is not None
    assert verdict.why.facts["condition"] == "errors <= 0%"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ttft_p91 < -5%", 'unknown metric "ttft_p91"; did you mean "ttft_p9'),
        ("ttft_p90 < -5", "is not of the form"),
        ("ttft_p90 -5%", "is not of the form"),
        ("", "is not of the form"),
        ("ttft_p90 < -5% or errors < 0%", "is not of the form"),
    ],
)
def test_a_malformed_condition_lists_the_known_metrics(text: str, found: str) -> None:
    with pytest.raises(WrongCondition) as error:
        read_condition(text)
    assert found in str(error.value)


def test_latencies_are_added_up_and_exact_to_a_percent() -> None:
    one, other = ShareLatencies(), ShareLatencies()
    for number in range(1, 501):
        one.note(number)
        other.note(number + 500)
    one.add(other)
    for wanted in (0.5, 0.9, 0.99):
        assert one.percentile(wanted) == pytest.approx(1000 * wanted, rel=0.011)
    assert one.mean == pytest.approx(500.5)
