"""Shared memory on several nodes: mapped within one, sent between two. Real replicas, without Ray."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.pipeline.graph import CALL
from pointsman.runtimes.machine.memory import NodeMemory
from pointsman.wire import (
    CallHead,
    Fetcher,
    FilesOfNodes,
    SharedBuffers,
    composed,
    decode_value,
    encode_call,
    encode_value,
    files_of,
    placeholder,
    template,
)
from tests.replica.replicas import SECRET, Replica, Response, replica

CODE = """
import numpy
def make(count): return numpy.arange(count, dtype=float)
def total(array): return float(array.sum())
"""
COUNT = 1_000_000
TOTAL = float(np.arange(COUNT, dtype=float).sum())


def on_two_nodes(folder: Path, story: Callable[[NodeMemory, NodeMemory], Any]) -> None:
    async def run() -> None:
        memories = []
        for name in ("n1", "n2"):
            (folder / name).mkdir()
            memories.append(NodeMemory(folder / name, name, "127.0.0.1"))
            memories[-1].secret = SECRET.encode()
            await memories[-1].open(is_used=False)
        try:
            await story(*memories)
        finally:
            for one in memories:
                one.close()
                shutil.rmtree(one.environment["POINTSMAN_SHM"], ignore_errors=True)

    asyncio.run(run())


def buffers(memory: NodeMemory) -> SharedBuffers:
    return SharedBuffers(memory.environment["POINTSMAN_SHM"], memory.environment["POINTSMAN_MEMORY"])


def passed_on(blob: bytes, to: Replica) -> Response:
    """As the gateway passes a value on, without decoding it."""
    return to.fetch("POST", "/call", encode_call(CallHead(method=CALL, args=template([placeholder(0)])), [blob]))


def files_in(memory: NodeMemory) -> set[str]:
    found = Path(memory.environment["POINTSMAN_SHM"]).iterdir()
    return {one.name for one in found if not one.name.startswith(".")}


def test_arrays_stay_in_memory_on_a_node_and_are_sent_to_another(tmp_path: Path) -> None:
    async def story(first: NodeMemory, second: NodeMemory) -> None:
        (tmp_path / "app.py").write_text(CODE)
        sender: dict[str, Any] = {"code": "app.py:make", "kind": "function"}
        receiver: dict[str, Any] = {"code": "app.py:total", "kind": "function"}

        def run() -> tuple[bytes, list[Any]]:
            with (
                replica(tmp_path, first.environment, **sender) as maker,
                replica(tmp_path, first.environment, **receiver) as beside,
                replica(tmp_path, second.environment, **receiver) as elsewhere,
            ):
                blob = maker.call(CALL, COUNT).body
                totals = [passed_on(blob, beside).value(), passed_on(blob, elsewhere).value()]
                first.secret = b"another"
                totals.append(passed_on(blob, beside).value())  # mapped: no server is asked
                refused = passed_on(blob, elsewhere)
                totals.append((refused.status, "x-pointsman-secret" in str(refused.json())))
                first.secret = SECRET.encode()
                maker.process.kill()
                maker.process.wait()
                totals.append(passed_on(blob, elsewhere).value())  # the value outlives its sender
                return blob, totals

        blob, totals = await asyncio.to_thread(run)
        assert totals == [TOTAL, TOTAL, TOTAL, (503, True), TOTAL]
        name = files_of(blob)
        assert name is not None
        assert len(blob) < 1000, "the gateway sees no array"
        assert files_in(first) == {name.partition("@")[0]}
        assert files_in(second) == set()
        FilesOfNodes(SECRET).remove([name])
        while files_in(first):
            await asyncio.sleep(0.005)

    on_two_nodes(tmp_path, story)


def test_values_made_of_several_are_fetched_from_each_node(tmp_path: Path) -> None:
    async def story(first: NodeMemory, second: NodeMemory) -> None:
        here, there = buffers(first), buffers(second)
        array = np.arange(100_000, dtype=float)
        parts = [encode_value((number, array), shared) for number, shared in ((1, here), (2, there))]
        both = composed([placeholder(0), placeholder(1)], parts)
        fetcher = Fetcher(here, SECRET)
        away = fetcher.elsewhere([both])
        assert [one.home.partition(" ")[0] for one in away] == ["n2"]
        values = decode_value(both, await fetcher.source(away))
        assert [number for number, _ in values] == [1, 2]
        assert all(np.array_equal(got, array) for _, got in values)
        assert fetcher.elsewhere([encode_value(array, here), encode_value(3)]) == []
        for one in (here, there):
            one.close()

    on_two_nodes(tmp_path, story)


def test_a_server_that_starts_again_keeps_its_address_and_what_is_in_use(tmp_path: Path) -> None:
    async def story(first: NodeMemory, _: NodeMemory) -> None:
        sender = buffers(first)
        blob = encode_value(np.zeros(100_000), sender)
        home = sender.home
        assert first._http is not None
        first._http.stop_listening()  # the actor has died
        again = NodeMemory(tmp_path / "n1", "n1", "127.0.0.1")
        await again.open(is_used=True)
        assert sender.home == home
        assert files_in(again) == {str(files_of(blob)).partition("@")[0]}
        sender.close()
        again.close()
        assert not Path(again.environment["POINTSMAN_SHM"]).exists()

    on_two_nodes(tmp_path, story)
