"""Limits that several gateways share: in total they hold, whatever gateways do between two reports."""

from random import Random
from typing import Any

import pytest

from pointsman.config.schema import PriceSpec, TenantSpec
from pointsman.gateway.openai import Usage
from pointsman.gateway.shares import Bank, GrantedTenants
from pointsman.gateway.tenants import Charge, Denial, Tenant, UsageBook

PRICE = PriceSpec(per_million_input_tokens=1e6, per_million_output_tokens=1e6)
"""A token costs 1."""
BEAT_S = 0.1


class Gateways:
    """A bank and some gateways on virtual time. Reports and grants take a beat to arrive."""

    def __init__(self, number: int, **limits: Any) -> None:
        self.now = 100.0
        self.spec = TenantSpec(name="t", **limits)
        self.book = UsageBook()
        self.bank = Bank(self.book, lambda: self.now)
        self.bank.configure([self.spec])
        self.each = {f"g{one}": GrantedTenants() for one in range(number)}
        for name, one in self.each.items():
            one.tenants([self.spec])
            self.bank.joined(name, {})
        self.beat()

    def tenant(self, name: str) -> Tenant:
        return self.each[name].tenants([self.spec])["t"]

    def admit(self, name: str, prompt: int = 1, answer: int = 0) -> Charge | Denial | None:
        return self.tenant(name).admit(prompt, answer, PRICE, self.now)

    def beat(self, seconds: float = BEAT_S) -> None:
        """Reports arrive, and then grants."""
        self.now += seconds
        reports = {name: one.usage() for name, one in self.each.items()}
        for name, usage in reports.items():
            self.bank.used(name, usage)
        for name, grants in self.bank.grants().items():
            self.each[name].granted(grants, self.now)


def admitted(found: Charge | Denial | None) -> bool:
    return not isinstance(found, Denial)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_requests_per_minute_hold_in_total(number: int, seed: int) -> None:
    rng, gateways = Random(seed), Gateways(number, requests_per_minute=60)
    began, served = gateways.now, 0
    weights = [rng.random() ** 3 for _ in gateways.each]
    for _ in range(2000):
        for name in rng.choices(list(gateways.each), weights, k=rng.randint(0, 4)):
            served += admitted(gateways.admit(name))
        gateways.beat()
        allowed = 60 + (gateways.now - began)
        assert served <= allowed
    assert served >= 0.9 * allowed, "nor is much of it lost"


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_a_budget_is_exceeded_by_one_request_of_each_process_at_most(number: int, seed: int) -> None:
    rng, gateways = Random(seed), Gateways(number, cost_budget=1000.0, cost_period=1e6)
    largest, spent, running = 0, 0.0, list[tuple[Charge, int, int]]()
    for _ in range(400):
        for name in rng.choices(list(gateways.each), k=rng.randint(0, 5)):
            prompt, answer = rng.randint(1, 40), rng.randint(1, 60)
            charge = gateways.admit(name, prompt, answer)
            if isinstance(charge, Charge):
                largest = max(largest, prompt + answer)
                running.append((charge, prompt, answer))
        rng.shuffle(running)
        while running and rng.random() < 0.7:
            charge, prompt, answer = running.pop()
            written = rng.randint(0, answer)
            charge.settle(Usage(input=prompt, output=written, cached=0), None, 0, gateways.now)
            spent += prompt + written
        gateways.beat()
        assert spent <= 1000.0 + number * largest
    assert spent >= 900.0, "the budget can be used"
    [shown] = gateways.bank.report(0.0)
    assert shown["spent"] == pytest.approx(spent)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_per_minute_hold_in_total(seed: int) -> None:
    rng, gateways = Random(seed), Gateways(3, tokens_per_minute=6000)
    began, used, largest = gateways.now, 0, 0
    for _ in range(1500):
        for name in rng.choices(list(gateways.each), [9, 1, 1], k=rng.randint(0, 3)):
            prompt, answer = rng.randint(1, 300), rng.randint(1, 300)
            charge = gateways.admit(name, prompt, answer)
            if isinstance(charge, Charge):
                charge.settle(Usage(input=prompt, output=answer, cached=0), None, 0, gateways.now)
                used, largest = used + prompt + answer, max(largest, prompt + answer)
        gateways.beat()
        allowed = 6000 + 100 * (gateways.now - began)
        assert used <= allowed + 3 * largest
    assert used >= 0.8 * allowed


def test_a_request_that_needs_most_of_what_is_left_gets_it_within_beats() -> None:
    gateways = Gateways(4, tokens_per_minute=1000)
    assert isinstance(gateways.admit("g2", 900), Denial), "it has a quarter"
    for _ in range(5):
        gateways.beat()
    assert admitted(gateways.admit("g2", 900))


def test_a_gateway_that_ends_gives_back_what_it_held() -> None:
    gateways = Gateways(2, cost_budget=100.0, cost_period=1e6)
    del gateways.each["g1"]
    gateways.bank.left("g1")
    for _ in range(3):
        gateways.beat()
    taken = 0
    for _ in range(12):
        charge = gateways.admit("g0", 10, 0)
        taken += admitted(charge)
        if isinstance(charge, Charge):
            charge.settle(Usage(input=10, output=0, cached=0), None, 0, gateways.now)
        gateways.beat()
    assert taken == 10


def test_a_new_plane_goes_on_from_what_gateways_hold() -> None:
    gateways = Gateways(2, cost_budget=100.0, cost_period=1e6)
    charge = gateways.admit("g0", 30, 0)
    assert isinstance(charge, Charge)
    charge.settle(Usage(input=30, output=0, cached=0), None, 0, gateways.now)
    gateways.beat()
    second = gateways.admit("g1", 20, 0)
    assert isinstance(second, Charge)
    second.settle(Usage(input=20, output=0, cached=0), None, 0, gateways.now)
    gateways.bank = Bank(gateways.book, lambda: gateways.now)  # it has saved 30, and was not told of 20
    gateways.bank.configure([gateways.spec])
    for name, one in gateways.each.items():
        gateways.bank.joined(name, one.usage(whole=True))
    assert gateways.bank.report(0.0)[0]["spent"] == pytest.approx(50.0)
    total = 50
    for _ in range(30):
        for name in gateways.each:
            more = gateways.admit(name, 5, 0)
            if isinstance(more, Charge):
                more.settle(Usage(input=5, output=0, cached=0), None, 0, gateways.now)
                total += 5
        gateways.beat()
    assert 100 <= total <= 110


def test_usage_that_was_not_reported_is_reported_later() -> None:
    granted = GrantedTenants()
    spec = TenantSpec(name="t", requests_per_minute=10)
    tenant = granted.tenants([spec])["t"]
    assert tenant.requests_left is not None
    tenant.requests_left.left = 5.0
    tenant.admit(1, None, None, 0.0)
    told = granted.usage()
    tenant.admit(1, None, None, 0.0)
    granted.not_told(told)
    assert granted.usage()["t"].used[0] == 2.0


def test_usage_that_is_told_before_a_plane_knows_its_tenants_is_charged() -> None:
    """Gateways of an earlier plane join the next one as soon as it listens."""
    gateways = Gateways(1, cost_budget=100.0, cost_period=1e6)
    charge = gateways.admit("g0", 30, 0)
    assert isinstance(charge, Charge)
    charge.settle(Usage(input=30, output=0, cached=0), None, 0, gateways.now)
    bank = Bank(UsageBook(), lambda: gateways.now)
    bank.joined("g0", gateways.each["g0"].usage(whole=True))
    bank.configure([gateways.spec])
    assert bank.report(0.0)[0]["spent"] == 30.0
