"""Replays: the product's plane on virtual time, the same seed the same figures, and every request accounted for."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from pointsman.errors import PointsmanError
from pointsman.lab.traffic import (
    LAB_POLICIES,
    Objectives,
    RecordedRequest,
    Recording,
    ReplaySetting,
    TrafficComparison,
    Trial,
    TrialCache,
    figures,
    fleet_of,
    grid,
    policy_of,
    recording_of,
    replay,
    run_trials,
)
from pointsman.lab.traffic.measures import RunCounters
from pointsman.lab.traffic.replay import blocks_of, prompt_of
from pointsman.routing.routes import DEFAULT_SETTINGS
from pointsman.runtimes.simulation.faults import read_faults
from tests.lab.traffic.workloads import conversations, recorded, setting, written


@pytest.mark.parametrize("policy", [*LAB_POLICIES, "power-of-two", "slo-aware", "prefix", "queue-scorer"])
def test_every_request_ends_once_with_times_in_order(policy: str) -> None:
    each = conversations()
    replayed = replay(recorded(*each), setting(), policy_of(policy))
    assert [one.request for one in replayed.ended] == each
    for one in replayed.ended:
        assert one.served
        assert one.at <= one.sent_at < one.first_at <= one.ended_at
        assert one.cached_tokens < one.request.input_length
    assert replayed.errors == []


def test_the_same_seed_gives_the_same_replay_and_another_seed_another() -> None:
    load = recorded(*conversations())
    first, again, other = (replay(load, setting(speed=3.0), policy_of("power-of-two"), seed) for seed in (4, 4, 5))
    assert first == again
    assert [one.instance for one in first.ended] != [one.instance for one in other.ended]


def test_prompts_that_begin_alike_are_computed_once() -> None:
    blocks = tuple(range(8))
    one = RecordedRequest(timestamp=0, input_length=8 * 512, output_length=2, hash_ids=blocks)
    later = msgspec.structs.replace(one, timestamp=5000)
    replayed = replay(recorded(one, later), setting(), policy_of("pending-work"))
    assert [found.cached_tokens for found in replayed.ended] == [0, 7 * 512], "at least one token is computed"
    assert replayed.ended[1].ttft_s < replayed.ended[0].ttft_s / 2
    strangers = [msgspec.structs.replace(found, hash_ids=()) for found in (one, later)]
    replayed = replay(recorded(*strangers), setting(), policy_of("pending-work"))
    assert [found.cached_tokens for found in replayed.ended] == [0, 0]


def test_bytes_and_blocks_stand_for_prompts() -> None:
    one = RecordedRequest(timestamp=0, input_length=700, output_length=1, hash_ids=(3, 1 << 63))
    assert len(prompt_of(one)) == 2800
    other = msgspec.structs.replace(one, hash_ids=(3, 4))
    assert prompt_of(one)[:2048] == prompt_of(other)[:2048]
    assert prompt_of(one) != prompt_of(other)
    assert len(prompt_of(msgspec.structs.replace(one, hash_ids=()))) == 0
    assert prompt_of(msgspec.structs.replace(one, hash_ids=(-1, 1 << 70)))[:8] == bytes([255] * 8)
    assert len(blocks_of(one, 16)) == 700 // 16
    assert blocks_of(one, 16)[:32] == blocks_of(other, 16)[:32]
    assert blocks_of(msgspec.structs.replace(one, hash_ids=(1, 2, 3, 4)), 1024) == (2, 4)
    with pytest.raises(PointsmanError, match="blockSize"):
        blocks_of(one, 100)


def test_a_closed_loop_waits_for_answers_and_thinks() -> None:
    turns = [
        RecordedRequest(timestamp=number, input_length=512, output_length=50, session_id="s", think_ms=2000)
        for number in range(4)
    ]
    replayed = replay(recorded(*turns), setting(closed=True), policy_of("pending-work"))
    for before, after in zip(replayed.ended, replayed.ended[1:], strict=False):
        assert after.at == pytest.approx(before.ended_at + 2.0)
    open_loop = replay(recorded(*turns), setting(), policy_of("pending-work"))
    assert open_loop.ended[-1].at == pytest.approx(0.003)


def test_a_request_that_fits_nowhere_is_a_miss() -> None:
    large = RecordedRequest(timestamp=0, input_length=10_000_000, output_length=1)
    replayed = replay(recorded(large, *conversations(2)), setting(), policy_of("pending-work"))
    found = figures(replayed, Objectives(), policy="p", speed=1.0, seed=0)
    assert not replayed.ended[0].served
    assert math.isnan(replayed.ended[0].first_at)
    assert found.rejected == pytest.approx(1 / 9)
    assert found.attainment == pytest.approx(8 / 9)


def test_objectives_of_the_run_and_of_requests() -> None:
    each = conversations(6)
    easy = replay(recorded(*each), setting(), policy_of("pending-work"))

    def attainment(objectives: Objectives) -> float:
        return figures(easy, objectives, policy="p", speed=1.0, seed=0).attainment

    assert attainment(Objectives()) == 1.0
    assert attainment(Objectives(ttft_s=1e-6)) == 0.0
    assert attainment(Objectives(tpot_s=1e-6)) == 0.0
    own = [msgspec.structs.replace(one, slo_ms=0.001) for one in each]
    strict = replay(recorded(*own), setting(), policy_of("pending-work"))
    assert figures(strict, Objectives(), policy="p", speed=1.0, seed=0).attainment == 0.0


def test_a_manifest_is_a_fleet_and_its_scaling_runs(tmp_path: Path) -> None:
    file = tmp_path / "manifest.yaml"
    file.write_text(
        "deployments:\n- name: chat\n  model: chat\n  engine: {type: simulated, parameters: {maxNumSeqs: 8}}\n"
        "  scaling: {min: 1, max: 4, interval: 1s, downDelay: 5s, parameters: {target: 1, lookBack: 2s}}\n"
    )
    each = conversations(60, per_second=30.0)
    replayed = replay(recorded(*each), ReplaySetting(fleet=fleet_of(str(file))), None)
    assert all(one.served for one in replayed.ended)
    assert min(replayed.line.replicas) == 1
    assert max(replayed.line.replicas) > 1


def test_comparisons_pair_seeds_and_know_what_was_cached(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", conversations())
    base = Trial(source=str(file), policy=None, setting=setting())
    trials = grid(base, [policy_of("round-robin"), policy_of("pending-work")], [1.0, 2.0], seeds=2)
    cache = TrialCache(tmp_path / "cache")
    fresh = run_trials(trials, cache, processes=1)
    assert [one.cached for one in fresh] == [False] * 8
    again = run_trials(trials, cache, processes=1)
    assert [one.cached for one in again] == [True] * 8
    assert [one.figures for one in again] == [one.figures for one in fresh]
    compared = TrafficComparison(again)
    assert compared.policies == ["round-robin", "pending-work"]
    better = compared.difference("pending-work", 1.0, "hit_rate")
    assert better.mean > better.half, "it sends turns of a conversation to the same instance"
    assert "8 of 8 replays cached" in compared.as_text()
    file.write_text(file.read_text().replace('"output_length":', '"output_length":1', 1))
    recording_of.cache_clear()
    assert not run_trials(trials[:1], cache, processes=1)[0].cached


def test_memory_is_bounded_by_what_is_in_flight_and_not_by_the_length_of_the_recording() -> None:
    """Once the dispatcher keeps as many records as it may, nothing grows any more."""
    keep, more = DEFAULT_SETTINGS.keep_records, 4_000
    blocks: list[int] = []
    tally = RunCounters(Objectives())

    def made() -> Iterator[RecordedRequest]:
        for number in range(keep + more):
            first = number % 50 * 10_000_000
            hash_ids = (first, first + number + 1)
            yield RecordedRequest(timestamp=number * 20.0, input_length=1024, output_length=2, hash_ids=hash_ids)

    def progress(share: float) -> None:
        if share * (keep + more) > keep + 1_000:  # the deques of records are full, and the prefix caches
            blocks.append(sys.getallocatedblocks())

    recording = Recording("made up", made)
    replay(recording, setting(), policy_of("pending-work"), progress=progress, ended=tally.add)
    assert len(blocks) > 8
    grown = fmean(blocks[-3:]) - fmean(blocks[:3])
    assert grown < 0.3 * more, f"{grown:,.0f} more objects after {more:,} more requests"


FAULTS = """
faults:
- {kind: kill, at: 2, instance: fleet-1}
- {kind: slow-down, at: 5, factor: 50, seconds: 20, instance: fleet-2}
- {kind: kill, at: 6, instance: fleet-9}
random: {count: 3, begin: 3, end: 12}
"""


def test_faults_happen_to_a_replay_and_again_with_its_seed() -> None:
    load = recorded(*conversations())
    rough = msgspec.structs.replace(setting(speed=4.0), faults=read_faults(FAULTS))
    first, again = (replay(load, rough, policy_of("pending-work"), 4) for _ in range(2))
    assert first == again
    assert len({one.number for one in first.ended}) == len(first.ended) == load.survey().requests
    assert any("kill 1" in error for error in first.errors), "there is no ninth instance"
    smooth = replay(load, setting(speed=4.0), policy_of("pending-work"), 4)
    assert min(first.line.replicas) < min(smooth.line.replicas)
    assert fmean(one.latency_s for one in first.ended) > fmean(one.latency_s for one in smooth.ended)
    kept = msgspec.json.decode(msgspec.json.encode(rough), type=ReplaySetting)
    assert kept == rough, "a saved run replays its faults"
