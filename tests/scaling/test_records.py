"""What is worth telling: beginnings, ends, and not the same every second."""

from itertools import pairwise

import pytest

from pointsman.scaling.records import REPORT_INTERVAL_S, ReportThrottle


def told(*states: str, apart_s: float = 1.0) -> list[tuple[int, str]]:
    """Of states one after the other, those that were told, by number."""
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
    assert told(*states) == news


@pytest.mark.parametrize("states", [["bad 1", "bad 2"] * 150, ["bad", ""] * 150])
def test_what_never_comes_to_rest_is_told_once_a_minute(states: list[str]) -> None:
    begun = [number for number, words in told(*states) if words]
    assert len(begun) == 300 / REPORT_INTERVAL_S
    assert all(after - before >= REPORT_INTERVAL_S for before, after in pairwise(begun))
    assert told("bad", "", "bad", apart_s=REPORT_INTERVAL_S) == [(0, "bad"), (1, ""), (2, "bad")]
