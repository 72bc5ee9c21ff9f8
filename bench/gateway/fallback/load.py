"""native/load.c in Python: `python -m bench.gateway.fallback.load` with the same arguments."""

import itertools
import json
import re
import select
import socket
import struct
import sys
import time
from pathlib import Path

TIMEOUT_S = 20
MAX_ERRORS = 1000
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Client:
    """A connection and its request in flight."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.unsent = memoryview(b"")
        self.busy = False
        self.received = b""
        self.begun = self.first_at = 0.0

    def begin(self, request: bytes) -> None:
        self.unsent, self.received, self.first_at, self.busy = memoryview(request), b"", 0.0, True
        self.begun = time.perf_counter()
        self.write()

    def write(self) -> None:
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the next read reports it
            self.unsent = memoryview(b"")

    def complete(self) -> bool:
        head = self.received.find(b"\r\n\r\n")
        if head < 0:
            return False
        length = LENGTH.search(self.received, 0, head)
        if length:
            return len(self.received) >= head + 4 + int(length[1])
        if not self.first_at and b"\n\n" in self.received:
            self.first_at = time.perf_counter()
        return self.received.endswith(b"\r\n0\r\n\r\n")


class Load:
    """All connections in one event loop."""

    def __init__(self, port: int, connections: int, events: int, requests: list[bytes]) -> None:
        self._address = ("127.0.0.1", port)
        self._requests = itertools.cycle(requests)
        self._expected_events = events
        self._poll = select.epoll()
        self._clients: dict[int, Client] = {}
        self._stop_at = 0.0
        self._open = 0
        for _ in range(connections):
            self._connect()

    def run(self, seconds: float, spread_ms: float) -> dict[str, float | str]:
        self.wrong = self.events = 0
        self.first_error = ""
        self.latencies: list[float] = []
        self.first_latencies: list[float] = []
        start, cpu = time.perf_counter(), time.process_time()
        self._stop_at = start + seconds
        for number, client in enumerate(list(self._clients.values())):
            while time.perf_counter() < start + spread_ms / 1000 * number / len(self._clients):
                self._serve(0)
            self._begin(client)
        while self._open:
            self._serve(1.0)
            if time.perf_counter() > self._stop_at + TIMEOUT_S:
                sys.exit("load: requests got no response")
        return {
            "requests": len(self.latencies),
            "errors": self.wrong,
            "events": self.events,
            "seconds": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu,
            "latency_p50_us": at(self.latencies, 0.5),
            "latency_p99_us": at(self.latencies, 0.99),
            "first_p50_us": at(self.first_latencies, 0.5),
            "first_p99_us": at(self.first_latencies, 0.99),
            "first_error": self.first_error,
        }

    def _connect(self) -> Client:
        client = Client(self._address)
        self._clients[client.socket.fileno()] = client
        self._poll.register(client.socket.fileno(), select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        return client

    def _begin(self, client: Client) -> None:
        self._open += 1
        client.begin(next(self._requests))

    def _serve(self, pause: float) -> None:
        for number, flags in self._poll.poll(pause):
            client = self._clients[number]
            if flags & select.EPOLLOUT:
                client.write()
            if flags & ~select.EPOLLOUT:
                self._read(client)

    def _read(self, client: Client) -> None:
        try:
            while text := client.socket.recv(1 << 18):
                client.received += text
                if client.complete():
                    self._end(client)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._lose(client)

    def _end(self, client: Client) -> None:
        now = time.perf_counter()
        events = client.received.count(b"\n\n")
        if client.received[8:12] != b" 200":
            self._error(client.received[:150].decode(errors="replace"))
        elif events != self._expected_events:
            self._error("a response with another number of events")
        self.events += events
        self.latencies.append(now - client.begun)
        if client.first_at:
            self.first_latencies.append(client.first_at - client.begun)
        client.busy = False
        self._open -= 1
        if now < self._stop_at:
            self._begin(client)

    def _lose(self, client: Client) -> None:
        del self._clients[client.socket.fileno()]
        client.socket.close()
        again = self._connect()
        if not client.busy:
            return
        self._open -= 1
        self._error("the connection was closed before the end of a response")
        if time.perf_counter() < self._stop_at:
            self._begin(again)

    def _error(self, message: str) -> None:
        self.wrong += 1
        self.first_error = self.first_error or message
        if self.wrong > MAX_ERRORS:
            sys.exit(f"load: too many wrong responses: {self.first_error}")


def at(times: list[float], share: float) -> float:
    """A percentile, in microseconds."""
    return sorted(times)[min(len(times) - 1, int(len(times) * share))] * 1e6 if times else 0.0


def read(file: Path) -> list[bytes]:
    text, at_byte, requests = file.read_bytes(), 0, []
    while at_byte < len(text):
        (size,) = struct.unpack_from("<I", text, at_byte)
        requests.append(text[at_byte + 4 : at_byte + 4 + size])
        at_byte += 4 + size
    return requests


def main() -> None:
    port, connections, warm_s, seconds, spread_ms, events, file = sys.argv[1:]
    load = Load(int(port), int(connections), int(events), read(Path(file)))
    if float(warm_s) > 0:
        load.run(float(warm_s), float(spread_ms))
    print("ready", flush=True)
    if sys.stdin.readline():
        print(json.dumps(load.run(float(seconds), float(spread_ms))), flush=True)


if __name__ == "__main__":
    main()
