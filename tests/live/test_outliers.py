"""Engines that answer with errors of their own: their peers serve the requests, and they are ejected for a time."""

import time
from datetime import datetime, timedelta
from typing import Any

import pytest

from bench.chaos.clients import Verdict
from bench.chaos.faults import inject_fault
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from tests.live.manifests import manifest, simulated

ENOUGH = 150
"""Requests of each part of a test."""


@pytest.fixture(scope="module")
def live(module_plane: LivePlane) -> LivePlane:
    four = simulated("m", replicas=4)
    four["lifecycle"] = {**four["lifecycle"], "ejection": "2s", "ejectionMax": "4s"}
    module_plane.up(manifest(four))
    return module_plane


def is_out(instance: dict[str, Any]) -> bool:
    return bool(instance["phase"] == "ejected")


@pytest.mark.parametrize("status", [404])  # tests/live/test_chaos.py has the others
def test_one_engine_of_four_that_answers_with_an_error_costs_no_requests(live: LivePlane, status: int) -> None:
    live.until(live.is_settled, "four instances")
    before = live.pids()
    with Load(live.url, ["m"], clients=12, tokens=(5, 15), seed=status) as load:
        live.until(lambda: len(load.samples) > 20, "load")
        inject_fault(live.instances()["m-1"]["url"], {"fault": "status", "status": status})
        live.until(lambda: is_out(live.instances()["m-1"]), "it is ejected")
        out = live.instances()["m-1"]
        seen = len(load.samples)
        live.until(lambda: len(load.samples) > seen + ENOUGH, "load on the others")
        live.until(lambda: live.pids().get("m-1", before["m-1"]) != before["m-1"], "it is restarted: probes fail")
    served = load.verdicts()[Verdict.SERVED.value]
    print(f"\n{status}: {served} of {len(load.samples)} served; {out['reason']}")
    assert served >= 0.99 * len(load.samples), load.unexpected()[:5]
    assert f"it answered {status} to" in out["reason"]
    assert out["cause"]["code"] == "ejected"
    assert 0 <= out["until_s"] <= 4
    for name, pid in live.pids().items():
        assert (pid == before[name]) is (name != "m-1"), "only the faulty engine is restarted"


def test_explain_and_metrics_name_an_ejected_instance(live: LivePlane) -> None:
    live.until(live.is_settled, "four instances")
    with Load(live.url, ["m"], clients=8, tokens=(5, 15), seed=7) as load:
        inject_fault(live.instances()["m-2"]["url"], {"fault": "status", "status": 404})
        live.until(lambda: is_out(live.instances()["m-2"]), "it is ejected")
        seen = len(load.samples)
        live.until(lambda: len(load.samples) > seen + 20, "requests after that")
        shown = live.pointsman("status").stdout
        newest = live.admin.get("requests")["requests"][0]["request_id"]
        why = live.pointsman("explain", newest).stdout
        record = live.admin.get("requests", newest)
    assert "ejected, " in shown
    assert "it answered 404 to" in shown
    assert "ejected: " in why
    assert "m-2 gets no requests until 20" in why
    arrived, until = (datetime.fromisoformat(one) for one in (record["arrived"], record["closed_until"]["m-2"]))
    assert timedelta(0) < until - arrived <= timedelta(seconds=4.1), "ejectionMax is 4 s"
    inject_fault(live.instances()["m-2"]["url"], None)


def test_an_engine_that_recovers_comes_back_without_a_restart(live: LivePlane) -> None:
    live.until(live.is_settled, "four instances")
    before = live.pids()
    with Load(live.url, ["m"], clients=8, tokens=(5, 15), seed=8):
        url = live.instances()["m-3"]["url"]
        inject_fault(url, {"fault": "status", "status": 401})
        live.until(lambda: is_out(live.instances()["m-3"]), "it is ejected")
        inject_fault(url, None)
        live.until(lambda: live.instances()["m-3"]["phase"] == "ready", "it has proved itself")
        began = time.monotonic()
        live.until(
            lambda: live.instances()["m-3"]["in_flight"] > 0 or time.monotonic() - began > 30, "requests go to it"
        )
    assert live.pids() == before


def test_if_all_engines_answer_the_same_the_clients_are_wrong(live: LivePlane) -> None:
    live.until(live.is_settled, "four instances")
    before, urls = live.pids(), [one["url"] for one in live.instances().values()]
    for url in urls:
        inject_fault(url, {"fault": "status", "status": 400, "probability": 0.9})
    with Load(live.url, ["m"], clients=8, tokens=(5, 15), seed=9) as load:
        live.until(lambda: len(load.samples) > 3 * ENOUGH, "errors")
        phases = {name: one["phase"] for name, one in live.instances().items()}
    for url in urls:
        inject_fault(url, None)
    assert set(phases.values()) == {"ready"}
    assert live.pids() == before
    assert load.verdicts()[Verdict.REFUSED.value] > ENOUGH
