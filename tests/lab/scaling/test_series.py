import pytest

from pointsman.lab.scaling import Series, arrivals_of, rates_of
from pointsman.scaling.policy import Rate

ROWS = """model,t_s,rps
chat,0,10.5
chat,600,20
code,0,1
chat,1800,5
code,600,3
"""


def test_rates_are_read_by_model_and_a_gap_counts_as_0() -> None:
    chat, code = rates_of(ROWS.splitlines())
    assert (chat.name, chat.bin_s, chat.rates) == ("chat", 600.0, (10.5, 20.0, 0.0, 5.0))
    assert (code.name, code.rates) == ("code", (1.0, 3.0))


def test_arrivals_are_counted_in_bins_without_an_incomplete_last_one() -> None:
    lines = [f'{{"timestamp": {at}, "input_length": 1}}' for at in (1000, 1500, 10_999, 11_000, 22_000, 25_000)]
    assert arrivals_of("chat", lines, 10.0).rates == (0.3, 0.1)


def test_rates_and_means_at_any_moment() -> None:
    series = Series("chat", 10.0, [1.0, 3.0, 5.0])
    assert (series.seconds, series.requests) == (30.0, 90.0)
    assert [series.rate(at) for at in (0, 9.9, 10, 29.9, 30)] == [1, 1, 3, 5, 5]
    assert series.mean(5, 15) == 2.0
    assert series.mean(-100, 20) == 2.0
    assert series.mean(20, 100) == 5.0
    assert series.mean(-10, 0) == 1.0


def test_each_bin_needs_the_fewest_replicas_that_serve_it() -> None:
    assert Series("chat", 10.0, [0.0, 0.1, 5.0, 5.1, 0.3]).needed(5.0) == [0, 1, 1, 2, 1]
    assert Series("chat", 10.0, [2.1]).needed(0.7) == [3], "whatever floats make of it"


def test_history_is_on_the_clock_of_the_replay() -> None:
    assert Series("chat", 10.0, [1.0, 3.0]).history(1000.0) == (Rate(1000.0, 1.0), Rate(1010.0, 3.0))


@pytest.mark.parametrize("at", [0.0, 9.99, 10.0, 25.0, 30.0, 99.0])
def test_only_ended_bins_count(at: float) -> None:
    assert Series("chat", 10.0, [1.0, 3.0, 5.0]).bins_before(at) == min(int(at / 10), 3)


def test_an_empty_series_is_refused() -> None:
    with pytest.raises(ValueError, match="chat: a series has bins"):
        Series("chat", 10.0, [])
