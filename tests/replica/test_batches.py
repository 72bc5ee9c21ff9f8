"""Batches: concurrent calls are collected, and each gets its own result."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.replica.replicas import Replica, Response, last_line, replica, until
from tests.simulator.servers import TIMEOUT_S

CODE = """
import asyncio, time
import pointsman as pm

class Model:
    def __init__(self): self.sizes = []
    @pm.batch(max_batch_size=4, wait_ms=200)
    def plain(self, xs):
        self.sizes.append(len(xs))
        return [x * 2 for x in xs]
    @pm.batch(max_batch_size=4, wait_ms=200)
    async def later(self, xs, ys, *, scale):
        self.sizes.append(len(xs))
        await asyncio.sleep(0)
        return [(x + y) * s for x, y, s in zip(xs, ys, scale)]
    @pm.batch(max_batch_size=3, wait_ms=200)
    def fails(self, xs): raise ValueError(f"{len(xs)} at once")
    @pm.batch(max_batch_size=3, wait_ms=200)
    def forgets(self, xs): return xs[1:]
    @pm.batch(max_batch_size=100, wait_ms=0)
    def busy(self, xs):
        self.sizes.append(len(xs))
        time.sleep(0.3)
        return xs
    @pm.batch(max_batch_size=2, wait_ms=5000)
    async def hangs(self, xs):
        self.sizes.append(len(xs))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.sizes.append("cancelled")
            raise
    @pm.batch
    def defaults(self, xs): return xs
    def sizes_so_far(self):
        sizes, self.sizes = self.sizes, []
        return sizes
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Replica]:
    (tmp_path / "m.py").write_text(CODE)
    with replica(tmp_path, code="m.py:Model", threads=2) as running:
        yield running


def at_once(model: Replica, method: str, calls: list[tuple[Any, ...]], **head: Any) -> list[Response]:
    answers: dict[int, Response] = {}

    def fetch(index: int) -> None:
        answers[index] = model.call(method, *calls[index], **head)

    threads = [threading.Thread(target=fetch, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return [answers[index] for index in range(len(calls))]


def test_concurrent_calls_are_batched(model: Replica) -> None:
    answers = at_once(model, "plain", [(index,) for index in range(8)])
    assert [answer.value() for answer in answers] == [index * 2 for index in range(8)]
    assert model.value("sizes_so_far") == [4, 4]
    assert model.value("plain", 5) == 10  # alone, it runs after the timeout
    assert model.value("sizes_so_far") == [1]
    assert model.value("defaults", "x") == "x"


def test_several_arguments_and_async_code(model: Replica) -> None:
    answers = at_once(model, "later", [(1, 2), (3, 4), (5, 6), (7, 8)], kwargs={"scale": 10})
    assert [answer.value() for answer in answers] == [30, 70, 110, 150]
    assert model.value("sizes_so_far") == [4]


def test_calls_with_different_arguments_are_not_batched(model: Replica) -> None:
    answers = at_once(model, "plain", [(1,), (1, 2), (3,)])
    assert [answer.status for answer in answers] == [200, 500, 200]
    assert "argument" in answers[1].json()["message"]


def test_an_error_fails_the_batch(model: Replica) -> None:
    answers = at_once(model, "fails", [(1,), (2,), (3,)])
    assert [answer.json()["message"] for answer in answers] == ["3 at once"] * 3


def test_a_batch_must_return_a_result_for_each_call(model: Replica) -> None:
    for answer in at_once(model, "forgets", [(1,), (2,), (3,)]):
        assert answer.json()["message"] == "forgets was given a batch of 3 calls and returned 2 results"


def test_abandoned_calls_are_left_out_and_the_next_batch_fills_while_one_runs(model: Replica) -> None:
    with model.send("busy", 0):
        until(lambda: model.value("sizes_so_far") == [1])
        gone = model.send("busy", 1)
        gone.close()
        answers = at_once(model, "busy", [(index,) for index in range(5)])
    assert [answer.value() for answer in answers] == list(range(5))
    assert model.value("sizes_so_far") == [5]


def test_a_batched_call_can_miss_its_deadline(model: Replica) -> None:
    with model.send("busy", 0):
        until(lambda: model.value("sizes_so_far") == [1])
        assert model.call("busy", 1, deadline_s=0.05).status == 504


def test_a_batch_is_cancelled_when_its_last_call_is(model: Replica) -> None:
    seen: list[Any] = []

    def is_recorded(what: Any) -> bool:
        seen.extend(model.value("sizes_so_far"))
        return what in seen

    with model.send("hangs", 0):
        with model.send("hangs", 1):
            until(lambda: is_recorded(2))
        assert not is_recorded("cancelled")
        assert model.fetch("GET", "/health").status == 200
    until(lambda: is_recorded("cancelled"))
    assert model.value("plain", 1) == 2


def test_generators_cannot_be_batched(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import pointsman as pm\nclass Model:\n    @pm.batch\n    def words(self, xs):\n        yield xs\n"
    )
    assert last_line(tmp_path, code="m.py:Model").endswith("node.words is a generator; generators cannot take batches")
