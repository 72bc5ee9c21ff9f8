"""What is reported: when a problem begins, changes or ends, at a limited rate."""

from itertools import pairwise

import msgspec
import pytest

from pointsman.reasons import Reason, counted, reason_of
from pointsman.scaling.records import REPORT_INTERVAL_S, ReportThrottle, ScalingRecord


def reported(*states: str, apart_s: float = 1.0) -> list[tuple[int, str]]:
    """The states that are reported, with their index."""
    news = ReportThrottle()
    reasons = [reason_of("mine", words) if words else None for words in states]
    return [(number, states[number]) for number, one in enumerate(reasons) if news.is_due(one, number * apart_s)]


@pytest.mark.parametrize(
    ("states", "news"),
    [
        (["", "", ""], []),
        (["bad", "bad", "bad"], [(0, "bad")]),
        (["", "bad", "bad", ""], [(1, "bad"), (3, "")]),
        (["bad 1", "bad 2", "bad 3"], [(0, "bad 1")]),  # words with numbers in them
        (["bad", "", "bad", "", ""], [(0, "bad"), (1, "")]),  # it comes and goes
    ],
)
def test_news(states: list[str], news: list[tuple[int, str]]) -> None:
    assert reported(*states) == news


@pytest.mark.parametrize("states", [["bad 1", "bad 2"] * 150, ["bad", ""] * 150])
def test_a_changing_state_is_reported_once_a_minute(states: list[str]) -> None:
    begun = [number for number, words in reported(*states) if words]
    assert len(begun) == 300 / REPORT_INTERVAL_S
    assert all(after - before >= REPORT_INTERVAL_S for before, after in pairwise(begun))
    assert reported("bad", "", "bad", apart_s=REPORT_INTERVAL_S) == [(0, "bad"), (1, ""), (2, "bad")]


def test_about_the_same_figures_are_no_news() -> None:
    def lacking(free_gib: float, why: str = "full") -> Reason:
        less = Reason("too-little-memory", {"needed_bytes": 12 * 2**30, "free_bytes": free_gib * 2**30})
        return Reason("instances-unplaced", {"unplaced": 1, "target": 2, "why": less, "hints": [why]})

    news = ReportThrottle()
    assert news.is_due(lacking(10.0), 0.0)
    saved = msgspec.convert(msgspec.to_builtins(news), ReportThrottle)
    for free_gib in (10.0, 9.9, 10.4, 8.5):
        assert not saved.is_due(lacking(free_gib), 1000.0)
    assert not saved.is_due(lacking(1.0), REPORT_INTERVAL_S / 2), "not yet"
    assert saved.is_due(lacking(1.0), 1000.0)
    assert saved.is_due(lacking(1.0, "too small"), 2000.0), "another problem of the same kind"


def test_reasons_among_facts_are_the_same_after_a_restart() -> None:
    lacking = Reason("too-little-memory", {"needed_bytes": 12 * 2**30, "free_bytes": 10.5 * 2**30})
    in_the_way = Reason("in-the-way", Reason("no-place", {"rejected": counted([("w0", lacking)])}).plain().facts)
    hint = Reason("room-after-moving", {"moves": [{"instance": "b", "from": "w: gpu0", "to": "w: gpu1"}]})
    facts = {"unplaced": 1, "target": 2, "why": in_the_way, "hints": [hint]}
    why = Reason("fits-no-worker", {"why": in_the_way})
    failure = Reason("instances-unplaced", facts)
    record = ScalingRecord(deployment="a", at=1.0, policy="p", before=1, after=1, reasons=(why,), failure=failure)
    stored = msgspec.json.decode(record.as_json(), type=ScalingRecord)
    in_words = "too little memory: needs 12.0 GiB, 10.5 GiB free"
    assert stored.in_words() == record.in_words()
    assert record.in_words() == (
        f"stays at 1: no worker could take it, even if it were empty: {in_words}; "
        f"problem: 1 of 2 has no place: {in_words}; "
        "there would be room if these moved: b from w: gpu0 to w: gpu1"
    )
