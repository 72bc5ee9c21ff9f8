"""Recordings as people have them; what cannot be meant is an error with its line."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.errors import PointsmanError, UnknownName
from pointsman.lab.scaling import Series, UnreadableLoad, arrivals_of, chosen, load_of_plane, rates_of


@pytest.mark.parametrize(
    ("header", "times", "began"),
    [
        ("t_s,rps", ("0", "600", "1200"), 0.0),
        ("Time, Rate", ("600", "1200", "1800"), 600.0),
        (
            "timestamp,per_second",
            ("2026-11-16T05:20:00Z", "2026-11-16T05:30:00Z", "2026-11-16T05:40:00Z"),
            1794806400.0,
        ),
        ("time,rps", ("2026-11-16 05:20", "2026-11-16 05:30", "2026-11-16 05:40"), 1794806400.0),
        ("time,rps", ("2026-11-16T06:20+01:00", "2026-11-16T05:30Z", "2026-11-16T05:40Z"), 1794806400.0),
    ],
)
def test_times_are_seconds_or_dates(header: str, times: Sequence[str], began: float) -> None:
    [series] = rates_of([header, *(f"{at},{rate}" for at, rate in zip(times, (1, 2.5, 0), strict=True))], "mine")
    assert (series.name, series.bin_s, series.rates, series.began) == ("mine", 600.0, (1.0, 2.5, 0.0), began)


def test_the_order_of_rows_and_columns_does_not_matter() -> None:
    [series] = rates_of(["rate,note,name,time", "3,x,chat,20", "1,,chat,0", "2,y,chat,10"])
    assert (series.name, series.rates) == ("chat", (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column of times, in seconds or as 2026-11-16T05:20:00Z; call it t_s or time or timestamp"),
        (
            "t_s,requests\n0,1",
            "no column of rates, in requests per second; call it rps or .*; the header has t_s, requests",
        ),
        ("t_s,rps\n", "there is nothing below the header"),
        ("t_s,rps\n0,1\n", "load has one row; at least two are needed"),
        ("t_s,rps\n0,1\n600,many", 'line 3: "many" is not a rate'),
        ("t_s,rps\n0,1\n600,-1", 'line 3: "-1" is not a rate'),
        ("t_s,rps\n0,1\n600,nan", 'line 3: "nan" is not a rate'),
        ("t_s,rps\n0,1\n600", 'line 3: "" is not a rate'),
        ("t_s,rps\nsoon,1", 'line 2: "soon" is not a time'),
        ("t_s,rps\ninf,1", 'line 2: "inf" is not a time in seconds'),
        ("t_s,rps\n1794806400000,1", "line 2: .* these are milliseconds, divide them by 1000"),
        ("t_s,rps\n0,1\n600,1\n1300,1", "line 4: bins must be equal; those of load are 600 s, .* 700 s after the row"),
        ("t_s,rps\n0,1\n600,1\n600,1", "line 4: load has this time twice"),
        ("t_s,rps\n0,1\n1,1\n99999999,1", "these are 100,000,000 bins of 1 s; the maximum is 1,000,000"),
    ],
)
def test_invalid_rows_are_errors_with_their_lines(text: str, words: str) -> None:
    with pytest.raises(UnreadableLoad, match=words):
        rates_of(text.splitlines())


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50), st.integers(1, 3600), st.integers(0, 10**9))
def test_written_series_are_read_back(rates: list[float], bin_s: int, began: int) -> None:
    rows = [f"{began + place * bin_s},{rate!r}" for place, rate in enumerate(rates)]
    [series] = rates_of(["t_s,rps", *rows])
    assert (series.bin_s, list(series.rates), series.began) == (bin_s, rates, began)


def test_one_of_several_is_chosen_by_its_name() -> None:
    both = [Series("chat", 10.0, [1.0]), Series("code", 10.0, [2.0])]
    assert chosen(both, "code") is both[1]
    assert chosen(both[:1], None) is both[0]
    with pytest.raises(UnreadableLoad, match="there are 2 series: chat, code; choose one"):
        chosen(both, None)
    with pytest.raises(UnknownName, match='unknown series "chut"; did you mean "chat"'):
        chosen(both, "chut")


def requests(*arrivals: tuple[int, str]) -> list[str]:
    return [json.dumps({"timestamp": at, "model": model} if model else {"timestamp": at}) for at, model in arrivals]


def test_only_requests_of_the_model_are_counted() -> None:
    lines = requests((0, "a"), (100, "b"), (5000, "a"), (12_000, "a"), (21_000, "b"), (22_000, "a"))
    assert arrivals_of("all", lines, 10.0).rates == (0.3, 0.1)
    assert arrivals_of("a", lines, 10.0, "a").rates == (0.2, 0.1)
    with pytest.raises(UnknownName, match='unknown model "c"; known: a, b'):
        arrivals_of("c", lines, 10.0, "c")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "there is no request in it"),
        (["", "no"], "line 2: no is not a request, such as"),
        (['{"at": 3}'], 'line 1: {"at": 3} is not a request'),
        (['{"timestamp": "now"}'], "line 1: .* is not a request"),
        (["3"], "line 1: 3 is not a request"),
        (['{"timestamp": Infinity}'], "line 1: its timestamp is not a finite number"),
        (requests((0, ""), (9000, "")), "came within 9 s, and that is not one whole bin of 10 s; choose shorter bins"),
    ],
)
def test_invalid_requests(lines: list[str], words: str) -> None:
    with pytest.raises(UnreadableLoad, match=words):
        arrivals_of("chat", lines, 10.0)


def test_requests_without_a_model() -> None:
    with pytest.raises(UnreadableLoad, match="do not name their model"):
        arrivals_of("chat", requests((0, ""), (9000, "")), 10.0, "chat")


def history(bins: int, recent: int) -> dict[str, Any]:
    """The answer of a plane that has seen this many bins."""

    def rates(number: int, bin_s: float) -> list[dict[str, float]]:
        return [{"began": index * bin_s, "per_second": 2.0} for index in range(number)]

    known = {"start_up_s": 5.0, "request_s": 1.0, "max_concurrency": 4, "cost_per_replica_hour": None}
    policy = {"policy": "target-ongoing", "parameters": {"target": 2}, "limits": {"interval_s": 1.0, "max_replicas": 9}}
    recently = {"bin_s": 30.0, "bins": rates(recent, 30.0)}
    return {"deployment": "chat", "bin_s": 600.0, "bins": rates(bins, 600.0), "recent": recently, **known, **policy}


@pytest.mark.parametrize(
    ("bins", "recent", "replayed", "noted"),
    [(0, 1, (1, 30.0), "30s"), (0, 7, (7, 30.0), "3m30s"), (3, 60, (60, 30.0), "30m"), (7, 120, (7, 600.0), "")],
)
def test_whatever_history_there_is_can_be_replayed(
    bins: int, recent: int, replayed: tuple[int, float], noted: str
) -> None:
    load = load_of_plane(history(bins, recent))
    assert (len(load.series.rates), load.series.bin_s) == replayed
    assert load.interval_s <= load.series.seconds
    assert ("load" in load.notes) is bool(noted)
    assert noted in load.notes.get("load", "")


def test_a_plane_that_has_seen_nothing_says_when_to_try_again() -> None:
    with pytest.raises(PointsmanError, match='has not seen "chat" for long enough; try again in 30s'):
        load_of_plane(history(0, 0))
