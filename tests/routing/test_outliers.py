"""Instances are judged by comparison: by their own errors, their peers' and what peers make of the same requests."""

from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.routing.outliers import FAILED, MIN_ERRORS_ALONE, WINDOW_S, Doubt, Outlier, Outliers, Streak, kind_of
from tests.properties import examples

PEERS = ("a", "b", "c", "d")


class Traffic(NamedTuple):
    """What one instance did: good results, errors of one kind, and what others made of the requests with errors."""

    good: int
    errors: int = 0
    contradicted: int = 0
    confirmed: int = 0


def seen(kind: str, traffic: dict[str, Traffic], now: float = 100.0) -> Outliers:
    outliers = Outliers()
    for name in traffic:
        outliers.erred(Doubt(name, "a first error, which begins the window"), now)
    for name, one in traffic.items():
        doubt, other = Doubt(name, kind), Doubt("z", kind)
        outliers.good[name] += one.good
        for _ in range(one.errors):
            outliers.erred(doubt, now)
        for _ in range(one.contradicted):
            outliers.contradicted([doubt], now)
        for _ in range(one.confirmed):
            outliers.confirmed([doubt, other], now)
    return outliers


def find(kind: str, traffic: dict[str, Traffic]) -> Outlier | None:
    return seen(kind, traffic).find(Doubt("a", kind), list(traffic), 100.0)


WELL = Traffic(20)

STANDS_OUT = {
    "every request, and others serve them": ("404", {"a": Traffic(0, 9, 9), "b": WELL, "c": WELL, "d": WELL}),
    "a third of them": ("401", {"a": Traffic(40, 20, 20), "b": Traffic(60), "c": Traffic(60)}),
    "half of it is the clients'": ("400", {"a": Traffic(10, 40, 5, 5), "b": Traffic(50), "c": Traffic(50)}),
    "peers have some, too": ("5xx", {"a": Traffic(10, 40, 40), "b": Traffic(45, 5, 5), "c": Traffic(45, 5, 5)}),
    "two of four are alike": (
        FAILED,
        {"a": Traffic(0, 20, 20), "b": Traffic(0, 20, 20), "c": Traffic(40), "d": Traffic(40)},
    ),
    "without second opinions, many": ("403", {"a": Traffic(0, MIN_ERRORS_ALONE), "b": WELL, "c": WELL}),
    "it refuses most": ("429", {"a": Traffic(3, 20, 20), "b": WELL, "c": WELL}),
}
DOES_NOT = {
    "the only instance": ("404", {"a": Traffic(0, 50, 50)}),
    "all answer the same": ("400", {name: Traffic(0, 50, 0, 50) for name in PEERS}),
    "all answer the same, unchecked": ("400", {name: Traffic(0, 50) for name in PEERS}),
    "one client with bad requests, all on one instance": ("400", {"a": Traffic(10, 90, 0, 9), "b": WELL, "c": WELL}),
    "too few": ("404", {"a": Traffic(0, 4, 4), "b": WELL, "c": WELL}),
    "too few were contradicted": ("404", {"a": Traffic(0, 6, 2, 1), "b": WELL, "c": WELL}),
    "without second opinions, too few": ("403", {"a": Traffic(0, MIN_ERRORS_ALONE - 1), "b": WELL, "c": WELL}),
    "a small share": ("5xx", {"a": Traffic(950, 50, 50), "b": Traffic(1000), "c": Traffic(1000)}),
    "a difference that may be chance": ("5xx", {"a": Traffic(7, 5, 5), "b": Traffic(9, 2, 2), "c": Traffic(8, 2, 2)}),
    "peers have no results": ("404", {"a": Traffic(0, 9, 9), "b": Traffic(0)}),
    "it refuses some, as the smallest would": ("429", {"a": Traffic(60, 40, 40), "b": Traffic(90), "c": Traffic(90)}),
}


@pytest.mark.parametrize(("kind", "traffic"), STANDS_OUT.values(), ids=STANDS_OUT.keys())
def test_stands_out(kind: str, traffic: dict[str, Traffic]) -> None:
    found = find(kind, traffic)
    assert found is not None
    assert (found.instance_id, found.kind) == ("a", kind)
    assert found.errors / found.results > found.peer_errors / found.peer_results
    assert found.contradicted == traffic["a"].contradicted


