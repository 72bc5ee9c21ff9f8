import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing import sessions
from pointsman.routing.filters import SessionAffinityFilter
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers import SessionAffinityScorer
from pointsman.routing.sessions import (
    Bindings,
    EncodedEndpointHeaderConfig,
    SessionAffinity,
    SessionIdConfig,
    SessionSource,
    decoded,
    encoded_id,
)
from pointsman.selection import SchedulingResult
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, fleet_of, kept, reasons, result_of, scene, scores

THREE = [Candidate()] * 3
POOL_1 = "cG9vbC8x"
"""pool/1"""


def go(plugin: SessionAffinity, cycle: RequestCycle, roster: Endpoints, target: int) -> None:
    plugin.dispatched(cycle, SchedulingResult({"default": result_of("default", roster, target)}, "default"))


@both_lengths
@pytest.mark.parametrize(
    ("headers", "bound"),
    [
        ({"x-session-token": POOL_1}, 1),
        ({}, None),
        ({"x-session-token": ""}, None),
        ({"x-session-token": "cG9vbC85"}, None),  # there is no pool/9
        ({"x-session-token": "not base64!"}, None),
        ({"x-session-token": "cG9vbC8xMA"}, None),  # padding is missing
        ({"x-session-token": "cG9v bC8x"}, None),
        ({"x-session-token": "cG9vbC8x===="}, None),
        ({"x-session-token": "/w=="}, None),  # not text
        ({"x-session-token": "pool/1"}, None),
        ({"x-session-id": POOL_1}, None),
    ],
)
def test_the_token_names_the_endpoint(headers: dict[str, str], bound: int | None, long: bool) -> None:
    cycle, roster = scene(THREE, long=long, headers=headers)
    assert scores(SessionAffinityScorer(), cycle, roster) == [float(place == bound) for place in range(3)]
    assert kept(SessionAffinityFilter(), cycle, roster) == ([0, 1, 2] if bound is None else [bound])


def test_the_reason_names_the_endpoint_of_the_session() -> None:
    cycle, roster = scene(THREE, headers={"x-session-token": POOL_1})
    assert reasons(SessionAffinityFilter(), cycle, roster) == ["session is elsewhere: on pool/1"] * 2


def test_an_empty_namespace_keeps_the_slash() -> None:
    rows = [Candidate(namespace=""), Candidate(namespace="")]
    cycle, roster = scene(rows, headers={"x-session-token": "LzE="})  # /1
    assert scores(SessionAffinityScorer(), cycle, roster) == [0.0, 1.0]


def test_responses_carry_the_token() -> None:
    endpoint, request = fleet_of(THREE)["1"], RequestMetadata("r")
    own = EncodedEndpointHeaderConfig(header="X-Mine")
    assert SessionAffinityScorer().response_headers(request, endpoint, {}) == {"x-session-token": POOL_1}
    plugin = SessionAffinityFilter(encoded_endpoint_header_config=own)
    assert plugin.response_headers(request, endpoint, {}) == {"x-mine": POOL_1}
    assert SessionAffinityFilter(strategy="session_id").response_headers(request, endpoint, {}) == {}


def test_only_the_configured_header_is_read() -> None:
    plugin = SessionAffinityScorer(encoded_endpoint_header_config=EncodedEndpointHeaderConfig(header="X-Mine"))
    assert scores(plugin, *scene(THREE, headers={"x-mine": POOL_1})) == [0.0, 1.0, 0.0]
    assert scores(plugin, *scene(THREE, headers={"x-session-token": POOL_1})) == [0.0] * 3


@given(st.text(min_size=1).filter(lambda text: text.isprintable()))
def test_tokens_can_be_read_back(name: str) -> None:
    endpoint = fleet_of([Candidate(namespace=name)])["0"]
    assert decoded(encoded_id(endpoint)) == endpoint.id


@both_lengths
def test_a_session_id_is_bound_by_its_first_dispatch(long: bool) -> None:
    fleet = fleet_of(THREE, long=long)
    scorer, supervisor = SessionAffinityScorer(strategy="session_id"), SessionAffinityFilter(strategy="session_id")
    cycle, roster = scene(THREE, fleet=fleet, headers={"x-session-id": "s"})
    assert scores(scorer, cycle, roster) == [0.0] * 3
    assert kept(supervisor, cycle, roster) == [0, 1, 2]
    for plugin in (scorer, supervisor):
        go(plugin, cycle, roster, 2)
        go(plugin, cycle, roster, 0)  # chosen against the session, which stays where it was
    assert scores(scorer, cycle, roster) == [0.0, 0.0, 1.0]
    assert kept(supervisor, cycle, roster) == [2]
    other_session, _ = scene(THREE, headers={"x-session-id": "t"})
    assert scores(scorer, other_session, roster) == [0.0] * 3


