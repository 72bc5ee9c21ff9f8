"""API keys and tenants: access, limits, and that keys are not leaked."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import pytest

from pointsman.config.schema import KeySpec, PriceSpec, TenantSpec
from pointsman.gateway.admission import Keys
from pointsman.gateway.openai import Usage, metadata, read_body
from pointsman.gateway.tenants import Bucket, Charge, Denial, Tenant
from pointsman.reasons import Reason
from pointsman.routing.queue.items import FAIRNESS_ALIAS, FAIRNESS_HEADER, flow_of
from tests.gateway.backends import DONE, OK, STREAM, answer, answers, chunk, completion, event, hangs, stream
from tests.gateway.bed import CHAT_DEPLOYMENT, MakeBed, plan_of
from tests.gateway.wire import CHAT, HEALTH, chat, post, wait_for

RED, BLUE = "key-of-red-5f1e", "key-of-blue-77aa"


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def guarded(*tenants: dict[str, Any], price: Mapping[str, float] | None = None) -> Sequence[Any]:
    """Settings with a key for red and one for blue."""
    limited = {tenant["name"] for tenant in tenants}
    unlimited = [{"name": name} for name in ("red", "blue") if name not in limited]
    gateway = {
        "keys": [{"sha256": digest(RED), "tenant": "red"}, {"sha256": digest(BLUE), "tenant": "blue", "name": "b"}],
        "tenants": [*tenants, *unlimited],
    }
    return gateway, {**CHAT_DEPLOYMENT, **({"price": price} if price else {})}


def by(key: str, *headers: str, **fields: Any) -> bytes:
    return chat(f"authorization: Bearer {key}", *headers, **fields)


# Access


@pytest.mark.parametrize(
    "line",
    [
        f"authorization: Bearer {RED}",
        f"Authorization: bearer {RED}",
        f"authorization: BEARER   {RED}  ",
        f"x-api-key: {RED}",
    ],
)
def test_a_key_identifies_its_tenant(make_bed: MakeBed, line: str) -> None:
    bed = make_bed(*guarded())
    bed.backend()
    assert bed.fetch(chat(line, "x-request-id: it", "x-pointsman-tenant: blue")).status == 200
    assert bed.record("it").user_id == "red"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["authorization: Bearer"],
        ["authorization: Bearer "],
        ["authorization: Bearer wrong"],
        [f"authorization: Bearer {RED}x"],
        [f"authorization: Bearer {RED[:-1]}"],
        [f"authorization: Bearer {RED.upper()}"],
        [f"authorization: Bearer {digest(RED)}"],
        [f"authorization: Basic {RED}"],
        [f"authorization: {RED}"],
        ["x-api-key:"],
        ["x-api-key: wrong"],
        [f"authorization: Basic x\r\nx-api-key: {RED}"],
        [f"cookie: key={RED}"],
    ],
    ids=lambda lines: lines[0].replace(RED, "RED")[:40] if lines else "nothing",
)
def test_requests_without_a_key_are_refused(make_bed: MakeBed, lines: list[str]) -> None:
    bed = make_bed(*guarded())
    backend = bed.backend()
    client = bed.client()
    got = client.fetch(chat(*lines))
    assert (got.status, got.error["type"], got.error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert "Bearer" in got.error["message"]
    assert backend.received == []
    assert bed.dispatcher().counters.arrived == 0
    assert client.stays_open()


def test_a_refusal_for_a_missing_key_reveals_nothing_else(make_bed: MakeBed) -> None:
    """Neither whether a model exists nor whether the body is valid."""
    bed = make_bed(*guarded())
    bodies = {bed.fetch(request).body for request in (chat(), chat(model="unknown"), post(b"{"), post(b""))}
    assert len(bodies) == 1


@pytest.mark.parametrize("path", [b"/v1/models", b"/v1/models/m"])
def test_listing_models_requires_a_key(make_bed: MakeBed, path: bytes) -> None:
    bed = make_bed(*guarded())
    request_line = b"GET %b HTTP/1.1\r\nhost: gateway\r\n%b\r\n"
    assert bed.fetch(request_line % (path, b"")).status == 401
    assert bed.fetch(request_line % (path, b"authorization: Bearer %b\r\n" % BLUE.encode())).status == 200


def test_health_needs_no_key(make_bed: MakeBed) -> None:
    assert make_bed(*guarded()).fetch(HEALTH).status == 200


def test_a_key_applies_to_its_request_only(make_bed: MakeBed) -> None:
    bed = make_bed(*guarded())
    bed.backend()
    client = bed.client()
    assert client.fetch(by(RED, "x-request-id: first")).status == 200
    assert client.fetch(chat()).status == 401
    assert client.fetch(by(BLUE, "x-request-id: second")).status == 200
    assert client.fetch(by("wrong")).status == 401
    assert client.fetch(by(RED, "x-request-id: third")).status == 200
    assert [bed.record(name).user_id for name in ("first", "second", "third")] == ["red", "blue", "red"]


def test_a_key_that_is_removed_is_invalid_at_once(make_bed: MakeBed) -> None:
    bed = make_bed(*guarded())
    bed.backend()
    client = bed.client()
    assert client.fetch(by(RED)).status == 200
    fewer = plan_of({"keys": [{"sha256": digest(BLUE), "tenant": "blue"}], "tenants": [{"name": "blue"}]}).gateway
    bed.thread.call(lambda: bed.gateway.configure(fewer))
    assert client.fetch(by(RED)).status == 401
    assert client.fetch(by(BLUE)).status == 200


def test_keys_are_not_passed_on(
    make_bed: MakeBed, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither instances, records, logs nor responses contain them."""
    bed = make_bed(*guarded({"name": "red", "requestsPerMinute": 3}))
    backend = bed.backend(answers(answer({"error": "x"}, 500), OK))
    responses = [
        bed.fetch(by(RED, "x-request-id: it")),
        bed.fetch(by(RED, model="unknown")),
        bed.fetch(post(b"{", headers=[f"authorization: Bearer {RED}"])),
        bed.fetch(by(RED, "content-length: 5")),
        bed.fetch(by(RED, "x bad: 5")),
        *(bed.fetch(by(RED)) for _ in range(5)),
        bed.fetch(b"GET /metrics HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer %b\r\n\r\n" % RED.encode()),
    ]
    assert {answer.status for answer in responses} == {200, 400, 404, 429}
    records = bed.dispatcher().records.newest()
    outputs = {
        "answers": repr(responses),
        "instances": repr(backend.received),
        "records": json.dumps([record.as_dict() for record in records], default=str) + "".join(map(str, records)),
        "logs": caplog.text + "".join(capfd.readouterr()),
        "trouble": repr(bed.thread.errors),
    }
    for output, text in outputs.items():
        assert RED not in text, f"the key is in {output}"
        assert digest(RED) not in text, f"the hash of the key is in {output}"


