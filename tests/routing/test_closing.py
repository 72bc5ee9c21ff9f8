"""Silent instances on virtual time: found within a second, never while they answer, and opened when they are heard."""

from collections.abc import Iterable

import pytest

from pointsman.reasons import Reason
from pointsman.routing.closing import ANSWER_S, LOOK_S, MAX_QUIET_S, Silences
from pointsman.routing.events import Arrived, Changed, Ended, FirstToken, HeardAgain, Joined, Paused, Send, Silenced
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.routing.test_dispatcher import fifo, instance, request

REFUSED = Reason("refused", {"text": "it answered 429"})
SILENT = Reason("silent", {"quiet_s": 0.8, "unanswered_s": 0.5, "usual_s": 0.05})


class Fleet:
    """Instances that have requests all the time, and what a gateway sees of them."""

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.silences = Silences()
        self.members = list(names)
        self.frozen: set[str] = set()
        """They let nothing hear."""
        self.thinking: set[str] = set()
        """They send no byte, and answer probes."""
        self.idle: set[str] = set()
        self.asked: dict[str, int] = {}
        self.closed: dict[str, float] = {}
        """When they went silent."""
        self.waiting: set[str] = set()
        """Probes that are not answered yet."""
        self.run(1.0)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step(LOOK_S)

    def step(self, seconds: float) -> None:
        self.now += seconds
        busy = [name for name in self.members if name not in self.idle]
        heard = [name for name in busy if name not in self.frozen | self.thinking]
        open_ = [name for name in self.members if name not in self.closed]
        found = self.silences.look(self.now, self.members, busy, heard, open_)
        for name in found.heard:
            del self.closed[name]
        for name, why in found.silent:
            assert why.code == "silent"
            self.closed[name] = self.now
        for name in found.asked:
            self.asked[name] = self.asked.get(name, 0) + 1
            self.waiting.add(name)
        for name in self.waiting - self.frozen:
            self.silences.answered(name, self.now + 0.001)
        self.waiting &= self.frozen


def test_an_instance_that_freezes_is_silent_within_a_second() -> None:
    fleet = Fleet("a", "b")
    began = fleet.now
    fleet.frozen = {"a"}
    fleet.run(2.0)
    assert fleet.closed.keys() == {"a"}
    assert fleet.closed["a"] - began <= 1.0
    fleet.frozen = set()
    fleet.step(LOOK_S)
    assert fleet.closed == {}, "its bytes open it"


def test_a_silent_instance_without_requests_is_probed_and_opens_when_it_answers() -> None:
    fleet = Fleet("a", "b")
    fleet.frozen = {"a"}
    fleet.run(1.5)
    fleet.idle = {"a"}
    fleet.run(5.0)
    assert fleet.closed.keys() == {"a"}
    fleet.frozen = set()
    fleet.run(2 * LOOK_S)
    assert fleet.closed == {}


def test_a_probe_that_ends_unanswered_is_made_again() -> None:
    fleet = Fleet("a", "b")
    fleet.frozen = {"a"}
    fleet.run(1.5)
    for _ in range(4):
        fleet.waiting.clear()
        fleet.silences.unanswered("a", fleet.now)
        fleet.run(1.0)
    assert fleet.asked == {"a": 5}
    assert fleet.closed.keys() == {"a"}


def test_an_engine_that_thinks_for_long_is_never_silent_and_seldom_probed() -> None:
    fleet = Fleet("a", "b")
    fleet.thinking = {"a"}
    fleet.run(600.0)
    assert fleet.closed == {}
    assert fleet.asked["a"] <= 2 + 600 / MAX_QUIET_S
    began, fleet.frozen = fleet.now, {"a"}
    fleet.run(3.0)
    assert fleet.closed["a"] - began <= MAX_QUIET_S + ANSWER_S + 3 * LOOK_S, "also if it freezes while it thinks"


def test_a_server_that_answers_nothing_while_it_works_is_known_by_its_own_times() -> None:
    fleet = Fleet("a", "b")
    fleet.frozen = {"a"}
    fleet.run(2.0)
    assert fleet.closed.keys() == {"a"}, "for the first time, it looks frozen"
    for _ in range(20):
        fleet.frozen = set()
        fleet.run(0.2)
        assert fleet.closed == {}
        fleet.frozen = {"a"}
        fleet.run(2.0)
        assert fleet.closed == {}
    fleet.run(10.0)
    assert fleet.closed.keys() == {"a"}, "several times as long as usual"


@pytest.mark.parametrize("frozen", [{"a"}, {"a", "b"}, {"a", "b", "c"}])
def test_the_last_instance_that_may_live_is_not_closed(frozen: set[str]) -> None:
    fleet = Fleet("a", "b", "c")
    fleet.frozen = frozen
    fleet.run(10.0)
    assert fleet.closed.keys() == (frozen if len(frozen) < 3 else set()), "if all are silent, it may be the gateway"


