"""Instances that live and do not work: each way of it is noticed, and no request waits for them for ever."""

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

from bench.chaos.clients import Ask, Client, Sample, Verdict, word_for_word
from bench.chaos.load import Load
from bench.chaos.mischief import tell
from bench.chaos.planes import LivePlane
from pointsman.engines import Simulated
from tests.live.manifests import LIFECYCLE, manifest, simulated
from tests.simulator.servers import serving

PATIENT = {"firstTokenTimeout": "5m", "stallTimeout": "5m"}
"""Then nobody but the probes can find out."""

FOUND_OUT = "requests fail on it, although probes do not"

FLATTERER = '''
import asyncio
import json


class Flatterer(asyncio.Protocol):
    """Healthy, and fine with a completion of one token; whoever really wants something is cut off."""

    def connection_made(self, transport):
        self.transport, self.heard = transport, b""

    def data_received(self, data):
        self.heard += data
        head, end, body = self.heard.partition(b"\\r\\n\\r\\n")
        named = [line[15:] for line in head.split(b"\\r\\n") if line.lower().startswith(b"content-length:")]
        length = int(named[0]) if named else 0
        if not end or len(body) < length:
            return
        self.heard = b""
        asked = json.loads(body or b"{}")
        if asked.get("max_tokens", 1) > 1:
            self.transport.abort()
            return
        said = json.dumps({"choices": [{"text": "hm"}]}).encode()
        self.transport.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(said), said))


async def main():
    server = await asyncio.get_running_loop().create_server(Flatterer, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


asyncio.run(main())
'''


def replaced(plane: LivePlane, before: dict[str, int], name: str) -> bool:
    now = plane.pids()
    return now.keys() == before.keys() and now[name] != before[name]


@pytest.mark.parametrize("how", ["stopped", "accepts and never answers", "healthy and never answers"])
def test_a_hung_instance_is_replaced_and_its_requests_go_elsewhere(plane: LivePlane, how: str) -> None:
    upstream = {"firstTokenTimeout": "1s"} if how.startswith("healthy") else PATIENT
    plane.up(manifest(simulated("m", 2), upstream=upstream))
    before = plane.pids()
    with Load(plane.url, ["m"], clients=6) as load:
        plane.until(lambda: len(load.samples) > 20, "load")
        began = time.monotonic()
        if how == "stopped":
            os.kill(before["m-1"], signal.SIGSTOP)
        else:
            url = plane.instances()["m-1"]["url"]
            tell(url, {"fault": "hang", "on": "work" if how.startswith("healthy") else "all"})
        plane.until(lambda: replaced(plane, before, "m-1"), "another process for m-1")
        took_s = time.monotonic() - began
        enough = len(load.samples) + 20
        plane.until(lambda: len(load.samples) > enough, "load afterwards")
    assert load.bad(Verdict.BROKEN_OFF) == []
    again = [one["request_id"] for one in plane.admin.get("requests", limit=10_000)["requests"] if one["tries"] > 1]
    served = {one.ask.request_id for one in load.samples if one.verdict is Verdict.SERVED}
    print(f"\n{how}: replaced after {took_s:.1f} s; {len(served & set(again))} of its requests served elsewhere,")
    print(f"{load.verdicts()['broken off']} broken off in the middle; {plane.instances()['m-1']['reason']}")
    assert served & set(again)
    assert plane.pids()["m-2"] == before["m-2"]
    assert plane.instances()["m-1"]["restarts"] == 1


def test_requests_of_a_single_hung_instance_wait_for_the_next(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 1), upstream=PATIENT))
    before = plane.pids()
    with Load(plane.url, ["m"], clients=6) as load:
        plane.until(lambda: len(load.samples) > 10, "load")
        os.kill(before["m-1"], signal.SIGSTOP)
        plane.until(lambda: replaced(plane, before, "m-1"), "another process for m-1")
        enough = len(load.samples) + 20
        plane.until(lambda: len(load.samples) > enough, "load afterwards")
    assert load.bad(Verdict.BROKEN_OFF) == []


def test_one_that_only_does_well_in_probes_is_found_out(plane: LivePlane) -> None:
    """It cuts every real request off, so it always looks idle, and would attract them all."""
    program = plane.folder / "flatterer.py"
    program.write_text(FLATTERER, encoding="utf-8")
    environment = {**os.environ, **plane.environment}
    with subprocess.Popen([sys.executable, program], env=environment, stdout=subprocess.PIPE, text=True) as flatterer:
        try:
            assert flatterer.stdout is not None
            url = flatterer.stdout.readline().strip()
            plane.up(manifest(simulated("m", 1, endpoints=[{"name": "flatterer", "url": url}])))
            assert len(plane.pids()) == 2
            with Load(plane.url, ["m"], clients=6) as load:
                plane.until(lambda: FOUND_OUT in plane.instances()["flatterer"]["reason"], "it is found out")
                plane.until(lambda: len(load.samples) > 200, "load afterwards")
            assert load.bad() == []
            tries = plane.admin.get("requests", limit=10_000)["requests"]
            print(f"\n{sum(one['tries'] - 1 for one in tries)} tries on it for {len(tries)} requests")
        finally:
            flatterer.kill()


def test_an_answer_that_comes_after_its_instance_was_withdrawn_is_not_used(plane: LivePlane) -> None:
    """Its request is back in the queue then, and will be answered by another: once, and nobody loses a place."""
    quick = Simulated(tokens_per_second=100.0, first_token_ms=10.0, output_tokens=1000)
    with serving(quick, "m") as server, ThreadPoolExecutor() as pool:
        slower = {"tokensPerSecond": 70, "outputTokens": 1000}
        own = simulated("m", 1, maxConcurrency=1, parameters=slower, lifecycle={**LIFECYCLE, "probeTimeout": "300ms"})
        late: dict[str, Any] = {
            "name": "late",
            "url": f"http://127.0.0.1:{server.port}",
            "engine": "simulated",
            "maxConcurrency": 1,
        }
        plane.up(manifest({**own, "endpoints": [late]}))
        answers = [pool.submit(ask, plane.url, f"r-{number}", tokens=300) for number in range(2)]
        plane.until(lambda: plane.status()["deployments"][0]["running"] == 2, "one on each")
        tell(late["url"], {"fault": "hang", "on": "all"})  # the answer that has begun goes on
        plane.until(lambda: plane.instances()["late"]["phase"] == "unhealthy", "it is withdrawn")
        assert plane.status()["deployments"][0]["waiting"] == 1
        for answer in answers:
            sample = answer.result()
            assert (sample.verdict, sample.why, sample.instance) == (Verdict.SERVED, "", "m-1")
        [deployment] = plane.status()["deployments"]
        assert (deployment["running"], deployment["waiting"]) == (0, 0)
        assert server.ask("/stats").json()["cancelled"] == 1


def ask(url: str, name: str, tokens: int) -> Sample:
    """One plain request."""

    async def asked() -> Sample:
        where = urlsplit(url)
        client = Client(where.hostname or "", where.port or 80, word_for_word)
        try:
            return await client.ask(Ask(name, "m", f"story {name}", tokens, chat=False, stream=False))
        finally:
            client.close()

    return asyncio.run(asked())
