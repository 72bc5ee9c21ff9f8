"""Names that clients send: bounded where they arrive, and never repeated at length."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from pointsman.errors import UnknownName, nearest
from pointsman.routing.queue.items import FAIRNESS_ALIAS, FAIRNESS_HEADER
from pointsman.types import MAX_NAME
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.wire import HEALTH, Message, chat, post

IN_BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "model": lambda name: {"model": name},
    "cache_salt": lambda name: {"cache_salt": name},
    "tenant": lambda name: {"pointsman": {"tenant": name}},
    "session": lambda name: {"pointsman": {"session": name}},
    "priority": lambda name: {"pointsman": {"priority": name}},
}
IN_HEADERS = [
    "x-request-id",
    "x-pointsman-tenant",
    "x-pointsman-session",
    "x-pointsman-priority",
    "x-pointsman-deadline-ms",
    "x-session-id",
    "x-session-token",
    FAIRNESS_HEADER,
    FAIRNESS_ALIAS,
]
MAY_BE_LONG = [field for field in IN_BODIES if field not in ("model", "priority")]
"""Fields in which the longest name is served; as a model or a priority it would be unknown."""


def says_so(got: Message) -> None:
    assert got.status == 400
    assert str(MAX_NAME) in got.error["message"]
    assert len(got.body) < 1000


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses"])
@pytest.mark.parametrize("field", IN_BODIES)
def test_names_in_bodies_are_bounded(make_bed: MakeBed, field: str, path: bytes) -> None:
    bed = make_bed()
    backend = bed.backend()
    for length in (MAX_NAME + 1, 2_000_000):
        says_so(bed.fetch(post({"model": "m", "prompt": "x", **IN_BODIES[field]("n" * length)}, path)))
    assert (backend.received, bed.dispatcher().counters.arrived) == ([], 0)
    if field in MAY_BE_LONG:
        assert bed.fetch(post({"model": "m", **IN_BODIES[field]("n" * MAX_NAME)}, path)).status == 200


@pytest.mark.parametrize("header", IN_HEADERS)
def test_names_in_headers_are_bounded(make_bed: MakeBed, header: str) -> None:
    bed = make_bed()
    backend = bed.backend()
    for length in (MAX_NAME + 1, 50_000):
        says_so(bed.fetch(chat(f"{header}: {'1' * length}")))
    assert (backend.received, bed.dispatcher().counters.arrived) == ([], 0)
    if header not in ("x-pointsman-priority", "x-pointsman-deadline-ms"):
        assert bed.fetch(chat(f"{header}: {'1' * MAX_NAME}")).status == 200


@pytest.mark.parametrize("given", ["", "tab\there", "caf\xe9", "\x80"])
def test_a_request_id_that_cannot_be_used_is_refused(make_bed: MakeBed, given: str) -> None:
    """Replacing it silently would hide the request from `explain`."""
    bed = make_bed()
    backend = bed.backend()
    got = bed.fetch(chat(f"x-request-id: {given}"))
    assert (got.status, got.error["code"]) == (400, "invalid_header")
    assert "printable ASCII" in got.error["message"]
    assert backend.received == []


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v1/models/%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"n" * 50_000), 404),
        (b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"n" * 50_000), 404),
        (post({"model": "m", "pointsman": {"n" * 100_000: 1}}), 400),
        (post({"model": "m", "pointsman": {"priority": "n" * 100}}), 400),
        (post({"model": "m", "stream": "n" * 100_000}), 400),
        (post({"model": "n" * MAX_NAME}), 404),
    ],
    ids=["model in a path", "path", "unknown setting", "priority", "wrong type", "unknown model"],
)
def test_errors_repeat_a_bounded_part_of_what_came(make_bed: MakeBed, request_bytes: bytes, status: int) -> None:
    got = make_bed().fetch(request_bytes)
    assert got.status == status
    assert len(got.body) < 1000


def many_models(number: int, length: int = 12) -> dict[str, Any]:
    return {
        "name": "chat",
        "model": "m",
        "aliases": [f"{'model-' * (length // 6)}{n}" for n in range(number)],
        "endpoints": [{"url": "http://127.0.0.1:1"}],
    }


def test_the_nearest_name_is_found_among_many(make_bed: MakeBed) -> None:
    bed = make_bed({}, many_models(1000))
    assert 'did you mean "model-model-123"?' in bed.fetch(chat(model="Model-modl-123")).error["message"]
    message = bed.fetch(chat(model="something else")).error["message"]
    assert "and 951 more" in message


def delay_ms(bed: Bed, attack: bytes) -> float:
    """How long /health takes behind a request of an attack: the shortest of several times, which other processes of
    this machine disturb least."""
    attacker, watcher = bed.client(), bed.client()
    delays = []
    for _ in range(7):
        attacker.send(attack)
        began = time.perf_counter()
        assert watcher.fetch(HEALTH).status == 200
        delays.append(time.perf_counter() - began)
        attacker.read_response()
    return min(delays) * 1000


@pytest.mark.parametrize("length", [20, 100, MAX_NAME, 4_000_000], ids=str)
def test_an_unknown_model_costs_no_more_than_reading_it(make_bed: MakeBed, length: int) -> None:
    """A search through all names would take as long as reading hundreds of such requests. A name of 4 MB is refused
    before the search."""
    bed = make_bed({}, many_models(500, 60))
    bed.backend()
    name = ("model-" * (length // 6 + 1))[:length]
    known = delay_ms(bed, chat(model="m", messages=[{"role": "user", "content": "x" * length}]))
    unknown = delay_ms(bed, chat(model=name))
    assert unknown < 10 * known + 20


def test_memory_does_not_grow_with_the_names_of_clients(make_bed: MakeBed) -> None:
    bed = make_bed()
    bed.backend()
    requests = [
        *(chat(**{"model": "m", **fields("n" * 500_000)}) for fields in IN_BODIES.values()),
        *(chat(f"{header}: {'n' * 30_000}") for header in IN_HEADERS),
        *(post({"model": "m", **IN_BODIES[field]("n" * MAX_NAME)}) for field in MAY_BE_LONG),
    ]

    client = bed.client()

    def send_all() -> None:
        for one in requests:
            assert client.fetch(one).status in (200, 400)

    send_all()  # what is allocated once
    tracemalloc.start()
    try:
        for _ in range(10):
            send_all()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2_000_000, "170 requests, of which 50 were of 500 kB"


@pytest.mark.parametrize("length", [1, 50, 1000, 1_000_000])
def test_errors_about_unknown_names_are_short_and_quick(length: int) -> None:
    known = [f"{'known' * 10}-{number}" for number in range(10_000)]
    began = time.perf_counter()
    error = UnknownName("thing", "x" * length, known)
    assert len(str(error)) < 5000
    assert error.name == "x" * length
    assert time.perf_counter() - began < 5.0


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("lama", ["llama", "mistral"], "llama"),
        ("LLAMA", ["llama", "mistral"], "llama"),
        ("llama", ["Llama"], "Llama"),
        ("x", ["llama"], None),
        ("", ["llama"], None),
        ("llama", [], None),
        ("qwen3-8b", [*(f"other-{n}" for n in range(5000)), "qwen-3-8b"], "qwen-3-8b"),
        ("a" * 101, ["a" * 101], None),
    ],
)
def test_the_nearest_name(name: str, known: list[str], found: str | None) -> None:
    assert nearest(name, known) == found


def test_long_headers_that_a_plugin_is_told_to_read_are_not_kept(make_bed: MakeBed) -> None:
    """The names of such headers are the operator's: their values are served, and kept at a bounded length."""
    picker = {
        "plugins": [
            {
                "type": "session-affinity-scorer",
                "parameters": {"strategy": "session_id", "sessionIdConfig": {"sources": [{"header": "x-mine"}]}},
            }
        ],
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "session-affinity-scorer"}]}],
    }
    deployment = {
        "name": "chat",
        "model": "m",
        "endpoints": [{"url": "http://127.0.0.1:1"}],
        "scheduling": {"config": picker},
    }
    bed = make_bed({}, deployment)
    bed.backend()
    bed.backend()
    places = {bed.fetch(chat(f"x-mine: {'n' * 40_000}")).header("x-pointsman-instance") for _ in range(4)}
    assert len(places) == 1
    affinity = bed.lane().plan.picker.plugins["session-affinity-scorer"]  # type: ignore[union-attr]
    assert all(len(session) <= MAX_NAME for session in affinity._bindings._bindings)
    assert len(affinity._bindings) == 1
    assert json.dumps(bed.newest().as_dict(), default=str).count("n" * 1000) == 0


def test_headers_for_the_gateway_do_not_reach_engines(make_bed: MakeBed) -> None:
    """They may be secrets of the client, and an engine behind another gateway would obey them."""
    bed = make_bed()
    backend = bed.backend()
    ours = ["tenant: me", "secret: s", "priority: high", "session: s1", "caller: c", "Near: x", "traceback: 1", "x: y"]
    assert bed.fetch(chat(*(f"X-Pointsman-{line}" for line in ours), "x-other: kept")).status == 200
    names = {name.decode() for name, _ in backend.received[0].headers}
    assert not [name for name in names if name.startswith("x-pointsman-")]
    assert {"x-other", "x-session-id", "x-request-id"} <= names
