"""Live traffic as a recording: what is written, what is not, and when it ends."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pointsman.errors import PointsmanError
from pointsman.reasons import Reason
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.events import Arrived, Ended, Failed, Joined
from pointsman.runtimes.recording import BLOCK_BYTES, LEASE_S, Recorder, RecordingLease, block_ids
from pointsman.strategies import FIFOPolicy
from pointsman.strategies.dispatching import plan_for
from pointsman.types import ExecutionInstance, RequestMetadata

SALT = "00" * 16


class Bed:
    """One lane, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.at, self.timers = 100.0, list[tuple[float, Callable[..., None]]]()
        self.dispatcher = Dispatcher(plan_for(FIFOPolicy()))
        self.plain = dict(self.dispatcher._handlers)
        self.dispatcher.handle(Joined(ExecutionInstance(instance_id="a")), self.at)
        plan = SimpleNamespace(internal=False, names=("m",))
        lanes: Any = SimpleNamespace(lanes={"chat": SimpleNamespace(plan=plan, dispatcher=self.dispatcher)})
        self.recorder = Recorder(lanes, self)

    def now(self) -> float:
        return self.at

    def call_at(self, at: float, call: Callable[..., None], *args: Any) -> Any:
        entry = (at, call)
        self.timers.append(entry)
        return SimpleNamespace(cancel=lambda: self.timers.remove(entry))

    def call_soon(self, call: Callable[..., None], *args: Any) -> Any:
        raise NotImplementedError

    def serve(self, name: str, prompt: str, **about: Any) -> None:
        request = RequestMetadata(name, prompt.encode(), model_name="", arrival_time=self.at, **about)
        self.dispatcher.handle(Arrived((request,)), self.at)
        self.dispatcher.handle(Ended(name, 7), self.at + 1)


def lease(**fields: Any) -> RecordingLease:
    return RecordingLease("one", SALT, 100.0, **fields)


def test_lengths_and_hashes_are_written_and_no_text() -> None:
    bed = Bed()
    bed.recorder.read(lease())
    bed.at = 101.5
    shared = "secret " * 1000
    bed.serve("r1", shared, user_id="ada", headers={"x-session-id": "s1"}, slo_deadline_ms=500.0)
    bed.serve("r2", shared + "more")
    first, second = bed.recorder.read(lease()).lines
    assert (first.timestamp, first.input_length, first.output_length, first.slo_ms) == (1500, 1750, 7, 500.0)
    assert len(first.hash_ids) == -(-len(shared) // BLOCK_BYTES)
    assert first.hash_ids[:-1] == second.hash_ids[: len(first.hash_ids) - 1]
    assert first.hash_ids[-1] != second.hash_ids[len(first.hash_ids) - 1]
    written = msgspec.json.encode([first, second])
    assert b"secret" not in written
    assert b"ada" not in written
    assert b"s1" not in written


def test_another_salt_gives_other_hashes() -> None:
    request = RequestMetadata("r", b"x" * 5000)
    assert not set(block_ids(request, b"a" * 16)) & set(block_ids(request, b"b" * 16))


def test_requests_that_are_not_served_are_left_out_and_counted() -> None:
    bed = Bed()
    bed.recorder.read(lease())
    bed.dispatcher.handle(Arrived((RequestMetadata("r1", arrival_time=100.0),)), 100.0)
    bed.dispatcher.handle(Failed("r1", Reason("broken"), retry=False), 100.0)
    bed.dispatcher.handle(Arrived((RequestMetadata("r2", arrival_time=100.0),)), 100.0)
    part = bed.recorder.read(lease(stop=True))
    assert (part.lines, part.left_out, part.unfinished) == ([], 1, 1)


@pytest.mark.parametrize("how", ["stopped", "not read"])
def test_nothing_is_left_of_a_recording_that_has_ended(how: str) -> None:
    bed = Bed()
    bed.recorder.read(lease())
    assert bed.dispatcher._handlers[Arrived] is not bed.plain[Arrived]
    if how == "stopped":
        bed.recorder.read(lease(stop=True))
    else:
        [(at, end)] = bed.timers
        assert at == 100.0 + LEASE_S
        end()
    assert bed.dispatcher._handlers[Arrived].__name__ == "arrived"
    assert bed.dispatcher._journal.listener is None
    bed.serve("r1", "hello")
    assert bed.recorder.read(msgspec.structs.replace(lease(), id="two")).lines == []


def test_one_recording_at_a_time() -> None:
    bed = Bed()
    bed.recorder.read(lease())
    with pytest.raises(PointsmanError, match="another recording"):
        bed.recorder.read(msgspec.structs.replace(lease(), id="two"))