@pytest.mark.parametrize(("kind", "traffic"), DOES_NOT.values(), ids=DOES_NOT.keys())
def test_does_not_stand_out(kind: str, traffic: dict[str, Traffic]) -> None:
    assert find(kind, traffic) is None


TRAFFIC = st.builds(
    lambda good, errors, asked, share: Traffic(
        good, errors, round(min(asked, errors) * share), min(asked, errors) - round(min(asked, errors) * share)
    ),
    st.integers(0, 200),
    st.integers(0, 100),
    st.integers(0, 100),
    st.floats(0, 1),
)


@given(st.integers(2, 6), TRAFFIC)
def test_nothing_stands_out_among_equals(count: int, traffic: Traffic) -> None:
    assert find("404", dict.fromkeys("abcdef"[:count], traffic)) is None


@given(TRAFFIC, st.lists(TRAFFIC, min_size=1, max_size=5))
def test_errors_that_are_all_confirmed_never_count(own: Traffic, others: list[Traffic]) -> None:
    confirmed = own._replace(contradicted=0, confirmed=max(own.confirmed, 1))
    assert find("400", {"a": confirmed} | dict(zip("bcdef", others, strict=False))) is None


@given(TRAFFIC, st.lists(TRAFFIC, min_size=1, max_size=5))
def test_only_the_larger_share_stands_out(own: Traffic, others: list[Traffic]) -> None:
    found = find("404", {"a": own} | dict(zip("bcdef", others, strict=False)))
    if found is not None:
        assert 5 <= found.errors <= found.results
        assert found.errors / found.results - found.peer_errors / found.peer_results > 0.05  # whole numbers are shown


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 5)), min_size=1, max_size=300))
def test_equal_chances_stand_out_for_none(steps: list[tuple[str, float]]) -> None:
    """Each instance has an error with every fourth of its requests, wherever requests go and whenever they come."""
    outliers, now, counts = Outliers(), 0.0, dict.fromkeys("abcd", 0)
    for name, later in steps:
        now += later
        counts[name] += 1
        if counts[name] % 4:
            outliers.good[name] += 1
            continue
        doubt = Doubt(name, "5xx")
        outliers.erred(doubt, now)
        outliers.contradicted([doubt], now)
        assert outliers.find(doubt, PEERS, now) is None


@pytest.mark.parametrize("returns", [False, True], ids=["all were there", "one comes back after a good time"])
@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
def test_instances_that_fail_equally_often_stand_out_by_chance_for_hardly_any_seed(share: float, returns: bool) -> None:
    """Each try has an error with this probability; a request is tried once more if a second opinion is wanted."""
    found = 0
    for seed in range(60):
        outliers, rng = Outliers(), Random(seed)
        if returns:
            outliers.good.update(dict.fromkeys(PEERS[:3], 100))
            outliers.joined()
        for number in range(450):
            now, doubts = number * 0.005, list[Doubt]()
            for name in rng.sample(PEERS, 2):
                if rng.random() >= share:
                    outliers.good[name] += 1
                    outliers.contradicted(doubts, now)
                    break
                doubts.append(Doubt(name, "400"))
                outliers.erred(doubts[-1], now)
                if len(doubts) == 1 and not outliers.wants_opinion(doubts[0], PEERS, now):
                    break
            else:
                outliers.confirmed(doubts, now)
            found += any(outliers.find(doubt, PEERS, now) is not None for doubt in doubts)
    assert found <= 1, f"{found} in 60 runs"


# Time


def test_old_results_do_not_count() -> None:
    outliers, doubt = Outliers(), Doubt("a", "404")
    for now, counts in ((0.0, True), (WINDOW_S, True), (2 * WINDOW_S, True), (5 * WINDOW_S, False)):
        outliers.good["b"] += 30
        if counts:
            for _ in range(4):
                outliers.erred(doubt, now)
                outliers.contradicted([doubt], now)
        found = outliers.find(doubt, PEERS, now)
        assert (found is not None) is (counts and now > 0.0), "four errors are too few, eight are not"


