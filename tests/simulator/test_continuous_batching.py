"""The model of continuous batching: examples, then properties of any load."""

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.simulator.continuous_batching import ContinuousBatching, Limits
from pointsman.simulator.performance import EngineStep, Hardware, Job, hardware

H100 = hardware("8B|h100_sxm|vllm|tp1")
PLAIN = Hardware(c0=10.0, cw=0.0, cc=0.0, ca=0.0, ck=0.0, cb=0.0, kv_tokens=1600)
"""Every step takes 10 ms."""


def steps_of(engine: ContinuousBatching) -> list[EngineStep]:
    steps: list[EngineStep] = []
    while (at := engine.next_at) is not None:
        steps += engine.advance(at)
    return steps


def first_and_last(steps: list[EngineStep], job: Job) -> tuple[float, float]:
    times = [step.at for step in steps for produced in step.produced if produced is job]
    return times[0], times[-1]


def text(family: int, blocks: int) -> list[int]:
    return [family * 1000 + place for place in range(blocks)]


def test_a_single_job_takes_the_time_of_the_formula() -> None:
    engine, job = ContinuousBatching(H100), Job(1000, 3)
    engine.submit(job, 5.0)
    steps = steps_of(engine)
    first = H100.step_ms(1000, 1000 * 500.0, 0, 0) / 1000
    second = H100.step_ms(1, 0.0, 1000, 1) / 1000
    third = H100.step_ms(1, 0.0, 1001, 1) / 1000
    assert [step.at for step in steps] == pytest.approx([5 + first, 5 + first + second, 5 + first + second + third])
    assert [step.produced for step in steps] == [[job]] * 3
    assert [step.finished for step in steps] == [[], [], [job]]
    assert job.generated == 3
    assert (engine.running, engine.kv_usage) == (0, 0.0)


def test_time_can_be_scaled() -> None:
    slow, fast = ContinuousBatching(H100), ContinuousBatching(H100, Limits(time_scale=4.0))
    for engine in (slow, fast):
        engine.submit(Job(1000, 50), 0.0)
    assert steps_of(fast)[-1].at == pytest.approx(steps_of(slow)[-1].at / 4)


def test_jobs_share_steps_and_join_between_them() -> None:
    engine = ContinuousBatching(PLAIN)
    first, second = Job(16, 4), Job(16, 2)
    engine.submit(first, 0.0)
    engine.submit(second, 0.001)  # a step is running, so it joins the next
    assert (engine.running, engine.waiting) == (1, 1)
    steps = steps_of(engine)
    assert first_and_last(steps, first) == pytest.approx((0.01, 0.04))
    assert first_and_last(steps, second) == pytest.approx((0.02, 0.03))


def test_seats_are_limited_and_assigned_in_order() -> None:
    engine = ContinuousBatching(PLAIN, Limits(max_num_seqs=2))
    jobs = [Job(16, 2) for _ in range(4)]
    for job in jobs:
        engine.submit(job, 0.0)
    steps = steps_of(engine)
    finished = [job for step in steps for job in step.finished]
    assert sorted(map(jobs.index, finished[:2])) == [0, 1]
    assert max(len(step.produced) for step in steps) == 2


def test_long_prompts_are_prefilled_in_chunks_during_decoding() -> None:
    engine = ContinuousBatching(PLAIN._replace(kv_tokens=16_000), Limits(max_num_seqs=4, max_num_batched_tokens=100))
    talking, long = Job(16, 20), Job(950, 1)
    engine.submit(talking, 0.0)
    engine.advance(0.01)
    engine.submit(long, 0.01)
    steps = steps_of(engine)
    # The running step, then 99 prompt tokens per step: one of the hundred is for decoding.
    assert first_and_last(steps, long)[0] == pytest.approx(0.02 + 10 * 0.01)
    assert sum(talking in step.produced for step in steps) == 19


def test_a_cached_prefix_costs_less() -> None:
    engine = ContinuousBatching(H100)
    cold, warm, other = Job(3200, 1, text(1, 200)), Job(3200, 1, text(1, 200)), Job(3200, 1, text(2, 200))
    took: list[float] = []
    for job in (cold, warm, other):
        began = 10.0 * len(took)
        engine.submit(job, began)
        took.append(steps_of(engine)[-1].at - began)
    assert took[0] == pytest.approx(took[2])
    assert took[1] < took[0] / 5
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 3200 - 16)  # at least one token is computed, hence one block
    assert (engine.counts.prefix_queries, engine.counts.prefix_hits) == (9600, 3184)


def test_the_prefix_cache_includes_answers() -> None:
    engine = ContinuousBatching(PLAIN)
    engine.submit(Job(160, 33, text(1, 12)), 0.0)
    steps_of(engine)
    next_turn = Job(320, 1, text(1, 20))
    engine.submit(next_turn, 1.0)
    assert next_turn.cached_tokens == 192  # 160 read and 32 written; the last token was never read


