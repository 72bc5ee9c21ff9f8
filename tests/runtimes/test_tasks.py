"""Background tasks on a real event loop: each way to end, and what `status` says of it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pointsman.runtimes import tasks as module
from pointsman.runtimes.tasks import BEAT_S, BUSY_BEAT_S, TURN_SECONDS, LoopTurns, Tasks
from tests.runtimes.local.processes import eventually


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.001)


def run(story: Callable[[Tasks], Coroutine[Any, Any, None]]) -> list[str]:
    """Returns what was logged."""
    logged: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: logged.append(told["message"]))
        made = Tasks(loop)
        await story(made)
        made.close()
        assert made.alive == set()

    asyncio.run(main())
    return logged


class Work:
    """A coroutine that ends as it is told to, and counts its starts."""

    def __init__(self, *ends: BaseException | None) -> None:
        self._ends = list(ends)
        self.starts = 0

    async def __call__(self) -> None:
        self.starts += 1
        if self._ends:
            end = self._ends.pop(0)
            if end is not None:
                raise end
            return
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (ValueError("broken"), "ValueError: broken"),
        (None, "RuntimeError: it returned"),
        (asyncio.CancelledError(), "CancelledError: it was cancelled"),
    ],
)
def test_a_kept_task_is_started_again_however_it_ends(end: BaseException | None, why: str) -> None:
    async def story(tasks: Tasks) -> None:
        work = Work(end)
        tasks.keep("work", work)
        await eventually(lambda: work.starts == 2)
        [problem] = tasks.problems()
        assert f'background task "work" failed once, last 0 s ago ({why}); it ' in str(problem)
        assert tasks.failures() == {"work": 1}

    assert run(story) == ['pointsman: background task "work" failed']


def test_a_task_that_something_cancels_is_started_again() -> None:
    async def story(tasks: Tasks) -> None:
        work = Work()
        kept = tasks.keep("work", work)
        await eventually(lambda: work.starts == 1)
        assert kept.task is not None
        kept.task.cancel()
        await eventually(lambda: work.starts == 2)
        assert tasks.failures() == {"work": 1}

    run(story)


def test_pauses_grow_until_a_task_has_been_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 1.0)
    pauses: list[float | None] = []

    class Recorded(Tasks):
        def failed(self, name: str, error: BaseException, retry_s: float | None = None) -> None:
            pauses.append(retry_s)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        tasks = Recorded(loop)
        kept = tasks.keep("work", Work(*[ValueError()] * 6))

        async def next_end() -> None:
            known = len(pauses)
            await eventually(lambda: len(pauses) > known)
            assert kept._timer is not None
            kept._timer.cancel()

        await next_end()
        for _ in range(4):
            kept._start()
            await next_end()
        monkeypatch.setattr(module, "CALM_S", 0.0)
        kept._start()
        await next_end()
        kept.cancel()

    asyncio.run(story())
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0, 1.0]


def test_a_task_to_complete_is_started_again_until_it_returns() -> None:
    async def story(tasks: Tasks) -> None:
        work = Work(ValueError(), asyncio.CancelledError(), None)
        tasks.complete("work", work)
        await eventually(lambda: tasks.alive == set())
        assert work.starts == 3
        assert tasks.failures() == {"work": 2}

    run(story)


def test_a_task_that_is_cancelled_here_ends_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 60.0)

    async def story(tasks: Tasks) -> None:
        running, waiting = Work(), Work(ValueError())
        kept = tasks.keep("running", running)
        await eventually(lambda: running.starts == 1)
        task = kept.task
        kept.cancel()
        assert task is not None
        with pytest.raises(asyncio.CancelledError):
            await task
        failing = tasks.keep("waiting", waiting)
        await eventually(lambda: tasks.failures() == {"waiting": 1})
        failing.cancel()
        assert failing._timer is not None
        assert failing._timer.cancelled()
        assert (running.starts, waiting.starts) == (1, 1)
        assert tasks.failures() == {"waiting": 1}

    run(story)


def test_a_repeated_call_goes_on_after_it_has_raised() -> None:
    async def story(tasks: Tasks) -> None:
        calls: list[int] = []

        def call() -> None:
            calls.append(1)
            if len(calls) in (2, 3):
                raise ValueError("broken")

        tasks.every("call", 0.001, call)
        await eventually(lambda: len(calls) > 5)
        assert tasks.failures() == {"call": 2}
        [problem] = tasks.problems()
        assert str(problem) == 'background task "call" failed 2 times, last 0 s ago (ValueError: broken); it runs again'
        assert (problem.code, problem.facts["failures"], problem.facts["retry_s"]) == ("task-failed", 2, None)

    run(story)


def test_many_failures_are_counted_and_few_are_logged() -> None:
    async def story(tasks: Tasks) -> None:
        for _ in range(100):
            tasks.attempt("call", lambda: [][0])
        assert tasks.failures() == {"call": 100}

    assert len(run(story)) == 7


def test_old_failures_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(tasks: Tasks) -> None:
        tasks.attempt("call", lambda: [][0])
        assert len(tasks.problems()) == 1
        monkeypatch.setattr(module, "SHOWN_S", 0.0)
        assert tasks.problems() == []
        assert tasks.failures() == {"call": 1}

    run(story)


@pytest.mark.parametrize(
    ("took_s", "used_s", "delay", "busy"),
    [
        (BEAT_S, BEAT_S, 0.001, 0.001),  # on time, however much it has done
        (BEAT_S + 0.09, 0.09, 0.1, 0.1),  # one turn that computed
        (BEAT_S + 0.09, 0.0, 0.1, 0.001),  # other programs had the processor
        (BEAT_S + 0.4, 0.03, 0.5, 0.035),
    ],
)
def test_turns_of_a_loop_are_measured(took_s: float, used_s: float, delay: float, busy: float) -> None:
    now = cpu = 0.0
    turns = LoopTurns(lambda: now, lambda: cpu)
    assert turns.interval_s() == BEAT_S
    now, cpu = took_s, used_s
    turns.interval_s()
    turns.beat()
    assert [bound for bound, count in zip(TURN_SECONDS, turns.delay.counts, strict=False) if count] == [delay]
    assert [bound for bound, count in zip(TURN_SECONDS, turns.busy.counts, strict=False) if count] == [busy]


def test_a_busy_loop_is_measured_more_often() -> None:
    now = cpu = 0.0
    turns = LoopTurns(lambda: now, lambda: cpu)
    found = [turns.interval_s()]
    for used_s in (BEAT_S * 0.8, BEAT_S * 0.8, BUSY_BEAT_S * 0.8, 0.0, 0.0):
        now, cpu = now + found[-1], cpu + used_s
        found.append(turns.interval_s())
        turns.beat()
    assert found == [BEAT_S, BEAT_S, BUSY_BEAT_S, BUSY_BEAT_S, BUSY_BEAT_S, BEAT_S]
    assert turns.delay.counts[0] == 5, "every beat was on time"
