"""Settings of requests in headers and bodies, request ids, refusals and pages."""

import json
from typing import Any

import pytest

from pointsman.reasons import Reason
from tests.gateway.backends import OK, Gate, answers, hangs
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, MakeBed, plan_of
from tests.gateway.wire import CHAT, HEALTH, chat, post, wait_for

SAID = [
    ("priority", "high", 1),
    ("priority", "Background", -2),
    ("priority", 7, 7),
    ("priority", -3, -3),
    ("deadline_ms", 1500, 1500.0),
    ("deadline_ms", 0.5, 0.5),
    ("tenant", "red", "red"),
    ("cost_budget", 0.25, 0.25),
]
FIELDS = {"priority": "priority", "deadline_ms": "deadline_ms", "tenant": "user_id", "cost_budget": "cost_budget"}


@pytest.mark.parametrize(("field", "value", "known"), SAID)
@pytest.mark.parametrize("where", ["header", "body", "both"])
def test_settings_of_a_request(bed: Bed, field: str, value: Any, known: Any, where: str) -> None:
    """Headers take precedence over the body."""
    bed.backend(throughput_tokens_per_sec=1000.0, price_per_hour=1.0)  # needed to estimate the cost of a request
    headers = [] if where == "body" else [f"X-Pointsman-{field.replace('_', '-')}:  {value} "]
    other = {"tenant": "blue"}.get(field, 3)
    extension = {} if where == "header" else {field: value if where == "body" else other}
    assert bed.fetch(chat("x-request-id: it", *headers, pointsman=extension)).status == 200
    assert getattr(bed.record("it"), FIELDS[field]) == known


def test_defaults_of_request_settings(bed: Bed) -> None:
    bed.backend()
    bed.fetch(chat("x-request-id: it"))
    record = bed.record("it")
    assert (record.priority, record.deadline_ms, record.user_id, record.cost_budget) == (0, None, "", None)


