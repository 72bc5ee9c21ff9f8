"""Generators: the same text gives the same requests, with the properties that their names promise."""

from itertools import pairwise
from statistics import fmean

import pytest

from pointsman.errors import PointsmanError
from pointsman.lab.traffic import RecordedRequest, policy_of, recording_of, replay
from pointsman.lab.traffic.sources import GENERATORS
from tests.lab.traffic.workloads import setting


def made(text: str) -> list[RecordedRequest]:
    recording_of.cache_clear()
    return list(recording_of(f"generate:{text}"))


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_text_gives_the_same_requests_in_order(name: str) -> None:
    each = made(f"{name}?rate=2&seconds=60&tenants=3")
    assert each == made(f"{name}?rate=2&seconds=60&tenants=3")
    assert each != made(f"{name}?rate=2&seconds=60&tenants=3&seed=1")
    assert [one.timestamp for one in each] == sorted(one.timestamp for one in each)
    assert {one.tenant for one in each} == {"tenant-1", "tenant-2", "tenant-3"}
    assert all(len(one.hash_ids) == -(-one.input_length // 512) for one in each)


@pytest.mark.parametrize("name", ["poisson", "bursty", "diurnal"])
def test_rates_and_lengths_are_means(name: str) -> None:
    each = made(f"{name}?rate=10&seconds=600&input=1000&output=50")
    assert len(each) == pytest.approx(6000, rel=0.1)
    assert fmean(one.input_length for one in each) == pytest.approx(1000, rel=0.1)
    assert fmean(one.output_length for one in each) == pytest.approx(50, rel=0.1)


def test_bursts_and_days() -> None:
    bursts = made("bursty?rate=10&seconds=600&burst=6&period=30")
    assert all(one.timestamp / 1000 % 30 < 5 for one in bursts)
    day = made("diurnal?rate=10&seconds=600")
    middle = sum(200 < one.timestamp / 1000 < 400 for one in day)
    assert middle > 2 * (len(day) - middle) / 2


def test_turns_begin_with_the_turn_before() -> None:
    sessions: dict[str, list[RecordedRequest]] = {}
    for one in made("multi-turn?rate=1&seconds=120"):
        sessions.setdefault(one.session_id, []).append(one)
    assert max(map(len, sessions.values())) > 3
    for turns in sessions.values():
        for before, after in pairwise(turns):
            shared = before.input_length // 512
            assert after.hash_ids[:shared] == before.hash_ids[:shared]
            assert after.input_length > before.input_length + before.output_length - 1
            assert after.think_ms > 0
    assert len({turns[0].hash_ids[0] for turns in sessions.values()}) == len(sessions)


def test_agents_share_their_system_prompt() -> None:
    each = made("agents?rate=1&seconds=60&prefix=2048")
    assert len({one.hash_ids[:4] for one in each}) == 1
    assert len({one.hash_ids[4] for one in each}) > 10


def test_a_generated_load_is_replayed_in_a_closed_loop() -> None:
    load = recording_of("generate:agents?rate=1&seconds=20&input=600&output=30")
    replayed = replay(load, setting(closed=True), policy_of("pending-work"))
    assert all(one.served for one in replayed.ended)
    assert len(replayed.ended) == load.survey().requests


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("poison", 'unknown generator "poison".*poisson'),
        ("poisson?rat=5", 'unknown parameter "rat".*rate'),
        ("poisson?rate=many", "rate"),
        ("poisson?rate=0", "rate is 0; it must be above 0"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(PointsmanError, match=words):
        made(text)
