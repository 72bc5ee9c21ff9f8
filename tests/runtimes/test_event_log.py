"""The log of events: numbered, bounded, stored, and read back by the next plane."""

from collections.abc import Iterable

from pointsman.control.events import PhaseChange
from pointsman.reasons import Reason
from pointsman.runtimes.event_log import KEPT, EventLog

READY = PhaseChange("chat", "chat-1", "starting", "ready", None)
CRASHED = PhaseChange("chat", "chat-1", "ready", "backing off", Reason("exited", {"why": "exit code 1"}))


class Lines:
    """A store in memory."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []

    def lines(self, limit: int) -> list[bytes]:
        return self.stored[-limit:]

    def append(self, lines: Iterable[bytes]) -> None:
        self.stored += lines

    def problems(self) -> list[Reason]:
        return []

    async def close(self) -> None: ...


def log() -> EventLog:
    return EventLog(lambda: 1_700_000_000.0)


def test_an_event_says_when_what_and_why() -> None:
    events = log()
    events.note_phase(CRASHED)
    [event] = events.since(0, 10)
    assert (event["number"], event["at"], event["deployment"]) == (1, "2023-11-14T22:13:20.000+00:00", "chat")
    assert (event["code"], event["text"]) == ("phase-changed", "chat-1: ready -> backing off: exit code 1")
    assert event["facts"]["why"]["code"] == "exited"


def test_only_events_after_a_number_and_of_a_deployment_are_listed() -> None:
    events = log()
    events.note_phase(READY)
    events.note("", Reason("documents-changed", {"changes": "open chat", "generation": 2}))
    events.note_phase(CRASHED)
    assert [one["number"] for one in events.since(1, 10)] == [2, 3]
    assert [one["number"] for one in events.since(0, 10, "chat")] == [1, 3]
    assert [one["number"] for one in events.since(0, 1)] == [3]
    assert events.since(3, 10) == events.since(0, 0) == []


def test_phases_are_counted_by_cause_until_their_deployment_is_gone() -> None:
    events = log()
    for _ in range(3):
        events.note_phase(READY)
        events.note_phase(CRASHED)
    assert events.phases == {("chat", "ready", ""): 3, ("chat", "backing off", "exited"): 3}
    events.forget({"other"})
    assert not events.phases


def test_memory_is_bounded() -> None:
    events = log()
    for _ in range(KEPT + 10):
        events.note_phase(READY)
    assert [one["number"] for one in events.since(0, KEPT * 2)] == list(range(11, KEPT + 11))


def test_the_next_plane_goes_on_counting() -> None:
    store, first = Lines(), log()
    first.open(store)
    first.note_phase(READY)
    first.note_phase(CRASHED)
    store.stored.append(b'{"number": 3, "at"')  # cut off by a kill
    second = log()
    second.note_phase(READY)  # before the store is open
    second.open(store)
    second.note_phase(CRASHED)
    assert [one["number"] for one in second.since(0, 10)] == [1, 2, 3, 4]
    third = log()
    third.open(store)
    assert third.since(0, 10) == second.since(0, 10)


def test_followers_hear_of_each_event() -> None:
    events, heard = log(), list[int]()
    events.followers.append(lambda: heard.append(len(events.since(0, 10))))
    events.note_phase(READY)
    events.note_phase(CRASHED)
    assert heard == [1, 2]
