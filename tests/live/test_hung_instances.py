"""Instances that run but do not respond: the plane detects and replaces them, and no request hangs."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.chaos.clients import Client, LoadRequest, Sample, Verdict, check_text
from bench.chaos.faults import inject_fault
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from pointsman.engines import Simulated
from tests.live.manifests import LIFECYCLE, manifest, simulated
from tests.live.test_recovery import free_port
from tests.simulator.servers import serving

LONG_TIMEOUTS = {"firstTokenTimeout": "5m", "stallTimeout": "5m"}
"""Only the probes can detect a hung instance."""

FAILS_REQUESTS_ONLY = "requests fail on it, although probes do not"

PASSES_PROBES_ONLY = '''
import asyncio
import json


class PassesProbesOnly(asyncio.Protocol):
    """Passes health checks and completes one token; aborts every larger request."""

    def connection_made(self, transport):
        self.transport, self.received = transport, b""

    def data_received(self, data):
        self.received += data
        head, end, body = self.received.partition(b"\\r\\n\\r\\n")
        lengths = [line[15:] for line in head.split(b"\\r\\n") if line.lower().startswith(b"content-length:")]
        length = int(lengths[0]) if lengths else 0
        if not end or len(body) < length:
            return
        self.received = b""
        request = json.loads(body or b"{}")
        if request.get("max_tokens", 1) > 1:
            self.transport.abort()
            return
        content = json.dumps({"choices": [{"text": "hm"}]}).encode()
        self.transport.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(content), content))


async def main():
    server = await asyncio.get_running_loop().create_server(PassesProbesOnly, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


asyncio.run(main())
'''


def replaced(plane: LivePlane, before: dict[str, int], name: str) -> bool:
    now = plane.pids()
    return now.keys() == before.keys() and now[name] != before[name]


@pytest.mark.parametrize("how", ["stopped", "accepts and never responds", "healthy and never responds"])
def test_a_hung_instance_is_replaced_and_its_requests_are_retried(plane: LivePlane, how: str) -> None:
    upstream = {"firstTokenTimeout": "1s"} if how.startswith("healthy") else LONG_TIMEOUTS
    plane.up(manifest(simulated("m", 2), upstream=upstream))
    before = plane.pids()
    with Load(plane.url, ["m"], clients=6) as load:
        plane.until(lambda: len(load.samples) > 20, "load")
        began = time.monotonic()
        if how == "stopped":
            os.kill(before["m-1"], signal.SIGSTOP)
        else:
            url = plane.instances()["m-1"]["url"]
            inject_fault(url, {"fault": "hang", "on": "work" if how.startswith("healthy") else "all"})
        plane.until(lambda: replaced(plane, before, "m-1"), "another process for m-1")
        took_s = time.monotonic() - began
        target = len(load.samples) + 20
        plane.until(lambda: len(load.samples) > target, "load afterwards")
    assert load.unexpected(Verdict.INTERRUPTED) == []
    retried = [one["request_id"] for one in plane.admin.get("requests", limit=10_000)["requests"] if one["tries"] > 1]
    served = {one.request.request_id for one in load.samples if one.verdict is Verdict.SERVED}
    print(f"\n{how}: replaced after {took_s:.1f} s; {len(served & set(retried))} of its requests served elsewhere,")
    print(f"{load.verdicts()['interrupted']} streams interrupted; {plane.instances()['m-1']['reason']}")
    assert served & set(retried)
    assert plane.pids()["m-2"] == before["m-2"]
    assert plane.instances()["m-1"]["restarts"] == 1


def test_requests_of_the_only_instance_wait_for_its_replacement(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 1), upstream=LONG_TIMEOUTS))
    before = plane.pids()
    with Load(plane.url, ["m"], clients=6) as load:
        plane.until(lambda: len(load.samples) > 10, "load")
        os.kill(before["m-1"], signal.SIGSTOP)
        plane.until(lambda: replaced(plane, before, "m-1"), "another process for m-1")
        target = len(load.samples) + 20
        plane.until(lambda: len(load.samples) > target, "load afterwards")
    assert load.unexpected(Verdict.INTERRUPTED) == []


def test_an_instance_that_passes_probes_and_fails_requests_is_withdrawn(plane: LivePlane) -> None:
    """It aborts every request, so it always looks idle and would attract all of them."""
    program = plane.folder / "passes_probes_only.py"
    program.write_text(PASSES_PROBES_ONLY, encoding="utf-8")
    environment = {**os.environ, **plane.environment}
    with subprocess.Popen([sys.executable, program], env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            plane.up(manifest(simulated("m", 1, endpoints=[{"name": "faulty", "url": url}])))
            assert len(plane.pids()) == 2
            with Load(plane.url, ["m"], clients=6) as load:
                plane.until(
                    lambda: FAILS_REQUESTS_ONLY in plane.instances()["faulty"]["reason"],
                    "the faulty instance is detected",
                )
                plane.until(lambda: len(load.samples) > 200, "load afterwards")
            assert load.unexpected() == []
            tries = plane.admin.get("requests", limit=10_000)["requests"]
            print(f"\n{sum(one['tries'] - 1 for one in tries)} failed tries for {len(tries)} requests")
        finally:
            server.kill()


def test_a_late_response_from_a_withdrawn_instance_is_discarded(plane: LivePlane) -> None:
    """Its request is queued again and served once by another instance, and no slot leaks."""
    quick = Simulated(tokens_per_second=100.0, first_token_ms=10.0, output_tokens=1000)
    with serving(quick, "m") as server, ThreadPoolExecutor() as pool:
        slower = {"tokensPerSecond": 70, "outputTokens": 1000}
        managed = simulated(
            "m", 1, maxConcurrency=1, parameters=slower, lifecycle={**LIFECYCLE, "probeTimeout": "300ms"}
        )
        late: dict[str, Any] = {
            "name": "late",
            "url": f"http://127.0.0.1:{server.port}",
            "engine": "simulated",
            "maxConcurrency": 1,
        }
        plane.up(manifest({**managed, "endpoints": [late]}))
        answers = [pool.submit(send, plane.url, f"r-{number}", tokens=300) for number in range(2)]
        plane.until(lambda: plane.status()["deployments"][0]["running"] == 2, "one request on each instance")
        inject_fault(late["url"], {"fault": "hang", "on": "all"})  # the response in progress continues
        plane.until(lambda: plane.instances()["late"]["phase"] == "unhealthy", "the instance is withdrawn")
        assert plane.status()["deployments"][0]["waiting"] == 1
        for answer in answers:
            sample = answer.result()
            assert (sample.verdict, sample.why, sample.instance) == (Verdict.SERVED, "", "m-1")
        [deployment] = plane.status()["deployments"]
        assert (deployment["running"], deployment["waiting"]) == (0, 0)
        assert server.fetch("/stats").json()["cancelled"] == 1


def send(url: str, name: str, tokens: int) -> Sample:
    """Send one request without streaming."""

    async def send() -> Sample:
        where = urlsplit(url)
        client = Client(where.hostname or "", where.port or 80, check_text)
        try:
            return await client.send(LoadRequest(name, "m", f"story {name}", tokens, chat=False, stream=False))
        finally:
            client.close()

    return asyncio.run(send())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_gateway_takes_a_silent_instance_out_by_itself(plane: LivePlane, processes: int) -> None:
    """The plane would probe it after a minute only. Each gateway process sees it by itself."""
    lifecycle = {**LIFECYCLE, "probeInterval": "1m", "probeTimeout": "1m"}
    gateway: dict[str, Any] = {"upstream": LONG_TIMEOUTS, "processes": processes}
    if processes > 1:
        gateway["listen"] = f"127.0.0.1:{free_port()}"
    plane.up(manifest(simulated("m", 2, lifecycle=lifecycle, maxConcurrency=32), **gateway))
    plane.until(lambda: all(one["url"] for one in plane.status()["gateways"]), "gateways listen")
    before = plane.pids()
    with Load(plane.url, ["m"], clients=12) as load:
        plane.until(lambda: len(load.samples) > 60, "load")
        assert plane.instances()["m-1"]["silence"] is None
        os.kill(before["m-1"], signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            plane.until(lambda: plane.instances()["m-1"]["silence"] is not None, "it is silent")
            silent_s = time.monotonic() - stopped_at
            shown = plane.pointsman("status").stdout
            target = len(load.samples) + 100
            plane.until(lambda: len(load.samples) > target, "load on the other")
        finally:
            os.kill(before["m-1"], signal.SIGCONT)
        continued_at = time.monotonic()
        plane.until(lambda: plane.instances()["m-1"]["silence"] is None, "it is heard")
        heard_s = time.monotonic() - continued_at
        plane.until(
            lambda: any(one.began > continued_at and one.instance == "m-1" for one in list(load.samples)), "use"
        )
    assert load.unexpected() == []
    tries = {one["request_id"]: one["tries"] for one in plane.admin.get("requests", limit=10_000)["requests"]}
    moved = [one for one in load.samples if tries.get(one.request.request_id, 1) > 1]
    last_s, moved_s = max(one.began - stopped_at for one in moved), max(one.ended - stopped_at for one in moved)
    print(
        f"\nSIGSTOP, {processes} gateways: silent after {silent_s:.2f} s; last request sent to it after {last_s:.2f} s;"
    )
    print(f"{len(moved)} requests moved, the last one answered after {moved_s:.2f} s; heard {heard_s:.2f} s after")
    print(f"SIGCONT; {len(load.samples)} requests, all served")
    assert "silent: no byte for" in shown
    assert {one.instance for one in moved} == {"m-2"}, "before it went on"
    assert all(one.ended < continued_at for one in moved)
    assert plane.pids() == before