BAD = [
    ("priority", "urgent"),
    ("priority", ""),
    ("priority", 10**9),
    ("priority", "1e3"),
    ("deadline_ms", 0),
    ("deadline_ms", -5),
    ("deadline_ms", "soon"),
    ("deadline_ms", "nan"),
    ("deadline_ms", "inf"),
    ("deadline_ms", "1e300"),
    ("cost_budget", -1),
    ("cost_budget", "free"),
    ("timeout_s", 0),
    ("timeout_s", "never"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
@pytest.mark.parametrize("where", ["header", "body"])
def test_invalid_settings_are_refused_by_name(bed: Bed, field: str, value: Any, where: str) -> None:
    backend = bed.backend()
    client = bed.client()
    if where == "header":
        got = client.fetch(chat(f"x-pointsman-{field.replace('_', '-')}: {value}"))
    else:
        got = client.fetch(chat(pointsman={field: value}))
    assert (got.status, got.error["type"]) == (400, "invalid_request_error")
    assert field in got.error["message"].replace("-", "_")
    assert backend.received == []
    assert client.stays_open()


@pytest.mark.parametrize(
    ("extension", "named"),
    [({"prioritty": 1}, "prioritty"), (5, "pointsman"), ([], "pointsman"), ({"tenant": 5}, "tenant")],
)
def test_a_malformed_extension_is_refused(bed: Bed, extension: object, named: str) -> None:
    got = bed.fetch(chat(pointsman=extension))
    assert got.status == 400
    assert named in got.error["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"cache_salt": []}, "cache_salt"),
    ],
)
def test_a_malformed_body_is_refused(bed: Bed, fields: dict[str, Any], named: str) -> None:
    got = bed.fetch(post({"model": "m", "messages": [], **fields}))
    assert got.status == 400
    assert named in got.error["message"]


@pytest.mark.parametrize("tokens", [-1, 0, 10**15, 10**18, 10**30, None])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_unbounded_token_limits_are_left_to_the_engine(bed: Bed, name: str, tokens: int | None) -> None:
    backend = bed.backend()
    assert bed.fetch(chat(**{name: tokens})).status == 200  # type: ignore[arg-type]
    assert json.loads(backend.received[0].body)[name] == tokens


def test_unknown_fields_are_forwarded(bed: Bed) -> None:
    backend = bed.backend()
    fields = {"temperature": 0.1, "tools": [{"x": 1}], "response_format": None, "seed": 2**70, "x": {"y": [1, {}]}}
    assert bed.fetch(chat(**fields)).status == 200  # type: ignore[arg-type]
    assert json.loads(backend.received[0].body).items() >= fields.items()


# Sessions


def test_a_session_is_forwarded(bed: Bed) -> None:
    backend = bed.backend()
    bed.fetch(chat("x-pointsman-session: s1"))
    bed.fetch(chat(pointsman={"session": "s2"}))
    bed.fetch(chat("x-session-id: s3"))
    assert [request.header("x-session-id") for request in backend.received] == ["s1", "s2", "s3"]


# Request ids

SHORT_TTL = {
    "config": {
        "featureGates": ["flowControl"],
        "schedulingProfiles": [{"name": "default"}],
        "flowControl": {"noEndpointRequestTTL": "50ms"},
    }
}


def test_every_response_has_a_request_id(bed: Bed) -> None:
    backend = bed.backend()
    client = bed.client()
    names = [client.fetch(chat()).header("x-request-id") for _ in range(5)]
    assert len(set(names)) == 5
    assert None not in names
    assert [request.header("x-request-id") for request in backend.received] == names
    assert all(bed.record(name or "").state == "served" for name in names)


def test_a_given_request_id_is_kept(bed: Bed) -> None:
    backend = bed.backend()
    got = bed.fetch(chat("X-Request-Id: my request/1"))
    assert got.header("x-request-id") == "my request/1"
    assert backend.received[0].header("x-request-id") == "my request/1"


def test_a_request_id_in_use_is_not_accepted_twice(bed: Bed) -> None:
    gate = Gate()
    backend = bed.backend(gate)
    first, second = bed.client(), bed.client()
    first.send(chat("x-request-id: same"))
    wait_for(lambda: len(backend.received) == 1)
    second.send(chat("x-request-id: same"))
    wait_for(lambda: len(backend.received) == 2)
    gate.open()
    assert first.read_response().header("x-request-id") == "same"
    assert (second.read_response().header("x-request-id") or "").startswith("req-")
    assert bed.fetch(chat("x-request-id: same")).header("x-request-id") == "same"


def test_refusals_have_the_request_id(make_bed: MakeBed) -> None:
    bed = make_bed({}, {**CHAT_DEPLOYMENT, "scheduling": SHORT_TTL})
    got = bed.fetch(chat("x-request-id: it"))
    assert got.status == 503
    assert got.header("x-request-id") == "it"


# Refusals


def test_no_instance_is_503_with_a_reason_and_retry_after(make_bed: MakeBed) -> None:
    bed = make_bed({}, {**CHAT_DEPLOYMENT, "scheduling": SHORT_TTL})
    got = bed.fetch(chat())
    assert (got.status, got.error["type"], got.error["code"]) == (503, "server_error", "evicted_no_endpoints")
    assert '"m"' in got.error["message"]
    reason = got.error["reason"]
    assert (reason["code"], reason["text"]) == ("no-instance-came", got.error["message"])
    assert reason["facts"]["limit_s"] > 0
    assert int(got.header("retry-after") or 0) >= 1
    assert got.header("x-pointsman-instance") is None


def full_queue(make_bed: MakeBed) -> Bed:
    """One slot on one instance, and one in the queue."""
    scheduling = {
        "config": {
            "featureGates": ["flowControl"],
            "schedulingProfiles": [{"name": "default"}],
            "flowControl": {"maxRequests": 1},
        }
    }
    return make_bed({}, {**CHAT_DEPLOYMENT, "scheduling": scheduling})


def test_a_full_queue_is_429_with_a_reason_and_retry_after(make_bed: MakeBed) -> None:
    bed = full_queue(make_bed)
    gate = Gate()
    bed.backend(gate, max_concurrency=1)
    first, second = bed.client(), bed.client()
    first.send(chat())
    wait_for(lambda: bed.running() + bed.waiting() == 1)
    if bed.running():
        second.send(chat())
        wait_for(lambda: bed.waiting() == 1)
    got = bed.fetch(chat())
    assert (got.status, got.error["type"]) == (429, "rate_limit_error")
    assert "full" in got.error["message"]
    assert int(got.header("retry-after") or 0) >= 1
    assert got.header("x-llm-d-request-dropped-reason") == "rejected-saturated"
    gate.open()
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("test is over")))