def test_many_keys_per_tenant_with_colliding_hash_prefixes() -> None:
    keys = [f"key-{number}" for number in range(3000)]  # enough for collisions of the first two bytes
    specs = [KeySpec(sha256=digest(key), tenant=f"t{number % 3}") for number, key in enumerate(keys)]
    known = Keys(specs, {f"t{number}": Tenant(TenantSpec(name=f"t{number}")) for number in range(3)})
    assert len(known._by_start) < len(keys)
    for number, key in enumerate(keys):
        tenant = known._lookup(key.encode())
        assert tenant is not None
        assert tenant.name == f"t{number % 3}"
    assert known._lookup(b"key-3000") is None
    assert known._lookup(b"") is None


# Limits


def test_requests_per_minute(make_bed: MakeBed) -> None:
    bed = make_bed(*guarded({"name": "red", "requestsPerMinute": 3}))
    backend = bed.backend()
    assert [bed.fetch(by(RED)).status for _ in range(4)] == [200, 200, 200, 429]
    got = bed.fetch(by(RED))
    assert (got.status, got.error["type"], got.error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert '"red" may send 3 requests per minute' in got.error["message"]
    assert 1 <= int(got.header("retry-after") or 0) <= 20
    assert bed.fetch(by(BLUE)).status == 200
    assert len(backend.received) == 4
    assert bed.gateway.metrics.limited == {"red": 2}


def test_tokens_per_minute_use_the_engines_count(make_bed: MakeBed) -> None:
    bed = make_bed(*guarded({"name": "red", "tokensPerMinute": 1000}))
    bed.backend(answers(answer(completion(output=2000))))
    assert bed.fetch(by(RED)).status == 200
    got = bed.fetch(by(RED))
    assert got.status == 429
    assert "1000 tokens per minute" in got.error["message"]
    assert 55 <= int(got.header("retry-after") or 0) <= 70
    assert bed.fetch(by(BLUE)).status == 200


def test_a_prompt_beyond_the_limit_of_a_minute_is_refused(make_bed: MakeBed) -> None:
    bed = make_bed(*guarded({"name": "red", "tokensPerMinute": 100}))
    got = bed.fetch(by(RED, messages=[{"role": "user", "content": "x" * 1000}]))
    assert got.status == 429
    assert "the prompt has about" in got.error["message"]


TOKENS = [event(number) for number in range(300)]


def test_a_stream_without_usage_is_counted(make_bed: MakeBed) -> None:
    """Otherwise streams would have no limit."""
    bed = make_bed(*guarded({"name": "red", "tokensPerMinute": 200}))
    bed.backend(answers(stream(*TOKENS, DONE)))
    assert bed.fetch(by(RED, stream=True)).status == 200
    assert bed.fetch(by(RED, stream=True)).status == 429


@pytest.mark.parametrize("side", ["client", "instance"])
def test_an_interrupted_stream_is_counted_up_to_its_end(make_bed: MakeBed, side: str) -> None:
    """Otherwise clients that disconnect just before the end would have no limit."""
    bed = make_bed(*guarded({"name": "red", "tokensPerMinute": 200}))
    backend = bed.backend(hangs(STREAM + b"".join(map(chunk, TOKENS))))
    client = bed.client()
    client.send(by(RED, stream=True))
    client.until(b"t299")
    if side == "client":
        client.close()
        wait_for(backend.all_closed)
    else:
        bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("crashed")))
        client.until(b"stream_interrupted")
    wait_for(lambda: bed.fetch(by(RED, stream=True)).status == 429)


