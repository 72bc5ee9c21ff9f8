"""One proxy under the load of one scenario: CPU time, latency and memory."""

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
from bench.gateway.tools import LoadResult, Tools

DIRECT = "direct"
"""Name for connections without a proxy."""


class Proxy(msgspec.Struct, frozen=True):
    """A running proxy; without a process, an endpoint that clients connect to directly."""

    name: str
    selection: str
    version: str
    port: int
    process: Process | None = None

    def pids(self) -> list[int]:
        return family(self.process.pid) if self.process else []


class Figures(msgspec.Struct, frozen=True):
    """The figures of one round."""

    cpu_us: float
    """CPU time of the proxy."""
    requests: int
    chunks: int
    body_bytes: float
    """Per request."""
    errors: int
    first_error: str
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
        """Includes its share of the request."""
        return self.cpu_us / self.chunks

    @property
    def ns_per_byte(self) -> float:
        return self.us_per_request * 1000 / self.body_bytes

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def core_share(self) -> float:
        """Use of the proxy's core. Below 1, the proxy did not limit the requests per second."""
        return self.cpu_us / self.seconds / 1e6


class Memory(msgspec.Struct, frozen=True):
    """Resident memory of a proxy, in MB."""

    idle: float
    streams: float
    """Maximum while the streams are open."""
    open: int
    """Maximum number of streams open at the backend."""


class Bench:
    """Puts load on a proxy in front of the backend."""

    def __init__(self, tools: Tools, endpoints: Sequence[int], folder: Path) -> None:
        self._tools = tools
        self._endpoints = endpoints
        self._folder = folder
        self._files: dict[str, Path] = {}

    def measure(self, proxy: Proxy, scenario: Scenario, seconds: float, warm_s: float) -> Figures:
        with self._load(proxy, scenario, seconds, warm_s) as load:
            load.read_line()
            pids = proxy.pids()
            before = cpu_ns(pids)
            load.write_line("go")
            result = msgspec.json.decode(load.read_line(), type=LoadResult)
            spent = cpu_ns(pids) - before
        return Figures(
            cpu_us=spent / 1000,
            requests=result.requests,
            chunks=result.requests * scenario.tokens,
            body_bytes=traffic.body_bytes(scenario.requests),
            errors=result.errors,
            first_error=result.first_error,
            seconds=result.seconds,
            p50_ms=result.latency_p50_us / 1000,
            p99_ms=result.latency_p99_us / 1000,
            first_us=result.first_p50_us,
        )

    def memory(self, proxy: Proxy) -> Memory:
        """Resident set size before and during many open streams."""
        idle = resident_mb(proxy.pids())
        with self._load(proxy, OPEN_STREAMS, 0, 0) as load:
            load.read_line()
            load.write_line("go")
            max_open, max_mb = 0, idle
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                time.sleep(0.25)
                max_open = max(max_open, sum(count["open"] for count in self._counts()))
                max_mb = max(max_mb, resident_mb(proxy.pids()))
            load.read_line()
        return Memory(idle, max_mb, max_open)

    def check(self, proxy: Proxy) -> str:
        """Check responses and the use of endpoints. Returns a description; raises RuntimeError if a check fails."""
        expected, _ = post(self._endpoints[0], traffic.small()[0])
        answer, _ = post(proxy.port, traffic.small()[0])
        if json.loads(answer) != json.loads(expected):
            raise RuntimeError(f"{proxy.name} returns {answer[:200]!r}")
        streamed, kind = post(proxy.port, traffic.small(7, 1, stream=True)[0])
        if streamed.count(b"data: {") != 7 or not streamed.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"{proxy.name} streams {streamed[:200]!r}")
        before = self._counts()
        with self._load(proxy, CHECK, 0.3, 0) as load:
            load.read_line()
            load.write_line("go")
            result = msgspec.json.decode(load.read_line(), type=LoadResult)
        shares = [
            (now["requests"] - then["requests"]) / result.requests
            for now, then in zip(self._counts(), before, strict=True)
        ]
        if sum(share > 0 for share in shares) < 2 or result.errors:
            raise RuntimeError(
                f"{proxy.name}: {result.errors} errors ({result.first_error}), endpoints' shares {shares}"
            )
        used = [share for share in shares if share > 0]
        before = self._counts()
        for _ in range(len(shares)):
            post(proxy.port, traffic.small()[0])
        for_session = sum(now["requests"] > then["requests"] for now, then in zip(self._counts(), before, strict=True))
        same = "byte for byte" if answer == expected else "as JSON"
        return (
            f"returns the endpoint's responses ({same}; streams as {kind}), uses {len(used)} of {len(shares)} "
            f"endpoints, {min(used):.0%} to {max(used):.0%} of the requests each, one session on {for_session}"
        )

    def idle(self, proxies: Sequence[Proxy], seconds: float) -> Mapping[str, float]:
        """CPU time of each proxy without requests, in milliseconds per second."""
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


def post(port: int, request: bytes, timeout_s: float = 5.0) -> tuple[bytes, str]:
    """Send one request. Returns the body and the content type; raises OSError if the status is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        body = request.partition(b"\r\n\r\n")[2]
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP response: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"status {response.status}: {answer[:200]!r}")
    return answer, response.getheader("content-type") or "no content type"
