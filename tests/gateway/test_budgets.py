"""What requests in flight may cost is reserved: a budget is exceeded by one request at most, however many come at once.

The bound, for a budget B and requests whose actual cost is at most what was reserved for them: at any time, what is
spent and reserved together is at most B plus the estimate of one request. For requests that cost more than that, it is
at most the sum of their excess more; and nothing is admitted while what is spent and reserved has reached B.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.config.schema import PriceSpec, TenantSpec
from pointsman.errors import PointsmanError
from pointsman.gateway.openai import answer_tokens, read_body
from pointsman.gateway.tenants import Charge, Denial, Tenant, UsageBook, UsageState
from pointsman.runtimes.simulation.runtime import MemoryUsage
from tests.gateway.bed import plan_of

PER_TOKEN = PriceSpec(per_million_input_tokens=0, per_million_output_tokens=1e6)
"""An answer costs 1 per token."""
ONE_EACH = {"perMillionInputTokens": 0, "perMillionOutputTokens": 1_000_000}
BUDGET = 100

# Any order of admissions and ends


class InFlightRequest:
    def __init__(self, charge: Charge, estimate: int) -> None:
        self.charge, self.estimate = charge, estimate
        self.grown = 0


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "admit", "grow", "settle", "close", "wait"]),
        st.integers(0, 80),
        st.integers(0, 1000),
    ),
    max_size=60,
)


def play(moves: list[tuple[str, int, int]], *, beyond: bool) -> None:
    """Carry out moves (what, amount, which one). `beyond`: answers may be longer than was reserved for them."""
    tenant = Tenant(TenantSpec(name="t", cost_budget=BUDGET, cost_period=100.0, tokens_per_minute=1e9))
    running: list[InFlightRequest] = []
    now, largest, excess = 0.0, 0, 0
    for what, amount, which in moves:
        if what == "wait":
            now += amount / 3
        elif what == "admit":
            before, reserved, alone = tenant.spent_by(now), tenant.cost.amount, not tenant.cost.holders
            charge = tenant.admit(0, amount, PER_TOKEN, now)
            fits = before + reserved + amount <= BUDGET and before + reserved < BUDGET
            assert isinstance(charge, Charge) == (fits or (alone and before < BUDGET))
            if isinstance(charge, Charge):
                running.append(InFlightRequest(charge, amount))
                largest = max(largest, amount)
        elif running:
            one = running[which % len(running)]
            most = one.estimate * 3 if beyond else one.estimate
            length = max(one.grown, min(amount, most))
            if what == "grow":
                one.charge.grown(length, now)
                excess += max(0, length - one.estimate) - max(0, one.grown - one.estimate)
                one.grown = length
            else:
                running.remove(one)
                if what == "settle":
                    excess += max(0, length - one.estimate) - max(0, one.grown - one.estimate)
                    one.charge.settle(None, length, 0, now)
                one.charge.close()
                one.charge.close()
                one.charge.settle(None, 1000, 0, now)
        rest = sum(max(0, one.estimate - one.grown) for one in running)
        assert tenant.cost.amount == pytest.approx(rest)
        assert tenant.cost.holders == sum(one.estimate > 0 for one in running)
        assert tenant.spent_by(now) + tenant.cost.amount <= BUDGET + largest + excess + 1e-9
    for one in running:
        one.charge.close()
    assert (tenant.cost.amount, tenant.cost.holders, tenant.tokens.amount, tenant.tokens.holders) == (0, 0, 0, 0)


@given(MOVES)
def test_a_budget_is_exceeded_by_one_request_at_most(moves: list[tuple[str, int, int]]) -> None:
    play(moves, beyond=False)


@given(MOVES)
def test_answers_beyond_their_estimate_exceed_a_budget_by_no_more_than_that(moves: list[tuple[str, int, int]]) -> None:
    play(moves, beyond=True)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 60), st.integers(0, 9)), max_size=50))
def test_tokens_per_minute_are_exceeded_by_one_request_at_most(moves: list[tuple[bool, int, int, int]]) -> None:
    """At one moment, in which nothing refills."""
    tenant = Tenant(TenantSpec(name="t", tokens_per_minute=100))
    running: list[tuple[Charge, int, int]] = []
    for begins, prompt, length, which in moves:
        if begins:
            charge = tenant.admit(prompt, length, None, 0.0)
            if isinstance(charge, Charge):
                running.append((charge, prompt, length))
        elif running:
            charge, _, most = running.pop(which % len(running))
            charge.settle(None, min(length, most), 0, 0.0)
        assert tenant.tokens_left is not None
        assert tenant.tokens_left.left - tenant.tokens.amount >= -120, "the largest request has 120"


def test_a_stream_that_outgrows_what_was_reserved_keeps_others_out() -> None:
    tenant = Tenant(TenantSpec(name="t", cost_budget=BUDGET))
    first = tenant.admit(0, 10, PER_TOKEN, 0.0)
    assert isinstance(first, Charge)
    first.grown(60, 0.0)
    assert (tenant.spent, tenant.cost.amount) == (60, 0)
    assert isinstance(tenant.admit(0, 41, PER_TOKEN, 0.0), Denial)
    second = tenant.admit(0, 40, PER_TOKEN, 0.0)
    assert isinstance(second, Charge)
    first.grown(101, 0.0)
    for estimate in (0, 1, 50):
        assert isinstance(tenant.admit(0, estimate, PER_TOKEN, 0.0), Denial)
    first.settle(None, 20, 0, 0.0)
    assert tenant.spent == 20, "what the engine reports in the end counts"
    assert isinstance(tenant.admit(0, 40, PER_TOKEN, 0.0), Charge)


def test_a_request_that_ends_in_the_next_period_is_charged_there() -> None:
    tenant = Tenant(TenantSpec(name="t", cost_budget=BUDGET, cost_period=10.0))
    charge = tenant.admit(0, 90, PER_TOKEN, 0.0)
    assert isinstance(charge, Charge)
    charge.grown(30, 9.0)
    assert (tenant.spent_by(9.0), tenant.spent_by(11.0), tenant.cost.amount) == (30, 0, 60)
    assert isinstance(tenant.admit(0, 50, PER_TOKEN, 11.0), Denial), "60 are still reserved"
    charge.settle(None, 90, 0, 12.0)
    assert tenant.spent_by(12.0) == 60


def test_new_limits_keep_what_was_used_and_reserved() -> None:
    tenant = Tenant(TenantSpec(name="t", cost_budget=BUDGET, cost_period=1000.0))
    charge = tenant.admit(0, 80, PER_TOKEN, 0.0)
    assert isinstance(charge, Charge)
    tenant.configure(TenantSpec(name="t", cost_budget=120, cost_period=50.0))
    assert isinstance(tenant.admit(0, 41, PER_TOKEN, 0.0), Denial)
    charge.settle(None, 80, 0, 1.0)
    assert tenant.spent_by(1.0) == 80
    assert tenant.spent_by(51.0) == 0, "the shorter period ends earlier"


def test_a_denial_says_what_is_left_reserved_and_needed() -> None:
    tenant = Tenant(TenantSpec(name="t", cost_budget=BUDGET))
    for _ in range(2):
        tenant.admit(0, 40, PER_TOKEN, 0.0)
    denied = tenant.admit(0, 30, PER_TOKEN, 0.0)
    assert denied == Denial(
        '"t" has 100 left of its budget of 100 per 86400 s: 80 is reserved for 2 requests in flight, and this one may '
        "cost 30; a lower max_tokens reserves less",
        1,
    )


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("chat/completions", {}, 4096),
        ("chat/completions", {"max_tokens": 5}, 5),
        ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 70}, 70),
        ("chat/completions", {"max_tokens": -1}, 4096),
        ("chat/completions", {"max_tokens": 5, "n": 3}, 15),
        ("chat/completions", {"max_tokens": 5, "n": "3"}, 5),
        ("completions", {"max_tokens": 5, "best_of": 4, "n": 2}, 20),
        ("completions", {"max_tokens": 5, "prompt": "x"}, 5),
        ("completions", {"max_tokens": 5, "prompt": ["x", "y", "z"]}, 15),
        ("completions", {"max_tokens": 5, "prompt": [[1, 2], [3]]}, 10),
        ("completions", {"max_tokens": 5, "prompt": [1, 2, 3]}, 5),
        ("completions", {"max_tokens": 5, "prompt": []}, 5),
        ("responses", {"max_output_tokens": 9}, 9),
        ("embeddings", {"input": "x"}, 0),
    ],
)
def test_the_most_tokens_that_an_answer_may_have(path: str, body: dict[str, Any], tokens: int) -> None:
    read = read_body(json.dumps({"model": "m", **body}).encode())
    assert answer_tokens(read, f"/v1/{path}".encode(), 4096) == tokens


@pytest.mark.parametrize(
    ("engine", "price", "assumed"),
    [
        ({"type": "simulated", "parameters": {"outputTokens": 70}}, {}, 70),
        ({"type": "simulated", "parameters": {"outputTokens": 70}}, {"assumedOutputTokens": 30}, 30),
        ({"type": "vllm", "parameters": {"model": "m"}}, {}, 4096),
        ({"type": "vllm", "parameters": {"model": "m", "args": ["--max-model-len", "8192"]}}, {}, 8192),
        ({"type": "vllm", "parameters": {"model": "m", "args": ["--max-model-len=512", "-x"]}}, {}, 512),
        ({"type": "sglang", "parameters": {"model": "m", "args": ["--context-length", "777"]}}, {}, 777),
    ],
)
def test_assumed_tokens_without_a_limit(engine: dict[str, Any], price: dict[str, Any], assumed: int) -> None:
    deployment = {"name": "m", "model": "m", "engine": engine, "price": price, "replicas": 0}
    assert plan_of({}, deployment).deployments[0].assumed_output_tokens == assumed


# Across restarts


class Clocks:
    """The clocks of a plane: `now` starts anew with each, `wall` goes on."""

    def __init__(self) -> None:
        self.now, self.wall = 1000.0, 1_700_000_000.0

    def wait(self, seconds: float) -> None:
        self.now, self.wall = self.now + seconds, self.wall + seconds


LIMITS = TenantSpec(name="t", cost_budget=BUDGET, cost_period=3600.0, tokens_per_minute=600, requests_per_minute=60)


def restarted(tenant: Tenant, clocks: Clocks, down_s: float, spec: TenantSpec = LIMITS) -> Tenant:
    """The tenant in the next plane, after this time."""
    text = msgspec.json.encode(UsageState.of(tenant, clocks.now, clocks.wall))
    clocks.wait(down_s)
    clocks.now = 5.0
    found = Tenant(spec)
    msgspec.json.decode(text, type=UsageState).restore(found, clocks.now, clocks.wall)
    return found


def spender(clocks: Clocks) -> Tenant:
    """A tenant that has spent 70 of its budget, and used 71 of 600 tokens and 1 of 60 requests."""
    tenant = Tenant(LIMITS)
    charge = tenant.admit(1, 70, PER_TOKEN, clocks.now)
    assert isinstance(charge, Charge)
    charge.settle(None, 70, 0, clocks.now)
    return tenant


def test_a_restart_is_not_a_refill() -> None:
    clocks = Clocks()
    tenant = restarted(spender(clocks), clocks, 2.0)
    assert tenant.requests_left is not None
    assert tenant.tokens_left is not None
    assert (tenant.spent, tenant.requests_left.left, tenant.tokens_left.left) == (70, 60, 549)
    assert isinstance(tenant.admit(0, 31, PER_TOKEN, clocks.now), Charge)
    assert isinstance(tenant.admit(0, 31, PER_TOKEN, clocks.now), Denial)


def test_a_period_ends_at_its_time_whatever_was_down() -> None:
    clocks = Clocks()
    tenant = spender(clocks)
    clocks.wait(600)
    tenant = restarted(tenant, clocks, 1200.0)
    assert tenant.spent_by(clocks.now + 1799) == 70
    assert tenant.spent_by(clocks.now + 1801) == 0
    clocks = Clocks()
    tenant = restarted(spender(clocks), clocks, 4000.0)
    assert tenant.spent_by(clocks.now) == 0, "it ended while no plane ran"


def test_a_clock_that_was_set_back_makes_no_period_longer() -> None:
    clocks = Clocks()
    tenant = restarted(spender(clocks), clocks, -1_000_000.0)
    assert tenant.spent_by(clocks.now) == 70
    assert tenant.spent_by(clocks.now + 3601) == 0
    assert tenant.tokens_left is not None
    assert tenant.tokens_left.left == 529


def test_new_limits_apply_to_usage_of_the_last_plane() -> None:
    clocks = Clocks()
    spec = TenantSpec(name="t", cost_budget=60, tokens_per_minute=100)
    tenant = restarted(spender(clocks), clocks, 0.0, spec)
    assert isinstance(tenant.admit(0, 1, PER_TOKEN, clocks.now), Denial)
    assert (tenant.requests_left, tenant.tokens_left and tenant.tokens_left.left) == (None, 100)


class CountingStore(MemoryUsage):
    saves = 0

    def save_usage(self, states: Mapping[str, str]) -> None:
        self.saves += 1
        super().save_usage(states)


def test_usage_is_saved_when_it_has_changed_but_not_for_each_request() -> None:
    store, book = CountingStore(), UsageBook()
    book.open(store)
    tenants = book.tenants([LIMITS, TenantSpec(name="other")])
    now = 100.0
    for _ in range(50):
        tenants["t"].admit(1, 1, PER_TOKEN, now)
        book.save(now)
        now += 0.02
    assert store.saves == 2, "in a second"
    book.save(now + 10)
    book.save(now + 20)
    assert store.saves == 3
    assert set(store.usage()) == {"t"}
    tenants["other"].admit(0, None, None, now)
    book.close()
    book.save(now + 30)
    assert (store.saves, set(store.usage())) == (4, {"t", "other"})


def test_a_tenant_that_is_gone_may_come_back_within_its_period() -> None:
    store, book = MemoryUsage(), UsageBook()
    book.open(store)
    [tenant] = book.tenants([LIMITS]).values()
    now = time.monotonic()
    tenant.use(70.0, 0, now)
    book.save(now)
    assert book.tenants([]) == {}
    again = book.tenants([LIMITS])["t"]
    assert again.spent == 70
    another = UsageBook()
    another.open(store)
    assert another.tenants([LIMITS])["t"].spent == 70, "also in the next plane"
    again.period_ends = now - 1
    assert book.tenants([]) == {}
    assert store.usage() == {}, "its period is over"


def test_usage_that_cannot_be_read_is_an_error_with_what_to_do() -> None:
    store, book = MemoryUsage(), UsageBook()
    store.save_usage({"t": "nonsense"})
    with pytest.raises(PointsmanError, match=r'what tenant "t" has used cannot be read .*; move'):
        book.open(store)
    book.save(1e9)
    assert store.usage() == {"t": "nonsense"}, "it is not overwritten"
