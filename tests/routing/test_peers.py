"""Dispatchers of the same instances: what they tell each other, and what follows from it."""

from collections.abc import Callable

import msgspec

from pointsman.config import load_manifest
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS, IS_FULL, LOAD, Metrics
from pointsman.routing.events import Arrived, DispatcherCommand, Ended, FirstToken, Joined, Measured, Send
from pointsman.routing.peers import SILENCE_S, News, Peers
from pointsman.types import ExecutionInstance, RequestMetadata

MANIFEST = """
kind: Pointsman
deployments:
- name: m
  model: m
  endpoints: [{name: a, url: "http://127.0.0.1:9001"}, {name: b, url: "http://127.0.0.1:9002"}]
"""
SESSIONS = f"""{MANIFEST}  scheduling:
    config:
      plugins:
      - type: session-affinity-scorer
        parameters: {{strategy: session_id}}
      schedulingProfiles:
      - {{name: default, plugins: [{{pluginRef: session-affinity-scorer}}]}}
"""
PROMPT = "the train to the harbour leaves from platform nine " * 80


class Side:
    """A dispatcher, and what it knows of others. News goes over the wire as bytes."""

    def __init__(self, manifest: str = MANIFEST, limit: int | None = None) -> None:
        [plan] = load_manifest(manifest, "/").deployments
        self.now = 0.0
        self.dispatcher = Dispatcher(plan.dispatch_plan())
        self.sent: list[Send] = []
        self.peers = Peers(self.dispatcher, lambda event: self.take(self.dispatcher.handle(event, self.now)))
        for name in ("a", "b"):
            self.dispatcher.handle(
                Joined(ExecutionInstance(instance_id=name, model_name="m", max_concurrency=limit)), 0
            )
        self.peers.news(0.0)

    def take(self, commands: list[DispatcherCommand]) -> None:
        self.sent += [one for one in commands if isinstance(one, Send)]

    def arrive(self, name: str, prompt: str = "", **fields: object) -> str:
        """Where a request goes; empty if it waits."""
        request = RequestMetadata(name, prompt, model_name="m", arrival_time=self.now, **fields)  # type: ignore[arg-type]
        count = len(self.sent)
        self.take(self.dispatcher.handle(Arrived((request,)), self.now))
        return str(self.sent[-1].endpoint) if len(self.sent) > count else ""

    def tell(self, other: "Side", name: str = "other") -> News:
        news = msgspec.msgpack.decode(msgspec.msgpack.encode(self.peers.news(self.now)), type=News)
        other.peers.heard(name, news, other.now)
        return news

    def column(self, name: str) -> dict[str, float]:
        fleet = self.dispatcher.fleet
        return {str(one): float(fleet.load.columns[name][one.row]) for one in fleet.roster}


def test_the_load_of_a_peer_counts_and_is_not_sent_back() -> None:
    here, there = Side(), Side()
    where = there.arrive("r1", PROMPT)
    there.tell(here)
    assert here.column(IN_FLIGHT_REQUESTS)[where] == here.column(LOAD)[where] == 1
    assert here.column(IN_FLIGHT_TOKENS) == there.column(IN_FLIGHT_TOKENS)
    assert not here.peers.news(0.0), "it has sent nothing itself"
    assert here.arrive("r2", "something else") != where, "the other one is idle"
    there.dispatcher.handle(FirstToken("r1"), 1.0)
    there.tell(here)
    assert here.column(IN_FLIGHT_TOKENS)[where] == 0
    there.dispatcher.handle(Ended("r1", 1), 1.0)
    there.tell(here)
    assert here.column(IN_FLIGHT_REQUESTS)[where] == here.column(LOAD)[where] == 0


def test_only_changes_are_sent() -> None:
    here, there = Side(), Side()
    here.arrive("r1", PROMPT)
    first = here.tell(there)
    assert first.in_flight
    assert first.learned
    assert not here.tell(there)
    here.arrive("r2", PROMPT)
    again = here.tell(there)
    assert again.in_flight
    assert not again.learned, "the same prefix on the same instance"
    here.peers.begin_again()
    assert here.tell(there).in_flight == again.in_flight


def test_prefixes_of_another_are_found() -> None:
    here, there = Side(), Side()
    where = there.arrive("r1", PROMPT)
    there.dispatcher.handle(Ended("r1", 1), 0.5)
    there.tell(here)
    for number in range(5):
        assert here.arrive(f"q{number}", PROMPT + str(number)) == where
        here.dispatcher.handle(Ended(f"q{number}", 1), 1.0)


def test_sessions_of_another_are_kept() -> None:
    sides = [Side(SESSIONS) for _ in range(2)]
    for number in range(8):
        first, second = sides[number % 2], sides[1 - number % 2]
        headers = {"x-session-id": f"s{number}"}
        where = first.arrive(f"r{number}", headers=headers)
        first.tell(second)
        assert second.arrive(f"q{number}", headers=headers) == where


def test_a_request_waits_for_a_place_that_another_has_taken() -> None:
    here, there = Side(limit=1), Side(limit=1)
    assert {there.arrive("r1"), there.arrive("r2")} == {"a", "b"}
    there.tell(here)
    assert set(here.column(IS_FULL).values()) == {1.0}
    assert here.arrive("q1") == ""
    there.dispatcher.handle(Ended("r1", 1), 1.0)
    there.tell(here)
    assert [one.request.request_id for one in here.sent] == ["q1"], "it goes when the other says that there is room"


def _dropped(drop: Callable[[Side], None]) -> dict[str, float]:
    here, there = Side(), Side()
    there.arrive("r1", PROMPT)
    there.tell(here)
    here.arrive("q1", "mine")
    drop(here)
    return here.column(IN_FLIGHT_REQUESTS)


def test_one_that_ends_or_is_silent_counts_no_more() -> None:
    assert sum(_dropped(lambda side: None).values()) == 2
    assert sum(_dropped(lambda side: side.peers.gone("other")).values()) == 1
    assert sum(_dropped(lambda side: side.peers.expire(SILENCE_S)).values()) == 2
    assert sum(_dropped(lambda side: side.peers.expire(SILENCE_S + 0.1)).values()) == 1


def test_measurements_include_the_requests_of_others() -> None:
    here, there = Side(), Side()
    where = there.arrive("r1", PROMPT)
    there.tell(here)
    here.dispatcher.handle(Measured(where, Metrics(running_requests_size=1.0)), 1.0)
    assert here.column(LOAD)[where] == 1
    here.dispatcher.handle(Measured(where, Metrics(running_requests_size=4.0)), 2.0)
    assert here.column(LOAD)[where] == 4