def test_good_results_of_a_quiet_time_do_not_hide_an_outlier() -> None:
    """An hour without errors leaves ten results of each instance."""
    outliers, doubt = Outliers(), Doubt("a", "404")
    for name in PEERS:
        outliers.good[name] = 100_000
    for number in range(1, 20):
        outliers.erred(doubt, 3600.0)
        outliers.contradicted([doubt], 3600.0)
        if outliers.find(doubt, PEERS, 3600.0) is not None:
            assert number < 10
            return
    raise AssertionError("it does not stand out")


def test_an_outlier_is_reported_once_per_second() -> None:
    kind, traffic = STANDS_OUT["every request, and others serve them"]
    outliers, doubt = seen(kind, traffic), Doubt("a", kind)
    assert [outliers.find(doubt, PEERS, at) is not None for at in (100.0, 100.5, 101.0, 101.2)] == [
        True, False, True, False,
    ]  # fmt: skip


def test_an_instance_that_comes_back_starts_again() -> None:
    kind, traffic = STANDS_OUT["every request, and others serve them"]
    outliers, doubt = seen(kind, traffic), Doubt("a", kind)
    outliers.streaks["a"].failures = 2
    outliers.forget("a")
    assert outliers.find(doubt, PEERS, 100.0) is None
    assert outliers.streaks == {}


# Second opinions


def opinions(outliers: Outliers, doubt: Doubt, count: int, *, agree: bool) -> int:
    """How many of this many errors are checked, if the others agree each time, or never."""
    asked = 0
    for _ in range(count):
        outliers.erred(doubt, 100.0)
        if outliers.wants_opinion(doubt, PEERS, 100.0):
            asked += 1
            if agree:
                outliers.confirmed([doubt, Doubt("b", doubt.kind)], 100.0)
            else:
                outliers.contradicted([doubt], 100.0)
    return asked


def test_errors_that_are_confirmed_are_checked_ever_less() -> None:
    outliers = seen("400", {name: Traffic(10, 90) for name in PEERS})
    doubt = Doubt("a", "400")
    assert opinions(outliers, doubt, 100, agree=True) == 6
    assert opinions(outliers, doubt, 128 * 5, agree=True) == 5


def test_an_instance_with_more_errors_than_its_peers_is_checked_more_often() -> None:
    outliers = seen("400", {"a": Traffic(0)} | {name: Traffic(100) for name in "bcd"})
    assert opinions(outliers, Doubt("a", "400"), 800, agree=True) > 90


def test_every_error_is_checked_again_once_one_was_contradicted() -> None:
    outliers = seen("400", {name: Traffic(10, 90) for name in PEERS})
    doubt = Doubt("a", "400")
    opinions(outliers, doubt, 100, agree=True)
    outliers.contradicted([doubt], 100.0)
    assert opinions(outliers, doubt, 10, agree=False) == 10


@pytest.mark.parametrize(
    ("doubts", "confirmed"),
    [
        ([Doubt("a", "400")], []),
        ([Doubt("a", "400"), Doubt("a", "400")], []),
        ([Doubt("a", "400"), Doubt("b", "404")], []),
        ([Doubt("a", "400"), Doubt("b", "400")], ["a", "b"]),
        ([Doubt("a", "400"), Doubt("b", "404"), Doubt("c", "400")], ["a", "c"]),
    ],
)
def test_the_same_error_of_two_instances_confirms_both(doubts: list[Doubt], confirmed: list[str]) -> None:
    outliers = Outliers()
    outliers.confirmed(doubts, 100.0)
    assert [name for name in "abc" if outliers._count(Doubt(name, "400")).asked] == confirmed


# Pauses


def test_pauses_are_what_is_asked_for_within_limits() -> None:
    assert [Streak().pause_s(asked, is_paused=False) for asked in (0.0, 3.0, 1e9)] == [0.1, 3.0, 60.0]


def test_pauses_without_a_time_double() -> None:
    streak = Streak()
    assert [streak.pause_s(None, is_paused=False) for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert streak.pause_s(None, is_paused=True) == 10.0
    assert streak.refusals == 9


def test_kinds() -> None:
    assert [kind_of(status) for status in (400, 429, 499, 500, 503, 599)] == ["400", "429", "499", "5xx", "5xx", "5xx"]
