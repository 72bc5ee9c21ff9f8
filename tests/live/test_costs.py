"""Costs on a live plane: prices of the manifest, throughputs that are learned, budgets of requests."""

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.chaos.planes import LivePlane
from pointsman.engines import Simulated
from tests.live.manifests import hashed, manifest, simulated
from tests.simulator.servers import serving

KEY = "k-red"
PAID = {"perMillionInputTokens": 1000, "perMillionOutputTokens": 3000}
"""What tenants pay, whatever an instance costs."""
SLOW = {"firstTokenMs": 40, "tokensPerSecond": 400}
FAST = {"firstTokenMs": 5, "tokensPerSecond": 4000}


@pytest.fixture(scope="module")
def live(module_plane: LivePlane) -> Iterator[LivePlane]:
    with serving(Simulated(tokens_per_second=4000.0), "both") as rented, serving(Simulated(), "both") as owned:
        servers = [
            {
                "name": "rented",
                "url": f"http://127.0.0.1:{rented.port}",
                "engine": "simulated",
                "pricePerHour": 360,
                "gpus": 2,
            },
            {
                "name": "owned",
                "url": f"http://127.0.0.1:{owned.port}",
                "engine": "simulated",
                "pricePerHour": 1,
                "gpus": 0,
            },
        ]
        module_plane.up(
            manifest(
                simulated("cheap", 1, price={"perInstanceHour": 0.36, "tokensPerSecond": 100, **PAID}, parameters=SLOW),
                simulated("dear", 1, price={"perInstanceHour": 360, "tokensPerSecond": 1000, **PAID}, parameters=FAST),
                simulated("unpriced", 1),
                {"name": "both", "model": "both", "endpoints": servers, "scheduling": {"policy": "cost-optimized"}},
                tenants=[{"name": "red", "costBudget": 1000}],
                keys=[{"tenant": "red", "sha256": hashed(KEY)}],
            )
        )
        yield module_plane
        module_plane.stop()


def complete(
    live: LivePlane, model: str, headers: Mapping[str, str] = {}, **extension: Any
) -> tuple[int, str, dict[str, Any]]:
    """The status, the instance, and the content."""
    connection = http.client.HTTPConnection(urlsplit(live.url).netloc, timeout=30.0)
    try:
        body = {"model": model, "prompt": "count the wagons", "max_tokens": 20, "pointsman": extension}
        sent = {"content-type": "application/json", "authorization": f"Bearer {KEY}", **headers}
        connection.request("POST", "/v1/completions", json.dumps(body), sent)
        response = connection.getresponse()
        return response.status, response.getheader("x-pointsman-instance", ""), json.loads(response.read())
    finally:
        connection.close()


def refusal(live: LivePlane, model: str, budget: float) -> tuple[int, str]:
    status, _, content = complete(live, model, cost_budget=budget)
    return status, content["error"]["reason"]["code"]


def test_a_budget_decides_where_a_request_may_go(live: LivePlane) -> None:
    # 24 tokens: 0.36 / 3600 / 100 * 24 = 0.000024 on one, 0.0024 on the other
    assert complete(live, "cheap", cost_budget=0.0001)[:2] == (200, "cheap-1")
    assert refusal(live, "dear", 0.0001) == (429, "beyond-budget")
    assert complete(live, "dear", cost_budget=0.1)[:2] == (200, "dear-1")
    by_header = [complete(live, "dear", {"x-pointsman-cost-budget": text}) for text in ("0.0001", "0.1", "little")]
    assert [status for status, *_ in by_header] == [429, 200, 400]
    assert by_header[0][2]["error"]["reason"]["code"] == "beyond-budget"


def test_a_budget_that_cannot_be_judged_is_refused_at_once(live: LivePlane) -> None:
    assert refusal(live, "unpriced", 1e9) == (429, "budget-not-judged")
    assert complete(live, "unpriced")[0] == 200


def test_throughput_is_learned_and_shown(live: LivePlane) -> None:
    for _ in range(10):
        complete(live, "cheap")
    one = live.instances()["cheap-1"]
    assert one["price_per_hour"] == 0.36
    assert one["tokens_per_second"] != 100
    assert one["cost_per_million_tokens"] == pytest.approx(100 / one["tokens_per_second"])
    assert one["latency_ms"] > 0
    assert (one["gpus"], one["tensor_parallel_size"], one["pipeline_parallel_size"]) == (0, 1, 1)
    shown = live.pointsman("status").stdout
    assert "tokens/s" in shown
    assert "cost/1M" in shown


def test_the_cheapest_server_gets_the_requests(live: LivePlane) -> None:
    assert {complete(live, "both")[1] for _ in range(10)} == {"owned"}
    assert complete(live, "both", cost_budget=0.01)[1] == "owned"
    assert refusal(live, "both", 1e-9) == (429, "beyond-budget")
    assert live.instances("both")["rented"]["gpus"] == 2
    assert '"both" has no engine: its servers are started by others' in live.pointsman("scale", "both", "--auto").stderr


def test_an_estimate_is_part_of_the_decision(live: LivePlane) -> None:
    status, _, _ = complete(live, "cheap", cost_budget=0.01)
    assert status == 200
    newest = live.admin.get("requests")["requests"][0]["request_id"]
    record = live.admin.get("requests", newest)
    assert 0 < record["decision"]["estimated_cost"] < 0.01


def test_a_tenant_has_spent_the_sum_of_its_records_also_after_a_restart(live: LivePlane) -> None:
    def records() -> dict[str, float]:
        found = live.admin.get("requests", limit=1000)["requests"]
        return {one["request_id"]: one["cost"] or 0.0 for one in found if one["tenant"] == "red"}

    def spent() -> float:
        [red] = live.status()["tenants"]
        return float(red["spent"])

    test_a_budget_decides_where_a_request_may_go(live)
    before = records()
    assert sum(before.values()) == pytest.approx(spent()) != 0.0
    assert live.stop() == 0
    live.up()
    assert records() == before
    assert sum(before.values()) == pytest.approx(spent())
    test_a_budget_decides_where_a_request_may_go(live)
    after = records()
    assert after.items() > before.items()
    assert sum(after.values()) == pytest.approx(spent()) != sum(before.values())