def test_the_job_admitted_last_is_preempted_and_resumes_first() -> None:
    engine = ContinuousBatching(PLAIN, Limits(kv_tokens=64))
    first, second, third = Job(16, 40), Job(16, 40), Job(16, 1)
    for job in (first, second, third):
        engine.submit(job, 0.0)
    steps = steps_of(engine)
    assert engine.counts.preemptions > 0
    order = [job for step in steps for job in step.finished]
    assert order == [third, first, second]
    produced = Counter(id(job) for step in steps for job in step.produced)
    assert produced == {id(first): 40, id(second): 40, id(third): 1}
    assert first_and_last(steps, first)[1] == pytest.approx(0.40)  # as if alone


def test_a_job_can_be_cancelled_in_any_state() -> None:
    engine = ContinuousBatching(PLAIN, Limits(max_num_seqs=2, max_num_batched_tokens=20))
    writing, reading, waiting = Job(16, 50), Job(100, 50), Job(16, 50)
    for job in (writing, reading, waiting):
        engine.submit(job, 0.0)
    engine.advance(0.025)
    assert (engine.generated(writing, 0.025), engine.generated(reading, 0.025), engine.waiting) == (2, 0, 1)
    for job in (writing, reading, waiting):
        engine.cancel(job, 0.026)
        engine.cancel(job, 0.026)
    assert (engine.running, engine.waiting, engine.kv_usage) == (0, 0, 0.0)
    assert [step.produced for step in steps_of(engine)] == [[]]  # the running step
    assert engine.next_at is None
    assert writing.generated == 2


def test_steps_before_a_submit_are_still_reported() -> None:
    engine = ContinuousBatching(PLAIN)
    first = Job(16, 3)
    engine.submit(first, 0.0)
    engine.submit(Job(16, 1), 1.0)  # without polling in between
    assert [step.at for step in engine.advance(1.0)] == pytest.approx([0.01, 0.02, 0.03])


def test_jobs_that_can_never_run_are_refused() -> None:
    engine = ContinuousBatching(PLAIN)
    assert engine.fits(1599, 1)
    assert not engine.fits(1600, 1)
    with pytest.raises(ValueError, match="1700 tokens does not fit into a KV cache of 1600"):
        engine.submit(Job(1600, 100), 0.0)
    with pytest.raises(ValueError, match="tokens to read and to write"):
        engine.submit(Job(10, 0), 0.0)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        ContinuousBatching(PLAIN, Limits(max_num_seqs=10, max_num_batched_tokens=5))


# Properties


class Load(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    family: int
    after_s: float
    cancelled_after_s: float | None


LOADS = st.lists(
    st.builds(
        Load,
        st.integers(1, 200),
        st.integers(1, 60),
        st.integers(0, 3),
        st.floats(0, 0.2),
        st.one_of(st.none(), st.floats(0, 0.5)),
    ),
    min_size=1,
    max_size=25,
)
SMALL = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 128),
    block_size=st.sampled_from([1, 4, 16]),
    kv_tokens=st.integers(304, 1200),
    time_scale=st.just(1.0),
)


def play(
    limits: Limits, loads: list[Load], *, every_token: bool = True
) -> tuple[ContinuousBatching, dict[Job, list[float]], list[Job], list[Job]]:
    """The engine at the end, the token times of each job, the finished jobs, and the cancelled ones."""
    engine = ContinuousBatching(H100, limits, every_token=every_token)
    events: list[tuple[float, int, Job, bool]] = []
    now = 0.0
    for number, load in enumerate(loads):
        now += load.after_s
        blocks = (load.prompt_tokens + load.output_tokens) // limits.block_size
        job = Job(load.prompt_tokens, load.output_tokens, text(load.family, blocks))
        events.append((now, number, job, True))
        if load.cancelled_after_s is not None:
            events.append((now + load.cancelled_after_s, number, job, False))
    events.sort(key=lambda event: (event[0], event[1], not event[3]))
    tokens: dict[Job, list[float]] = {job: [] for _, _, job, comes in events if comes}
    finished: list[Job] = []
    cancelled: list[Job] = []

    def note(steps: list[EngineStep]) -> None:
        for step in steps:
            for job in step.produced:
                tokens[job].append(step.at)
            for job in step.finished:
                finished.append(job)
                if not every_token and (not tokens[job] or tokens[job][-1] != step.at):
                    tokens[job].append(step.at)

    for at, _, job, comes in events:
        note(engine.advance(at))
        check(engine)
        if comes:
            engine.submit(job, at)
        else:
            engine.cancel(job, at)
            if job not in finished:
                cancelled.append(job)
        check(engine)
    note(steps_of(engine))
    return engine, tokens, finished, cancelled


def check(engine: ContinuousBatching) -> None:
    assert 0 <= engine.cache.used <= engine.cache.capacity
    assert engine.cache.used + engine.cache.idle <= engine.cache.capacity