def test_an_instance_that_was_never_heard_is_not_judged() -> None:
    fleet = Fleet("b")
    fleet.members.append("a")
    fleet.frozen = {"a"}
    fleet.run(10.0)
    assert (fleet.closed, fleet.asked) == ({}, {})


def test_time_in_which_the_gateway_did_not_look_does_not_count() -> None:
    fleet = Fleet("a", "b")
    fleet.thinking = {"a"}
    fleet.run(0.4)
    fleet.frozen = {"a"}
    for _ in range(10):
        fleet.step(5.0)
        assert fleet.closed == {}


def test_a_probe_that_could_not_be_made_proves_nothing() -> None:
    fleet = Fleet("a", "b")
    fleet.frozen = {"a"}
    for _ in range(200):
        fleet.step(LOOK_S)
        if fleet.waiting:
            fleet.waiting.clear()
            fleet.silences.unanswered("a", fleet.now, unmade=True)
    assert fleet.asked["a"] > 5
    assert fleet.closed == {}


def test_few_probes_are_begun_at_once() -> None:
    names = [f"i-{number}" for number in range(100)]
    fleet = Fleet(*names)
    fleet.thinking = set(names)
    fleet.run(1.0)
    assert sum(fleet.asked.values()) <= 40
    fleet.run(5.0)
    assert fleet.asked.keys() == set(names), "those that were quiet for longest first"


def sent(commands: Iterable[object]) -> dict[str, str]:
    return {one.request.request_id: str(one.endpoint) for one in commands if isinstance(one, Send)}


def test_what_has_not_begun_goes_elsewhere_and_the_rest_stays() -> None:
    dispatcher = fifo(instance("a", 3), instance("b", 3, can_accept_request=False), max_tries=2)
    for name in ("begun", "fixed", "movable"):
        assert sent(dispatcher.handle(Arrived((request(name),)), 1.0)) == {name: "a"}
    dispatcher.handle(Changed(instance("b", 3)), 1.1)
    dispatcher.handle(FirstToken("begun"), 1.2)
    moved = dispatcher.handle(Silenced("a", SILENT, ("begun", "movable")), 2.0)
    assert sent(moved) == {"movable": "b"}
    assert sent(dispatcher.handle(Arrived((request("next"),)), 2.1)) == {"next": "b"}
    assert {str(hold.endpoint) for name in ("begun", "fixed") for hold in dispatcher.ledger.holds(name)} == {"a"}
    again = dispatcher.handle(Silenced("b", SILENT, ("movable", "next")), 2.2)
    assert sent(again) == {}, "one has no tries left, and for the other there is no instance"
    assert dispatcher.ledger.holds("movable"), "it stays"
    assert [one.request_id for one in dispatcher.waiting()] == ["next"]
    back = dispatcher.handle(HeardAgain("a"), 3.0)
    assert sent(back) == {"next": "a"}
    for name in ("begun", "fixed", "movable", "next"):
        dispatcher.handle(Ended(name), 4.0)
    assert (len(dispatcher), len(dispatcher.ledger)) == (0, 0)


def test_reasons_name_a_silent_instance_and_updates_do_not_open_it() -> None:
    dispatcher = fifo(instance("a", 1), instance("b", 1, can_accept_request=False))
    dispatcher.handle(Silenced("a", SILENT), 1.0)
    dispatcher.handle(Changed(instance("a", 2)), 1.1)
    assert sent(dispatcher.handle(Arrived((request("r"),)), 1.2)) == {}
    record = dispatcher.explain("r", 1.3)
    assert record is not None
    assert record.failure is not None
    assert "silent" in str(record.failure.reason.facts)
    assert dispatcher.counters.closed["a", "silent"] == 1
    assert sent(dispatcher.handle(HeardAgain("a"), 1.4)) == {"r": "a"}


def test_a_pause_and_silence_do_not_open_what_the_other_has_closed() -> None:
    dispatcher = fifo(instance("a", 5), instance("b", 5, can_accept_request=False))
    dispatcher.handle(Paused("a", 2.0, REFUSED), 1.0)
    dispatcher.handle(Silenced("a", SILENT), 1.1)
    dispatcher.handle(Joined(ExecutionInstance(instance_id="c", model_name="other")), 3.0)
    assert sent(dispatcher.handle(Arrived((RequestMetadata("r", "hello", model_name="m"),)), 3.1)) == {}
    assert sent(dispatcher.handle(HeardAgain("a"), 3.2)) == {"r": "a"}
    dispatcher.handle(Silenced("a", SILENT), 4.0)
    dispatcher.handle(Paused("a", 9.0, REFUSED), 4.1)
    assert dispatcher.fleet["a"].closed == SILENT
    dispatcher.handle(HeardAgain("a"), 4.2)
    assert sent(dispatcher.handle(Arrived((request("later"),)), 4.3)) == {"later": "a"}
