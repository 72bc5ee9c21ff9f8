"""The usage of streams is counted, whether the client asked for it or not, and only who asked gets it."""

import json
from typing import Any

import pytest

from pointsman.gateway.openai import without_usage
from tests.gateway.backends import DONE, BackendConnection, answer, answers, event, stream
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, MakeBed, plan_of
from tests.gateway.wire import chat, post, wait_for
from tests.live.manifests import hashed

EVENTS = [event(n) for n in range(3)]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":40,"total_tokens":47}}\n\n'
SPACED = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 40}}\r\n\r\n'
ASKED: Any = {"stream_options": {"include_usage": True}}


def used(bed: Bed) -> dict[str, int]:
    return bed.gateway.metrics.of("chat").tokens()


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions"])
@pytest.mark.parametrize("usage", [USAGE, SPACED])
@pytest.mark.parametrize("together", [False, True])
def test_usage_is_counted_and_kept_from_a_client_that_did_not_ask(
    bed: Bed, path: bytes, usage: bytes, together: bool
) -> None:
    parts = [*EVENTS, usage, DONE]
    backend = bed.backend(answers(stream(b"".join(parts)) if together else stream(*parts)))
    got = bed.fetch(post({"model": "m", "prompt": "x", "stream": True}, path))
    assert got.body == b"".join((*EVENTS, DONE))
    assert json.loads(backend.received[0].body) == {"model": "m", "prompt": "x", "stream": True, **ASKED}
    wait_for(lambda: used(bed) == {"input": 7, "output": 40, "cached": 0})
    assert bed.newest().output_tokens == 40


def test_a_client_that_asked_gets_it_and_its_body_stays_as_it_is(bed: Bed) -> None:
    backend = bed.backend(answers(stream(*EVENTS, USAGE, DONE)))
    request = chat(stream=True, **ASKED)
    assert bed.fetch(request).body == b"".join((*EVENTS, USAGE, DONE))
    assert backend.received[0].body == request.partition(b"\r\n\r\n")[2]
    wait_for(lambda: used(bed).get("output") == 40)


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False, "chunk": 2}, {"include_usage": True, "chunk": 2}),
        ("wrong", "wrong"),
    ],
)
def test_other_options_of_the_client_are_kept(bed: Bed, options: Any, sent: Any) -> None:
    backend = bed.backend(answers(stream(*EVENTS, DONE)))
    assert bed.fetch(chat(stream=True, stream_options=options)).status == 200
    assert json.loads(backend.received[0].body)["stream_options"] == sent


def test_nothing_is_asked_without_a_stream(bed: Bed) -> None:
    backend = bed.backend()
    for request in (chat(), chat(stream=False), post({"model": "m", "input": "x", "stream": True}, b"/v1/responses")):
        assert bed.fetch(request).status == 200
        assert backend.received[-1].body == request.partition(b"\r\n\r\n")[2]


def strict(connection: BackendConnection) -> None:
    """An engine that refuses fields that it does not know."""
    while (request := connection.request()) is not None:
        body = json.loads(request.body)
        if "stream_options" in body or not body["messages"]:
            connection.send(answer({"error": {"message": "extra fields not permitted"}}, 422))
        else:
            connection.send(stream(*EVENTS, DONE))


def test_an_engine_that_refuses_usage_is_asked_once_and_shown(bed: Bed) -> None:
    backend = bed.backend(strict)
    for _ in range(3):
        assert bed.fetch(chat(stream=True)).body == b"".join((*EVENTS, DONE))
    assert ["stream_options" in json.loads(one.body) for one in backend.received] == [True, False, False, False]
    wait_for(lambda: bed.newest().output_tokens == 2)
    assert bed.dispatcher().counters.retries == {}
    assert "chat-0 refused stream_options.include_usage" in str(bed.gateway.upstream.problems(0.0)[0])


def test_what_the_client_did_wrong_stays_its_error(bed: Bed) -> None:
    backend = bed.backend(strict)
    got = bed.fetch(chat(stream=True, messages=[]))
    assert (got.status, len(backend.received)) == (422, 2)
    assert bed.gateway.upstream.problems(0.0) == []


def test_an_engine_that_has_reported_usage_is_not_asked_again_after_an_error(bed: Bed) -> None:
    backend = bed.backend(answers(stream(*EVENTS, USAGE, DONE), answer({"error": {}}, 400)))
    assert bed.fetch(chat(stream=True)).status == 200
    assert bed.fetch(chat(stream=True)).status == 400
    assert len(backend.received) == 2


def test_tenants_pay_for_what_the_engine_counted(make_bed: MakeBed) -> None:
    tenants = {
        "tenants": [{"name": "t", "tokensPerMinute": 1000}],
        "keys": [{"tenant": "t", "sha256": hashed("sk")}],
    }
    bed = make_bed(tenants)
    bed.backend(answers(stream(*EVENTS, USAGE, DONE)))
    assert bed.fetch(chat("authorization: Bearer sk", stream=True, max_tokens=50)).status == 200
    wait_for(lambda: 953 <= bed.gateway.admission.report()[0]["tokens_left"] < 955)


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        (b'data: {"choices":[]}\n\n', True),
        (b'data: {"choices":[],"usage":null}\n\n', True),
        (b'data: {"choices":[{"delta":{}}],"usage":{"completion_tokens":1}}\n\n', True),
        (b'data: {"choices":[{"delta":{"content":"\\"choices\\":[]"}}]}\n\n', True),
        (b": comment []\n\n", True),
        (b"data: [] not JSON\n\n", True),
        (b'event: x\ndata: {"usage":{"prompt_tokens":1},"choices":[]}\n\n', False),
        (DONE, True),
    ],
)
def test_only_events_that_have_nothing_but_usage_are_dropped(events: bytes, kept: bool) -> None:
    assert without_usage(EVENTS[0] + events + DONE) == EVENTS[0] + (events if kept else b"") + DONE


def test_prefix_tokens_are_counted_after_the_same_manifest_is_applied_again(bed: Bed) -> None:
    def counted() -> float:
        lines = bed.gateway.metrics.text(bed.gateway).splitlines()
        [line] = [line for line in lines if line.startswith("pointsman_prefix_tokens_total") and '"prompt"' in line]
        return float(line.rpartition(" ")[2])

    def ask() -> float:
        before = counted()
        assert bed.fetch(chat(messages=[{"role": "user", "content": "word " * 200}])).status == 200
        wait_for(lambda: bed.newest().output_tokens is not None)
        return counted() - before

    bed.backend()
    assert ask() > 0
    again = plan_of({}, CHAT_DEPLOYMENT).deployments
    bed.thread.call(lambda: bed.gateway.traffic.configure(again))
    assert ask() > 0
