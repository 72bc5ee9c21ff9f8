"""Policies are called on threads, with a time limit."""

import asyncio
import threading

from pointsman.runtimes.policy_runner import PolicyRunner
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