def test_a_cost_budget(make_bed: MakeBed) -> None:
    price = {"perMillionInputTokens": 0, "perMillionOutputTokens": 1_000_000}
    bed = make_bed(*guarded({"name": "red", "costBudget": 5, "costPeriod": "1h"}, price=price))
    bed.backend(answers(answer(completion(output=2))))
    assert [bed.fetch(by(RED)).status for _ in range(4)] == [200, 200, 200, 429]
    got = bed.fetch(by(RED))
    assert "has spent its budget of 5" in got.error["message"]
    assert 3500 <= int(got.header("retry-after") or 0) <= 3600
    assert bed.fetch(by(BLUE)).status == 200


@pytest.mark.parametrize(("requested", "granted"), [(2, 0), (1, 0), (0, 0), (-1, -1), ("critical", 0)])
def test_priorities_are_limited_to_that_of_the_tenant(make_bed: MakeBed, requested: int | str, granted: int) -> None:
    bed = make_bed(*guarded({"name": "red", "maxPriority": 0}))
    bed.backend()
    bed.fetch(by(RED, "x-request-id: it", pointsman={"priority": requested}))
    assert bed.record("it").priority == granted
    bed.fetch(by(BLUE, "x-request-id: other", pointsman={"priority": requested}))
    assert bed.record("other").priority >= granted


@pytest.mark.parametrize("header", [FAIRNESS_HEADER, FAIRNESS_ALIAS])
def test_a_tenant_cannot_choose_another_fairness_flow(header: str) -> None:
    """With a key the flow is the tenant; without one the header may choose it."""
    raw = {header.encode(): b"another flow"}
    body = read_body(b'{"model": "m"}')
    assert flow_of(metadata("r", body, dict(raw), 0.0, "red")) == "red"
    assert flow_of(metadata("r", body, dict(raw), 0.0, "")) == "another flow"


def test_usage_of_tenants_survives_new_settings(make_bed: MakeBed) -> None:
    gateway, deployment = guarded({"name": "red", "requestsPerMinute": 3})
    bed = make_bed(gateway, deployment)
    bed.backend()
    assert [bed.fetch(by(RED)).status for _ in range(4)] == [200, 200, 200, 429]
    bed.thread.call(lambda: bed.gateway.configure(plan_of(gateway).gateway))
    assert bed.fetch(by(RED)).status == 429


