import pytest

from pointsman.simulator.performance import EngineStep, FixedPace, Job


def steps_of(pace: FixedPace) -> list[EngineStep]:
    steps: list[EngineStep] = []
    while (at := pace.next_at) is not None:
        steps += pace.advance(at)
    return steps


def test_every_job_is_served_as_if_alone() -> None:
    pace, first, second = FixedPace(0.1, 0.02), Job(10, 3), Job(10_000, 2)
    pace.submit(first, 1.0)
    pace.submit(second, 1.01)
    assert pace.running == 2
    steps = steps_of(pace)
    assert [step.at for step in steps if first in step.produced] == pytest.approx([1.1, 1.12, 1.14])
    assert [step.at for step in steps if second in step.produced] == pytest.approx([1.11, 1.13])
    assert [job for step in steps for job in step.finished] == [second, first]
    assert pace.kv_usage == 0.0


def test_a_fixed_pace_has_limited_seats() -> None:
    pace, first, second, third = FixedPace(0.1, 0.0, max_num_seqs=1), Job(1, 5), Job(1, 1), Job(1, 1)
    for job in (first, second, third):
        pace.submit(job, 0.0)
    assert (pace.running, pace.waiting) == (1, 2)
    pace.cancel(second, 0.05)
    steps = steps_of(pace)
    assert [step.at for step in steps] == pytest.approx([0.1] * 5 + [0.2])
    assert steps[-1].finished == (third,)


def test_a_cancelled_job_frees_its_seat() -> None:
    pace, first, second = FixedPace(0.1, 0.1, max_num_seqs=1, kv_tokens=100), Job(50, 9), Job(1, 1)
    pace.submit(first, 0.0)
    pace.submit(second, 0.0)
    assert pace.kv_usage == 0.5
    pace.cancel(first, 0.25)
    pace.cancel(first, 0.25)
    assert [step.at for step in steps_of(pace)] == pytest.approx([0.35])
    assert pace.kv_usage == 0.0
