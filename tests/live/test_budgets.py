"""Budgets of tenants on a real plane: however many requests come at once, one of them at most exceeds a budget."""

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import hashed, manifest, simulated
from tests.live.test_gateway_processes import are_connected
from tests.live.test_recovery import free_port

PRICE = {"perMillionOutputTokens": 1_000_000}
"""An answer costs 1 per token."""
BUDGET = 100
NAMES = ("direct", "unlimited-answers", "streams", "steps", "handles")


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> LivePlane:
    engine = {"tokensPerSecond": 100, "maxNumSeqs": 64, "outputTokens": 60}
    module_plane.up(
        manifest(
            simulated("m", 2, price=PRICE, parameters=engine),
            keys=[{"sha256": hashed(name), "tenant": name} for name in NAMES],
            tenants=[{"name": name, "costBudget": BUDGET} for name in NAMES],
        )
    )
    with pm.InputNode() as prompt:
        step = pm.model("m").complete.bind(prompt, max_tokens=50)
    for name, root in (("step", step), ("handle", nodes.Caller.bind(pm.model("m")))):
        text = pm.build(root, name=name, folder=module_plane.folder).to_yaml()
        module_plane.admin.post("applications", body={"text": text, "folder": str(module_plane.folder)})
    module_plane.until(module_plane.is_settled, "applications ready")
    return module_plane


def all_at_once(plane: LivePlane, number: int, path: str, body: Any, key: str) -> Counter[int]:
    """The statuses of requests, each on a connection of its own."""
    url, headers = f"{plane.url}{path}", {"authorization": f"Bearer {key}"}

    def send(_: int) -> int:
        return httpx.post(url, json=body, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(number) as pool:
        return Counter(pool.map(send, range(number)))


def tenant(plane: LivePlane, name: str) -> dict[str, Any]:
    [found] = [one for one in plane.status()["tenants"] if one["name"] == name]
    return dict(found)


def test_sixty_requests_at_once(plane: LivePlane) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 50}
    statuses = all_at_once(plane, 60, "/v1/completions", body, "direct")
    assert statuses == {200: 2, 429: 58}
    usage = tenant(plane, "direct")
    assert (usage["spent"], usage["reserved"], usage["budget"], usage["in_flight"]) == (100, 0, 100, 0)


def test_sixty_requests_at_once_without_a_limit(plane: LivePlane) -> None:
    """The engine writes 60 tokens then, as its parameters say: one fits, then one more may exceed the budget."""
    statuses = all_at_once(plane, 60, "/v1/completions", {"model": "m", "prompt": "x"}, "unlimited-answers")
    assert statuses[200] + statuses[429] == 60
    assert statuses[200] in (1, 2)
    usage = tenant(plane, "unlimited-answers")
    assert (usage["spent"], usage["reserved"]) == (60 * statuses[200], 0)