# Tenants alone, with a fake clock


def admitted(tenant: Tenant, now: float, **facts: Any) -> Charge:
    """The charge of a request that must be admitted: by default with a prompt of 10 tokens, and an answer of 20."""
    charge = tenant.admit(**{"prompt": 10, "answer": 20, "price": None, "now": now, **facts})
    assert isinstance(charge, Charge), charge
    return charge


def denial(tenant: Tenant, now: float, **facts: Any) -> Denial:
    """The denial of a request that must be denied."""
    denied = tenant.admit(**{"prompt": 10, "answer": 20, "price": None, "now": now, **facts})
    assert isinstance(denied, Denial), denied
    return denied


def test_a_bucket_refills_up_to_its_capacity() -> None:
    bucket = Bucket(60.0)
    assert bucket.refill(0.0) == 60
    bucket.take(60)
    assert bucket.refill(0.5) == 0.5
    assert bucket.seconds_until(1) == 1
    assert bucket.refill(1.0) == 1
    assert bucket.refill(10_000.0) == 60
    bucket.take(180)
    assert bucket.seconds_until(1) == 121
    assert bucket.refill(10_120.0) == 0
    assert bucket.refill(10_121.0) == 1


def test_a_denied_request_costs_nothing() -> None:
    tenant = Tenant(TenantSpec(name="t", requests_per_minute=100, tokens_per_minute=30))
    admitted(tenant, 0.0).settle(Usage(10, 20, None), None, 0, 0.0)
    for _ in range(500):
        denial(tenant, 0.0)
    admitted(tenant, 60.0)


def test_estimated_tokens_are_corrected_by_usage() -> None:
    tenant = Tenant(TenantSpec(name="t", tokens_per_minute=100))
    admitted(tenant, 0.0).settle(Usage(4, 6, None), None, 0, 0.0)
    assert tenant.tokens_left is not None
    assert tenant.tokens_left.refill(0.0) == 90


@pytest.mark.parametrize(
    ("usage", "counted", "size", "spent"),
    [
        (Usage(100, 10, None), None, 9, 100 * 1 + 10 * 2),
        (Usage(100, 10, None), 99, 9, 100 * 1 + 10 * 2),
        (Usage(100, None, None), 7, 9, 100 * 1 + 7 * 2),
        (None, 7, 9, 10 * 1 + 7 * 2),
        (None, None, 0, 10 * 1),
        (None, None, 40, 10 * 1 + 10 * 2),
        (None, None, 4_000_000, 10 * 1 + 20 * 2),
    ],
)
def test_the_cost_of_an_answer(usage: Usage | None, counted: int | None, size: int, spent: float) -> None:
    """As the engine counted; else as the gateway counted events; else by size, but not more than was reserved."""
    tenant = Tenant(TenantSpec(name="t", cost_budget=1.0))
    price = PriceSpec(per_million_input_tokens=1.0, per_million_output_tokens=2.0)
    admitted(tenant, 0.0, price=price).settle(usage, counted, size, 0.0)
    assert tenant.spent == pytest.approx(spent / 1e6)
    assert (tenant.cost.amount, tenant.cost.holders, tenant.tokens.amount, tenant.tokens.holders) == (0, 0, 0, 0)


def test_a_budget_is_renewed_with_each_period() -> None:
    tenant = Tenant(TenantSpec(name="t", cost_budget=1.0, cost_period=100.0))
    price = PriceSpec(per_million_output_tokens=1e6)
    admitted(tenant, 0.0, price=price).settle(Usage(None, 1, None), None, 0, 1.0)
    assert denial(tenant, 40.0, price=price).retry_after_s == 60
    admitted(tenant, 100.0, price=price)


@pytest.mark.parametrize("path", [CHAT, b"/v1/completions", b"/v1/embeddings", b"/v1/responses"])
def test_limits_apply_to_every_api(make_bed: MakeBed, path: bytes) -> None:
    bed = make_bed(*guarded({"name": "red", "requestsPerMinute": 1}))
    bed.backend()
    request_bytes = post({"model": "m", "input": "x"}, path, [f"authorization: Bearer {RED}"])
    assert [bed.fetch(request_bytes).status for _ in range(2)] == [200, 429]
