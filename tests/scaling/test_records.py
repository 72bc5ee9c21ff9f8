"""What is reported: when a problem begins, changes or ends, at a limited rate."""

from itertools import pairwise

import pytest

from pointsman.scaling.records import REPORT_INTERVAL_S, ReportThrottle


def reported(*states: str, apart_s: float = 1.0) -> list[tuple[int, str]]:
    """The states that are reported, with their index."""
    news = ReportThrottle()
    return [(number, words) for number, words in enumerate(states) if news.is_news(words, number * apart_s)]


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