def test_streams_are_charged_as_they_grow(plane: LivePlane) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 90, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer streams"}
    with httpx.stream("POST", f"{plane.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(20):
            next(lines)
        usage = tenant(plane, "streams")
        assert usage["spent"] >= 18
        assert usage["spent"] + usage["reserved"] == 90
        assert list(lines)[-1] == "data: [DONE]"
    plane.until(lambda: tenant(plane, "streams")["in_flight"] == 0, "the stream is settled")
    assert tenant(plane, "streams")["spent"] == pytest.approx(90, abs=2)


@pytest.mark.parametrize(("application", "key", "cost"), [("step", "steps", 50), ("handle", "handles", 4)])
def test_models_that_applications_call_fit_into_the_budget(
    plane: LivePlane, application: str, key: str, cost: int
) -> None:
    """Also through a handle, whose calls are not known in advance."""
    total: Counter[int] = Counter()
    for _ in range(10):
        total += all_at_once(plane, 30, f"/{application}", "x", key)
        usage = tenant(plane, key)
        assert usage["spent"] <= BUDGET + cost
        if usage["spent"] > BUDGET - cost:
            break
    assert set(total) == {200, 429}
    assert usage["spent"] >= BUDGET - cost
    assert (usage["reserved"], usage["in_flight"]) == (0, 0)


def spending_plane(plane: LivePlane, **gateway: Any) -> None:
    engine = {"tokensPerSecond": 50, "maxNumSeqs": 64}
    plane.up(
        manifest(
            simulated("m", 1, price=PRICE, parameters=engine),
            keys=[{"sha256": hashed("red"), "tenant": "red"}],
            tenants=[{"name": "red", "costBudget": BUDGET, "costPeriod": "1h", "requestsPerMinute": 600}],
            **gateway,
        )
    )


def ask(plane: LivePlane, tokens: int) -> int:
    body = {"model": "m", "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
    headers = {"authorization": "Bearer red"}
    return httpx.post(f"{plane.url}/v1/completions", json=body, headers=headers, timeout=60).status_code


def stream(plane: LivePlane, tokens: int) -> AbstractContextManager[httpx.Response]:
    body = {"model": "m", "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer red"}
    return httpx.stream("POST", f"{plane.url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_a_tenant_has_used_survives(tmp_path: Path, how: str) -> None:
    plane = LivePlane(tmp_path)
    try:
        spending_plane(plane)
        assert ask(plane, 60) == 200
        before = tenant(plane, "red")
        assert before["spent"] == 60
        if how == "killed":
            time.sleep(1.1)  # what is older than a second has been saved, whatever happens
            plane.kill()
        else:
            assert plane.stop() == 0
        plane.up()
        after = tenant(plane, "red")
        assert (after["spent"], after["reserved"], after["in_flight"]) == (60, 0, 0)
        assert after["period_ends"] == pytest.approx(before["period_ends"], abs=2.0)
        assert after["requests_left"] >= before["requests_left"]
        assert ask(plane, 41) == 200, "it is alone, and something is left"
        assert ask(plane, 1) == 429
        assert tenant(plane, "red")["spent"] == 101
    finally:
        plane.close()


def test_what_a_stream_has_used_survives_a_kill(tmp_path: Path) -> None:
    """All but the last second of it."""
    plane = LivePlane(tmp_path)
    try:
        spending_plane(plane)
        came: list[float] = []
        with suppress(httpx.HTTPError), stream(plane, 1000) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    came.append(time.monotonic())
                if len(came) == 120:
                    plane.kill()
        killed_at = came[-1]
        plane.up()
        saved = tenant(plane, "red")["spent"]
        assert saved >= sum(at < killed_at - 1.0 for at in came)
        assert saved <= len(came) + 1
        assert ask(plane, 1) == (429 if saved >= BUDGET else 200)
    finally:
        plane.close()


@pytest.mark.parametrize("killed", ["plane", "gateway", "all"])
def test_what_a_stream_has_used_survives_a_kill_of_any_process(tmp_path: Path, killed: str) -> None:
    """With two gateway processes: all but the last second of it."""
    plane = LivePlane(tmp_path)
    try:
        spending_plane(plane, processes=2, listen=f"127.0.0.1:{free_port()}")
        plane.until(lambda: are_connected(plane), "both gateways listen")
        pids = {one["name"]: one["pid"] for one in plane.status()["gateways"]}
        came: list[float] = []
        killed_at = 0.0
        with suppress(httpx.HTTPError), stream(plane, 1000) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                came.append(time.monotonic())
                if len(came) == 120:
                    killed_at = came[-1]
                    if killed != "gateway":
                        plane.kill()
                    if killed != "plane":  # the stream is at one of them
                        for pid in pids.values():
                            os.kill(pid, signal.SIGKILL)
                    if killed == "plane":
                        plane.up()
                if killed == "plane" and len(came) == 170:
                    break
        if killed == "all":
            plane.up()
        plane.until(lambda: are_connected(plane), "both gateways listen")
        if killed == "plane":
            assert len(came) == 170, "the stream goes on without a plane"
            kept = len(came) - sum(killed_at - 1.0 <= at <= killed_at for at in came)
            plane.until(lambda: tenant(plane, "red")["spent"] >= kept, "the next plane is told the rest")
            return
        saved = tenant(plane, "red")["spent"]
        assert saved >= sum(at < killed_at - 1.0 for at in came)
        assert saved <= len(came) + 1
        assert ask(plane, 1) == (429 if saved >= BUDGET else 200)
    finally:
        plane.close()
