"""The rules of vLLM v1 that the engine model follows, each with numbers that can be checked by hand.

Every step takes 10 ms.
"""

import json
import os
from pathlib import Path

import pytest

from pointsman.simulator.continuous_batching import ContinuousBatching, Limits
from pointsman.simulator.kv_cache import NOTHING, KvCache, Lease
from pointsman.simulator.performance import EngineLoad, EngineStep, Hardware, Job

PLAIN = Hardware(c0=10.0, cw=0.0, cc=0.0, ca=0.0, ck=0.0, cb=0.0, kv_tokens=1600)
TRACES = os.environ.get("POINTSMAN_TRACES")


def engine_of(**limits: int) -> ContinuousBatching:
    return ContinuousBatching(PLAIN, Limits(**limits))


def steps_of(engine: ContinuousBatching) -> list[EngineStep]:
    steps: list[EngineStep] = []
    while (at := engine.next_at) is not None:
        steps += engine.advance(at)
    return steps


def first_tokens(engine: ContinuousBatching, *jobs: Job) -> list[float]:
    """When each job has its first token, if all arrive at 0."""
    for job in jobs:
        engine.submit(job, 0.0)
    times: dict[Job, float] = {}
    for step in steps_of(engine):
        for job in step.produced:
            times.setdefault(job, step.at)
    return [times[job] for job in jobs]


def test_one_budget_for_all_tokens_of_a_step() -> None:
    """100 tokens per step: the first job alone, as the others come when it has begun; 60 and 40; 39 and 61; 18."""
    engine = engine_of(max_num_batched_tokens=100, max_num_seqs=8)
    jobs = Job(60, 1), Job(60, 1), Job(79, 1), Job(79, 1)
    assert first_tokens(engine, *jobs) == pytest.approx([0.01, 0.02, 0.03, 0.04])


def test_answers_take_their_part_of_the_budget_first() -> None:
    """Two answers leave 98 of 100 tokens: a prompt of 99 takes two steps."""
    engine = engine_of(max_num_batched_tokens=100, max_num_seqs=8)
    writing = [Job(10, 50), Job(10, 50)]
    for job in writing:
        engine.submit(job, 0.0)
    engine.advance(0.01)
    prompt = Job(99, 1)
    engine.submit(prompt, 0.012)  # during the second step; it is read in the third and the fourth
    assert next(step.at for step in steps_of(engine) if prompt in step.produced) == pytest.approx(0.04)


def test_blocks_are_allocated_for_what_a_step_computes() -> None:
    engine = engine_of(max_num_batched_tokens=32, max_num_seqs=8, block_size=16)
    engine.submit(Job(100, 1), 0.0)
    assert engine.cache.used == 2
    engine.advance(0.01)
    assert engine.cache.used == 4


def test_blocks_are_shared_from_the_step_that_computes_them() -> None:
    engine = engine_of(block_size=16)
    first, second = Job(160, 4, list(range(10))), Job(165, 4, [*range(10)])
    engine.submit(first, 0.0)
    engine.submit(second, 0.001)  # the first is still being read
    engine.advance(0.01)
    assert second.cached_tokens == 160
    assert engine.cache.used == 10 + 2, "ten blocks for both, and one more of each"


def test_at_least_the_last_token_is_computed() -> None:
    engine = engine_of(block_size=16)
    for number in range(2):
        job = Job(64, 1, [1, 2, 3, 4])
        engine.submit(job, float(number))
        engine.advance(number + 0.5)
    assert job.cached_tokens == 48


def test_a_block_is_free_when_its_last_user_has_gone() -> None:
    cache, leases, text = KvCache(160, 16), [Lease() for _ in range(3)], (1, 2, 3)
    for lease in leases:
        assert cache.lease(lease, cache.known(text, 3), 3)
        cache.publish(lease, text, 3)
    for lease, used in zip(leases, (3, 3, 0), strict=True):
        cache.release(lease)
        assert cache.used == used
    assert cache.idle == 3


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    cache, old, new, text = KvCache(64, 16), Lease(), Lease(), (1, 2, 3, 4)
    assert cache.lease(old, NOTHING, 4)
    cache.publish(old, text, 4)
    cache.release(old)
    assert cache.lease(new, NOTHING, 3)
    assert cache.known(text, 4).blocks == 1