def test_a_session_moves_when_its_endpoint_could_not_be_chosen() -> None:
    plugin = SessionAffinityScorer(strategy="session_id")
    cycle, roster = scene(THREE, headers={"x-session-id": "s"})
    go(plugin, cycle, roster, 2)
    without = roster.without([2])
    assert scores(plugin, cycle, without) == [0.0, 0.0]
    go(plugin, cycle, without, 1)
    assert scores(plugin, cycle, roster) == [0.0, 1.0, 0.0]


def test_a_departed_endpoint_has_no_sessions() -> None:
    fleet = fleet_of(THREE)
    plugin = SessionAffinityScorer(strategy="session_id")
    cycle, roster = scene(THREE, fleet=fleet, headers={"x-session-id": "s"})
    go(plugin, cycle, roster, 2)
    plugin.departed(fleet["1"])
    assert plugin.bound_to(cycle) == "pool/2"
    plugin.departed(fleet["2"])
    assert plugin.bound_to(cycle) is None


def test_another_profile_may_bind() -> None:
    plugin = SessionAffinityScorer(strategy="session_id", profile_name="prefill")
    cycle, roster = scene(THREE, headers={"x-session-id": "s"})
    go(plugin, cycle, roster, 0)
    assert plugin.bound_to(cycle) is None
    results = {"default": result_of("default", roster, 0), "prefill": result_of("prefill", roster, 1)}
    plugin.dispatched(cycle, SchedulingResult(results, "default"))
    assert plugin.bound_to(cycle) == "pool/1"


@pytest.mark.parametrize(
    ("request_", "session"),
    [
        (RequestMetadata("r", headers={"x-chat": "c", "x-session-id": "s"}, user_id="u"), "c"),
        (RequestMetadata("r", headers={"x-chat": "  ", "x-session-id": "s"}, user_id="u"), "u"),
        (RequestMetadata("r", headers={"x-session-id": "s"}), "s"),
        (RequestMetadata("r"), None),
    ],
)
def test_the_first_source_that_is_not_blank_wins(request_: RequestMetadata, session: str | None) -> None:
    sources = (SessionSource(header="X-Chat"), SessionSource(attribute="user_id"), SessionSource(header="x-session-id"))
    plugin = SessionAffinityScorer(strategy="session_id", session_id_config=SessionIdConfig(sources))
    cycle, roster = scene(THREE, request=request_)
    go(plugin, cycle, roster, 1)
    bound = {one: plugin.bound_to(scene(THREE, headers={"x-chat": one})[0]) for one in ("c", "u", "s")}
    assert bound == {one: "pool/1" if one == session else None for one in bound}


@pytest.mark.parametrize(
    ("config", "now", "bound"),
    [
        (SessionIdConfig(), 299.9, "pool/1"),
        (SessionIdConfig(), 300.0, None),
        (SessionIdConfig(eviction_ttl_seconds=5), 4.9, "pool/1"),
        (SessionIdConfig(eviction_ttl_seconds=5), 5.0, None),
        (SessionIdConfig(eviction_ttl_seconds=0), 299.9, "pool/1"),
    ],
)
def test_unused_sessions_are_forgotten(config: SessionIdConfig, now: float, bound: str | None) -> None:
    plugin = SessionAffinityScorer(strategy="session_id", session_id_config=config)
    go(plugin, *scene(THREE, headers={"x-session-id": "s"}), 1)
    assert plugin.bound_to(scene(THREE, headers={"x-session-id": "s"}, now=now)[0]) == bound


def test_use_renews_a_session_and_sweeps_remove_the_others() -> None:
    bindings = Bindings(ttl=10.0, sweep=4.0)
    bindings.bind("a", "/1", now=0.0)
    bindings.bind("b", "/1", now=3.0)
    bindings.bind("a", "/1", now=9.0)
    bindings.bind("c", "/1", now=13.5)
    assert [bindings.endpoint_of(one, 13.5) for one in "abc"] == ["/1", None, "/1"]
    assert len(bindings) == 2


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    bindings = Bindings(ttl=10.0, sweep=10.0)
    for session in "abc":
        bindings.bind(session, "/1", now=0.0)
    assert [bindings.endpoint_of(one, 0.0) for one in "abc"] == [None, "/1", "/1"]


def test_an_unknown_strategy_is_an_error() -> None:
    with pytest.raises(ValueError, match='strategy is "sticky"; it must be encoded_endpoint_header or session_id'):
        SessionAffinityFilter(strategy="sticky")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SessionSource(), "each source must be exactly one of them"),
        (SessionSource(header="h", attribute="user_id"), 'has header "h" and attribute "user_id"'),
        (SessionSource(attribute="mood"), 'has attribute "mood"; it must be one of user_id'),
    ],
)
def test_bad_sources(source: SessionSource, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SessionAffinityScorer(strategy="session_id", session_id_config=SessionIdConfig((source,)))