@given(SMALL, LOADS)
def test_every_job_ends_once_with_all_its_tokens(limits: Limits, loads: list[Load]) -> None:
    engine, tokens, finished, cancelled = play(limits, loads)
    assert Counter(map(id, finished + cancelled)) == Counter(map(id, tokens))
    for job, times in tokens.items():
        assert times == sorted(times)
        if job in finished:
            assert len(times) == job.output_tokens == job.generated
        else:
            assert len(times) == job.generated < job.output_tokens
    assert (engine.running, engine.waiting, engine.cache.used) == (0, 0, 0)


@given(SMALL, LOADS)
def test_the_same_load_takes_the_same_time(limits: Limits, loads: list[Load]) -> None:
    runs = [list(play(limits, loads)[1].values()) for _ in range(2)]
    assert runs[0] == runs[1]


@given(SMALL, LOADS)
def test_stretches_change_no_time(limits: Limits, loads: list[Load]) -> None:
    """Steps that are taken together end when they would end one by one."""

    def played(every_token: bool) -> tuple[list[tuple[float, float]], list[int], list[int], float]:
        engine, tokens, finished, _ = play(limits, loads, every_token=every_token)
        times = [(at[0], at[-1] if job in finished else 0.0) for job, at in tokens.items() if at]
        return (
            times,
            [job.generated for job in tokens],
            [job.cached_tokens for job in tokens],
            engine.counts.preemptions,
        )

    singly, together = played(True), played(False)
    assert together[1:] == singly[1:]
    for (first, last), (other_first, other_last) in zip(singly[0], together[0], strict=True):
        assert (other_first, other_last) == pytest.approx((first, last), rel=1e-9)


@given(SMALL, LOADS, st.lists(st.floats(0, 3), max_size=20))
def test_advancing_more_often_changes_nothing(limits: Limits, loads: list[Load], looks: list[float]) -> None:
    def times(looks: list[float]) -> list[float]:
        engine = ContinuousBatching(H100, limits)
        now, found = 0.0, []
        arrivals = []
        for load in loads:
            now += load.after_s
            arrivals.append((now, Job(load.prompt_tokens, load.output_tokens)))
        for at, job in sorted([*arrivals, *((look, None) for look in looks)], key=lambda event: event[0]):
            if job is None:
                found += engine.advance(at)
            else:
                engine.submit(job, at)
        return [step.at for step in found + steps_of(engine)]

    assert times(looks) == times([])


@given(st.integers(1, 20_000), st.integers(0, 5_000), st.integers(1, 50))
def test_a_longer_prompt_is_never_faster(tokens: int, more: int, output: int) -> None:
    def took(prompt: int) -> tuple[float, float]:
        engine, job = ContinuousBatching(H100), Job(prompt, output)
        engine.submit(job, 0.0)
        return first_and_last(steps_of(engine), job)

    assert took(tokens)[0] <= took(tokens + more)[0]
    assert took(tokens)[1] <= took(tokens + more)[1]


@given(SMALL, LOADS)
def test_running_jobs_never_exceed_the_seats(limits: Limits, loads: list[Load]) -> None:
    engine = ContinuousBatching(H100, limits)
    for load in loads:
        engine.submit(Job(load.prompt_tokens, load.output_tokens), 0.0)
    for step in steps_of(engine):
        assert len(step.produced) <= limits.max_num_seqs


@given(SMALL, LOADS, st.lists(st.floats(0.0, 0.02), min_size=1, max_size=80))
def test_metrics_are_those_of_single_steps_and_stay_for_as_long_as_said(
    limits: Limits, loads: list[Load], gaps: list[float]
) -> None:
    """Between jobs that come and go, whatever steps are taken together."""
    engine, stepwise = (ContinuousBatching(H100, limits, every_token=every) for every in (False, True))
    changes: list[tuple[float, Load, Job, Job]] = []
    at = 0.0
    for load in loads:
        at += load.after_s
        one, twin = (Job(load.prompt_tokens, load.output_tokens) for _ in range(2))
        changes.append((at, load, one, twin))
        if load.cancelled_after_s is not None:
            changes.append((at + load.cancelled_after_s, load, one, twin))
    changes.sort(key=lambda change: change[0])
    submitted: set[Job] = set()
    now, until, before = 0.0, -1.0, engine.load(0.0)
    for gap in gaps:
        now += gap
        while changes and changes[0][0] <= now:
            at, _, one, twin = changes.pop(0)
            for each, job in ((engine, one), (stepwise, twin)):
                if one in submitted:
                    each.cancel(job, at)
                else:
                    each.submit(job, at)
            submitted.add(one)
            until = -1.0
        found = engine.load(now)
        assert found[:5] == stepwise.load(now)[:5]
        assert now >= until or found == before
        before, until = found, found.until
        assert until > now
