"""One proxy under the load of one scenario: what it spent, what clients saw, what it held."""

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.gateway import traffic
from bench.gateway.cpu import cpu_ns, family, resident_mb
from bench.gateway.processes import Process
from bench.gateway.scenarios import CHECK, OPEN_STREAMS, Scenario
from bench.gateway.tools import Loaded, Tools

DIRECT = "direct"
"""The name of no proxy at all."""


class Proxy(msgspec.Struct, frozen=True):
    """A proxy that runs, or none: clients talk to an endpoint."""

    name: str
    decides: str
    version: str
    port: int
    process: Process | None = None

    def pids(self) -> list[int]:
        return family(self.process.pid) if self.process else []


class Figures(msgspec.Struct, frozen=True):
    """One run of one scenario."""

    cpu_us: float
    """Of the proxy."""
    requests: int
    chunks: int
    body_bytes: float
    """Per request."""
    errors: int
    complaint: str
    seconds: float
    p50_ms: float
    p99_ms: float
    first_us: float
    """Median time to the first event."""

    @property
    def us_per_request(self) -> float:
        return self.cpu_us / self.requests

    @property
    def us_per_chunk(self) -> float:
        """Its share of the request included."""
        return self.cpu_us / self.chunks

    @property
    def ns_per_byte(self) -> float:
        return self.us_per_request * 1000 / self.body_bytes

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def core_share(self) -> float:
        """How busy the proxy's core was with it: below 1, somebody else was the limit of requests per second."""
        return self.cpu_us / self.seconds / 1e6


class Memory(msgspec.Struct, frozen=True):
    """What a proxy holds, in MB."""

    rest: float
    streams: float
    """While the streams are open, the most."""
    open: int
    """Streams that the backend had open."""


class Bench:
    """The backend, and the means to load whatever stands in front of it."""

    def __init__(self, tools: Tools, endpoints: Sequence[int], folder: Path) -> None:
        self._tools = tools
        self._endpoints = endpoints
        self._folder = folder
        self._files: dict[str, Path] = {}

    def measure(self, proxy: Proxy, scenario: Scenario, seconds: float, warm_s: float) -> Figures:
        with self._load(proxy, scenario, seconds, warm_s) as load:
            load.hear()
            pids = proxy.pids()
            before = cpu_ns(pids)
            load.tell("go")
            seen = msgspec.json.decode(load.hear(), type=Loaded)
            spent = cpu_ns(pids) - before
        return Figures(
            cpu_us=spent / 1000,
            requests=seen.requests,
            chunks=seen.requests * scenario.tokens,
            body_bytes=traffic.body_bytes(scenario.requests),
            errors=seen.errors,
            complaint=seen.complaint,
            seconds=seen.seconds,
            p50_ms=seen.latency_p50_us / 1000,
            p99_ms=seen.latency_p99_us / 1000,
            first_us=seen.first_p50_us,
        )

    def memory(self, proxy: Proxy) -> Memory:
        """Resident sets before and during many open streams."""
        rest = resident_mb(proxy.pids())
        with self._load(proxy, OPEN_STREAMS, 0, 0) as load:
            load.hear()
            load.tell("go")
            most_open, most = 0, rest
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                time.sleep(0.25)
                most_open = max(most_open, sum(count["open"] for count in self._counts()))
                most = max(most, resident_mb(proxy.pids()))
            load.hear()
        return Memory(rest, most, most_open)

    def check(self, proxy: Proxy) -> str:
        """Right answers, by way of all endpoints? Says what was found; raises if it is wrong."""
        expected, _ = ask(self._endpoints[0], traffic.small()[0])
        answer, _ = ask(proxy.port, traffic.small()[0])
        if json.loads(answer) != json.loads(expected):
            raise RuntimeError(f"{proxy.name} answers {answer[:200]!r}")
        streamed, kind = ask(proxy.port, traffic.small(7, 1, stream=True)[0])
        if streamed.count(b"data: {") != 7 or not streamed.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"{proxy.name} streams {streamed[:200]!r}")
        before = self._counts()
        with self._load(proxy, CHECK, 0.3, 0) as load:
            load.hear()
            load.tell("go")
            seen = msgspec.json.decode(load.hear(), type=Loaded)
        shares = [
            (now["requests"] - then["requests"]) / seen.requests
            for now, then in zip(self._counts(), before, strict=True)
        ]
        if sum(share > 0 for share in shares) < 2 or seen.errors:
            raise RuntimeError(f"{proxy.name}: {seen.errors} errors ({seen.complaint}), endpoints' shares {shares}")
        used = [share for share in shares if share > 0]
        before = self._counts()
        for _ in range(len(shares)):
            ask(proxy.port, traffic.small()[0])
        keeps = sum(now["requests"] > then["requests"] for now, then in zip(self._counts(), before, strict=True))
        same = "byte for byte" if answer == expected else "as JSON"
        return (
            f"answers as the endpoint does ({same}; streams as {kind}), {len(used)} of {len(shares)} endpoints used, "
            f"{min(used):.0%} to {max(used):.0%} of the requests each, one session on {keeps} of them"
        )

    def rest(self, proxies: Sequence[Proxy], seconds: float) -> Mapping[str, float]:
        """Milliseconds of CPU per second of each while nobody asks anything."""
        time.sleep(1.0)
        before = {proxy.name: cpu_ns(proxy.pids()) for proxy in proxies}
        time.sleep(seconds)
        return {proxy.name: (cpu_ns(proxy.pids()) - before[proxy.name]) / 1e6 / seconds for proxy in proxies}

    def _load(self, proxy: Proxy, scenario: Scenario, seconds: float, warm_s: float) -> Process:
        file = self._folder / f"{scenario.name}.requests"
        if not file.exists():
            traffic.write(scenario.requests, file)
        return self._tools.load(
            proxy.port,
            file,
            connections=scenario.connections,
            warm_s=warm_s,
            seconds=seconds,
            spread_ms=scenario.spread_ms,
            events=scenario.events,
        )

    def _counts(self) -> list[dict[str, int]]:
        counts = []
        for endpoint in self._endpoints:
            connection = http.client.HTTPConnection("127.0.0.1", endpoint, timeout=5)
            connection.request("GET", "/counts")
            counts.append(json.loads(connection.getresponse().read()))
            connection.close()
        return counts


def ask(port: int, request: bytes, timeout_s: float = 5.0) -> tuple[bytes, str]:
    """One request by way of a plain client: the body and the content type. OSError if it is not answered with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        body = request.partition(b"\r\n\r\n")[2]
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"status {response.status}: {answer[:200]!r}")
    return answer, response.getheader("content-type") or "nothing"
