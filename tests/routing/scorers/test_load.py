from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.endpoints import Endpoint, Metrics
from pointsman.routing.scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    PendingWorkScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    TokenLoadScorer,
)
from pointsman.selection import Scorer
from tests.routing.fleets import Candidate, both_lengths, kv, running, scene, scores, waiting


def active(requests: int) -> Candidate:
    return Candidate(requests=requests)


def tokens(in_flight: float, uncached: float | None = None) -> Candidate:
    return Candidate(tokens=in_flight, uncached=uncached)


TABLE: list[tuple[Scorer[Endpoint], Sequence[Candidate], list[float]]] = [
    (QueueScorer(), [waiting(0), waiting(5), waiting(10)], [1.0, 0.5, 0.0]),
    (QueueScorer(), [waiting(7), waiting(7)], [1.0, 1.0]),
    (QueueScorer(), [waiting(7)], [1.0]),
    (QueueScorer(), [Candidate(), waiting(4)], [1.0, 0.0]),
    (RunningRequestsSizeScorer(), [running(2), running(6), running(10)], [1.0, 0.5, 0.0]),
    (RunningRequestsSizeScorer(), [running(3), running(3)], [1.0, 1.0]),
    (KvCacheUtilizationScorer(), [kv(0.0), kv(0.25), kv(1.0)], [1.0, 0.75, 0.0]),
    (KvCacheUtilizationScorer(), [kv(0.9)], [0.1]),
    (KvCacheUtilizationScorer(), [Candidate(), kv(0.5)], [1.0, 0.5]),
    (PendingWorkScorer(), [tokens(0, 100), tokens(0, 0), tokens(300, 0)], [1 / 301, 1.0, 1 / 301]),
    (PendingWorkScorer(1.0), [tokens(99, 0), tokens(0, 199)], [1.0, 0.5]),
    (PendingWorkScorer(), [Candidate(requests=8), Candidate()], [0.5, 1.0]),
    (PendingWorkScorer(base_requests=1.0), [running(3), Candidate(requests=1), Candidate()], [0.25, 0.5, 1.0]),
    (TokenLoadScorer(), [tokens(0), tokens(2097152), tokens(4194304), tokens(9e6)], [1.0, 0.5, 0.0, 0.0]),
    (TokenLoadScorer(100), [tokens(20, 30), tokens(0, 100), tokens(20, 0)], [0.5, 0.0, 0.8]),
    (TokenLoadScorer(100), [tokens(-5), tokens(25)], [1.0, 0.75]),
    (TokenLoadScorer(0), [tokens(1048576)], [0.75]),
    (TokenLoadScorer(-1), [tokens(1048576)], [0.75]),
    (ActiveRequestScorer(), [active(0), active(1), active(4)], [1.0, 0.75, 0.0]),
    (ActiveRequestScorer(), [active(3), active(3)], [0.0, 0.0]),
    (ActiveRequestScorer(), [active(0), active(0)], [1.0, 1.0]),
    (ActiveRequestScorer(idle_threshold=2), [active(2), active(3), active(4)], [1.0, 0.25, 0.0]),
    (ActiveRequestScorer(idle_threshold=-3), [active(0), active(2), active(4)], [1.0, 0.5, 0.0]),
    (ActiveRequestScorer(max_busy_score=0.5), [active(0), active(1), active(4)], [1.0, 0.375, 0.0]),
    (ActiveRequestScorer(max_busy_score=0.0), [active(0), active(1), active(4)], [1.0, 0.0, 0.0]),
    (ActiveRequestScorer(max_busy_score=1.5), [active(0), active(1), active(4)], [1.0, 0.75, 0.0]),
    (ActiveRequestScorer(max_busy_score=-0.1), [active(0), active(1), active(4)], [1.0, 0.75, 0.0]),
    (LoadAwareScorer(), [waiting(0), waiting(64), waiting(128), waiting(500)], [0.5, 0.25, 0.0, 0.0]),
    (LoadAwareScorer(10), [waiting(5), Candidate()], [0.25, 0.5]),
    (LoadAwareScorer(0), [waiting(64)], [0.25]),
    (LoadAwareScorer(-7), [waiting(64)], [0.25]),
]

ALL: list[Scorer[Endpoint]] = [
    QueueScorer(),
    RunningRequestsSizeScorer(),
    KvCacheUtilizationScorer(),
    TokenLoadScorer(),
    ActiveRequestScorer(),
    LoadAwareScorer(),
    PendingWorkScorer(),
]


@both_lengths
@pytest.mark.parametrize(("scorer", "candidates", "expected"), TABLE)
def test_scores(scorer: Scorer[Endpoint], candidates: Sequence[Candidate], expected: list[float], long: bool) -> None:
    assert scores(scorer, *scene(candidates, long=long)) == pytest.approx(expected)


@both_lengths
@pytest.mark.parametrize("scorer", ALL, ids=lambda scorer: type(scorer).__name__)
def test_no_candidates_no_scores(scorer: Scorer[Endpoint], long: bool) -> None:
    assert scores(scorer, *scene([], long=long)) == []


@given(
    st.lists(
        st.builds(
            lambda queue, busy, usage, requests: Candidate(Metrics(queue, busy, usage), requests=requests),
            st.integers(0, 300),
            st.integers(0, 300),
            st.floats(0, 1),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_lists_and_arrays_agree_and_stay_within_bounds(candidates: list[Candidate]) -> None:
    for scorer in ALL:
        short, long = (scores(scorer, *scene(candidates, long=long)) for long in (False, True))
        assert short == pytest.approx(long)
        assert all(0 <= score <= 1 for score in short)
