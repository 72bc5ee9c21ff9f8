"""Policies are called with a time limit: those of scaling on threads, those of scheduling in the loop."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pointsman.routing.user_code import Stalled
from pointsman.runtimes.policy_runner import PolicyRunner, Watchdog
from pointsman.scaling import TooSlow
from tests.runtimes.local.planes import run
from tests.runtimes.local.processes import eventually

LONG_S = 20.0


def test_the_result_of_a_call_is_returned() -> None:
    async def story() -> None:
        runner = PolicyRunner("m")
        assert await runner.run(lambda: 3, LONG_S) == 3
        assert await runner.run(lambda: "many", LONG_S) == "many"
        assert isinstance(await runner.run(lambda: 1 // 0, LONG_S), ZeroDivisionError)

        def leaves() -> object:
            raise SystemExit(3)

        assert isinstance(await runner.run(leaves, LONG_S), SystemExit)
        assert await runner.run(threading.get_ident, LONG_S) != threading.get_ident()

    run(story())


def test_a_policy_that_hangs_is_not_called_again() -> None:
    gate, calls = threading.Event(), []

    def hangs() -> int:
        calls.append(threading.get_ident())
        gate.wait()
        return 7

    async def story() -> None:
        runner = PolicyRunner("m")
        assert await runner.run(hangs, 0.01) == TooSlow(0.01)
        for _ in range(3):
            answer = await runner.run(hangs, 0.01)
            assert isinstance(answer, TooSlow)
        assert len(calls) == 1
        gate.set()
        done: list[object] = []

        async def again() -> bool:
            done.append(await runner.run(lambda: 5, LONG_S))
            return done[-1] == 5

        while not await again():  # the late answer itself counts for nothing
            await asyncio.sleep(0)
        assert 7 not in done

    run(story())


def test_a_late_answer_after_the_loop_is_closed() -> None:
    gate, over = threading.Event(), threading.Event()

    def hangs() -> None:
        gate.wait()
        over.set()

    async def story() -> None:
        await PolicyRunner("m").run(hangs, 0.01)

    run(story())
    gate.set()
    asyncio.run(eventually(over.is_set, "the thread has ended"))


# Scheduling code, in the loop


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    watchdog = Watchdog(time.monotonic)
    yield watchdog
    watchdog.close()
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_a_call_returns_and_how_long_it_took(watchdog: Watchdog) -> None:
    answer, taken_s = watchdog.call(LONG_S, lambda a, b: a + b, (1, 2))
    assert answer == 3
    assert 0 <= taken_s < LONG_S
    assert watchdog.call(LONG_S, lambda: (n for n in range(3)), ())[0] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        watchdog.call(LONG_S, lambda: 1 // 0, ())
    assert not watchdog.inside


def spin() -> None:
    while True:
        pass


def generate() -> Iterator[int]:
    time.sleep(LONG_S)
    yield 1


def persist() -> None:
    """It handles whatever comes, twice."""
    for _ in range(2):
        try:
            time.sleep(LONG_S)
        except BaseException:
            continue
    time.sleep(LONG_S)


def deadlock() -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


@pytest.mark.parametrize("blocks", [lambda: time.sleep(LONG_S), spin, deadlock, persist, generate])
def test_code_that_blocks_is_interrupted(watchdog: Watchdog, blocks: Any) -> None:
    began = time.monotonic()
    with pytest.raises(Stalled):
        watchdog.call(0.02, blocks, ())
    assert time.monotonic() - began < LONG_S
    assert not watchdog.inside


def test_no_exception_is_raised_outside_the_code_whenever_the_signal_comes(watchdog: Watchdog) -> None:
    """Calls about as long as the limit: each either ends or is interrupted, and nothing escapes."""
    ended = stalled = 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        busy_until = time.perf_counter() + 0.00099
        try:
            watchdog.call(0.001, _busy, (busy_until,))
            ended += 1
        except Stalled:
            stalled += 1
        assert not watchdog.inside
    assert ended + stalled > 50


def test_a_signal_that_comes_before_the_code_begins_interrupts_nothing(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that stands still while the timer is set."""

    def set_and_stand_still(which: int, seconds: float) -> None:
        monkeypatch.undo()
        time.sleep(2 * seconds)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(signal, "setitimer", set_and_stand_still)
    answer, _ = watchdog.call(0.001, lambda: 3, ())
    assert answer == 3
    assert not watchdog.inside


def _busy(until: float) -> None:
    while time.perf_counter() < until:
        pass


def test_in_another_thread_code_is_timed_and_not_interrupted() -> None:
    watchdog, results = Watchdog(time.monotonic), []
    thread = threading.Thread(target=lambda: results.append(watchdog.call(0.001, time.sleep, (0.05,))))
    thread.start()
    thread.join()
    [(_, taken_s)] = results
    assert taken_s >= 0.05
    assert watchdog.interrupts is False


def test_a_program_that_uses_the_signal_itself_keeps_it() -> None:
    fired = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: fired.set())
    try:
        watchdog = Watchdog(time.monotonic)
        watchdog.call(0.001, time.sleep, (0.05,))
        watchdog.close()
        assert not fired.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)