def test_a_text_that_forks_keeps_the_common_beginning() -> None:
    cache, leases = KvCache(160, 16), [Lease(), Lease(), Lease()]
    texts = [(1, 2, 3, 4), (1, 2, 30, 40), (1, 2, 3, 5)]
    for lease, text in zip(leases, texts, strict=True):
        assert cache.lease(lease, cache.known(text, 4), 4)
        cache.publish(lease, text, 4)
    assert cache.used == 4 + 2 + 1
    for lease in leases:
        cache.release(lease)
    assert (cache.used, cache.idle) == (0, 7)
    assert [cache.known(text, 4).blocks for text in texts] == [4, 4, 4]


def test_a_block_counts_with_all_blocks_before_it() -> None:
    """As in vLLM, whose hashes are chained: names that are not need no chain here."""
    cache, first = KvCache(160, 16), Lease()
    assert cache.lease(first, NOTHING, 3)
    cache.publish(first, (1, 2, 3), 3)
    assert cache.known((3, 9), 2) is NOTHING
    assert cache.known((1, 9, 3), 3).blocks == 1


def test_the_last_admitted_job_is_preempted_computed_again_and_comes_first() -> None:
    """Four blocks of 16: in its 18th step the first job needs a third block, and the second must go."""
    engine = engine_of(kv_tokens=64, block_size=16)
    first, second, third = Job(16, 20), Job(16, 20), Job(16, 1)
    for job in (first, second):
        engine.submit(job, 0.0)
    engine.submit(third, 0.165)
    steps = steps_of(engine)
    assert engine.counts.preemptions == 1
    assert second.cached_tokens == 0
    # 20 steps for the first. The second began a step later and has 16 tokens; the step that reads it again writes one.
    assert [step.at for step in steps if first in step.finished] == pytest.approx([0.20])
    assert [step.at for step in steps if second in step.finished] == pytest.approx([0.24])
    assert [step.at for step in steps if third in step.finished] == pytest.approx([0.21])


def test_a_transferred_prompt_needs_one_token_only() -> None:
    engine = engine_of(max_num_batched_tokens=100, max_num_seqs=8)
    here, there = Job(400, 2), Job(400, 2)
    there.transferred = 400
    assert first_tokens(engine, here) == pytest.approx([0.04])
    assert first_tokens(engine_of(max_num_batched_tokens=100, max_num_seqs=8), there) == pytest.approx([0.01])


def test_metrics_are_those_of_the_last_step() -> None:
    engine = engine_of(block_size=16, max_num_seqs=1, max_num_batched_tokens=100)
    engine.submit(Job(32, 100), 0.0)
    engine.submit(Job(32, 100), 0.001)
    assert engine.load(0.005)[:3] == EngineLoad(0, 0, 0.0)[:3], "the first step has not ended"
    assert engine.load(0.015)[:3] == (1, 0, 0.02), "the second job was not there when it began"
    assert engine.load(0.025)[:3] == (1, 1, 0.03)


@pytest.mark.skipif(TRACES is None, reason="POINTSMAN_TRACES is not set")
def test_the_hit_rate_of_an_infinite_cache() -> None:
    cache, tokens, hits = KvCache(1 << 40, 512), 0, 0
    with (Path(str(TRACES)) / "mooncake_conversation.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            one = json.loads(line)
            hashes, lease = tuple(one["hash_ids"]), Lease()
            cached = cache.known(hashes, len(hashes))
            tokens += one["input_length"]
            hits += min(cached.blocks * 512, one["input_length"])
            assert cache.lease(lease, cached, len(hashes))
            cache.publish(lease, hashes, len(hashes))
            cache.release(lease)
    assert hits / tokens == pytest.approx(0.374, abs=0.0005)