def test_a_queue_timeout_is_429_with_the_reason(bed: Bed) -> None:
    bed.backend(hangs(), max_concurrency=1)
    first = bed.client()
    first.send(chat())
    wait_for(bed.running)
    got = bed.fetch(chat("x-pointsman-timeout-s: 0.05"))
    assert got.status == 429
    assert got.header("retry-after")
    assert "chat-0" in got.error["message"] or "full" in got.error["message"]


@pytest.mark.parametrize(
    ("model", "hint"), [("mm", 'did you mean "m"?'), ("other-nam", '"other-name"'), ("xyz", "there are: m, other-name")]
)
def test_an_unknown_model_is_404_with_a_suggestion(bed: Bed, model: str, hint: str) -> None:
    bed.backend()
    got = bed.fetch(chat(model=model))
    assert (got.status, got.error["code"]) == (404, "model_not_found")
    assert hint in got.error["message"]


def test_a_missing_model_selects_the_only_one_or_is_an_error(make_bed: MakeBed) -> None:
    one = make_bed()
    one.backend()
    assert one.fetch(post({"messages": []})).status == 200
    two = make_bed({}, CHAT_DEPLOYMENT, {"name": "b", "model": "n", "endpoints": [{"url": "http://127.0.0.1:1"}]})
    two.backend()
    got = two.fetch(post({"messages": []}))
    assert (got.status, got.error["code"]) == (400, "model_missing")
    assert "m, n, other-name" in got.error["message"]


def test_each_model_has_its_own_instances(make_bed: MakeBed) -> None:
    bed = make_bed({}, CHAT_DEPLOYMENT, {"name": "b", "model": "n", "endpoints": [{"url": "http://127.0.0.1:1"}]})
    first, second = bed.backend(), bed.backend(deployment="b")
    assert bed.fetch(chat(model="n")).header("x-pointsman-instance") == "b-0"
    assert bed.fetch(chat(model="m")).header("x-pointsman-instance") == "chat-0"
    assert (len(first.received), len(second.received)) == (1, 1)


# Pages


def page(path: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: gateway\r\n\r\n" % path


def test_health_and_readiness(bed: Bed) -> None:
    assert bed.fetch(HEALTH).json() == {"status": "ok"}
    assert bed.fetch(page(b"/ready")).json() == {"status": "ready"}
    bed.is_ready = False
    got = bed.fetch(page(b"/ready"))
    assert (got.status, got.error["code"], got.header("retry-after")) == (503, "not_ready", "1")
    assert bed.fetch(HEALTH).status == 200


def test_listing_models(make_bed: MakeBed) -> None:
    bed = make_bed({}, {**CHAT_DEPLOYMENT, "model": "org/llama 8b", "aliases": []})
    listed = bed.fetch(page(b"/v1/models")).json()
    assert listed["object"] == "list"
    [one] = listed["data"]
    assert (one["id"], one["object"]) == ("org/llama 8b", "model")
    assert {"created", "owned_by"} <= one.keys()
    assert bed.fetch(page(b"/v1/models/org/llama%208b")).json() == one
    assert bed.fetch(page(b"/v1/models/org%2Fllama%208b")).json() == one
    got = bed.fetch(page(b"/v1/models/nothing"))
    assert (got.status, got.error["code"]) == (404, "model_not_found")


def test_404_lists_the_known_paths(bed: Bed) -> None:
    got = bed.fetch(page(b"/v1/nothing"))
    assert (got.status, got.error["code"]) == (404, "not_found")
    assert "/v1/nothing" in got.error["message"]
    assert CHAT.decode() in got.error["message"]


def test_pages_accept_a_query(bed: Bed) -> None:
    assert bed.fetch(page(b"/health?verbose=1")).status == 200


def test_a_changed_setting_applies_at_once(make_bed: MakeBed) -> None:
    bed = make_bed()
    bed.backend(answers(OK))
    client = bed.client()
    assert client.fetch(chat()).status == 200
    changed = plan_of({"limits": {"maxBodyBytes": 10}}).gateway
    bed.thread.call(lambda: bed.gateway.configure(changed))
    assert client.fetch(chat()).status == 413
