"""native/backend.c in Python: `python -m bench.gateway.fallback.backend PORTS`."""

import heapq
import itertools
import json
import re
import select
import socket
import sys
import time

EDGE = 2048
EVENT = (
    b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":'
    b'[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
ANSWER = (
    b'{"id":"chatcmpl-bench","object":"chat.completion","created":1700000000,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"The points are set, the signal is green, and the train for the harbour '
    b'leaves from the third track as soon as the last carriage is coupled."},"finish_reason":"stop"}],"usage":'
    b'{"prompt_tokens":96,"completion_tokens":24,"total_tokens":120}}'
)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT_CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
LAST_CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
STREAMS = re.compile(rb'"stream": *true')
TOKENS = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
PACE = re.compile(rb'"seed": *(\d+)')


def page(kind: bytes, text: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (status, kind, len(text), text)


PLAIN = page(b"application/json", ANSWER)


class Port:
    """One simulated engine."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.requests = self.open = 0
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.socket.setblocking(False)

    def page(self, path: bytes) -> bytes:
        """Responses to everything except completions."""
        if path.startswith(b"/health"):
            return page(b"text/plain", b"ok")
        if path.startswith(b"/counts"):
            return page(b"application/json", json.dumps({"requests": self.requests, "open": self.open}).encode())
        if path.startswith(b"/v1/models"):
            return page(b"application/json", b'{"object":"list","data":[{"id":"bench","object":"model"}]}')
        if b"server_info" in path or b"model_info" in path:
            return page(b"application/json", b'{"model_path":"bench","served_model_name":"bench","is_generation":true}')
        if path.startswith(b"/metrics"):
            labels = '{engine="0",model_name="bench"}'
            lines = [
                f"vllm:num_requests_running{labels} {self.open}.0",
                f"vllm:num_requests_waiting{labels} 0.0",
                f"vllm:kv_cache_usage_perc{labels} 0.10",
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="31250",engine="0"} 1.0',
            ]
            return page(b"text/plain; version=0.0.4", "\n".join([*lines, ""]).encode())
        return page(b"application/json", b'{"error":{"message":"no such page"}}', b"404 Not Found")


class Client:
    """A client connection."""

    def __init__(self, connection: socket.socket, port: Port) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.port = connection, port
        self.received = bytearray()
        self.events_left, self.pace, self.closed = 0, 0.0, False


class Backend:
    """All ports in one event loop."""

    def __init__(self, ports: int) -> None:
        self.ports = [Port(index) for index in range(ports)]
        self._poll = select.epoll()
        self._listeners = {port.socket.fileno(): port for port in self.ports}
        self._clients: dict[int, Client] = {}
        self._due: list[tuple[float, int, Client]] = []
        self._order = itertools.count()
        for listener in self._listeners:
            self._poll.register(listener, select.EPOLLIN)
        self._poll.register(0, select.EPOLLIN | select.EPOLLRDHUP)

    def serve(self) -> None:
        """Serve until standard input ends."""
        while True:
            pause = max(0.0, self._due[0][0] - time.monotonic()) if self._due else -1
            for number, _ in self._poll.poll(pause):
                if number == 0:
                    return
                if number in self._listeners:
                    self._accept(self._listeners[number])
                elif not self._read(self._clients[number]):
                    self._drop(number)
            self._send_due()

    def _accept(self, port: Port) -> None:
        client = Client(port.socket.accept()[0], port)
        self._clients[client.socket.fileno()] = client
        self._poll.register(client.socket.fileno(), select.EPOLLIN)

    def _drop(self, number: int) -> None:
        client = self._clients.pop(number)
        client.closed = True
        client.port.open -= client.events_left > 0
        client.socket.close()

    def _read(self, client: Client) -> bool:
        try:
            text = client.socket.recv(1 << 18)
            client.received += text
            head = client.received.find(b"\r\n\r\n") + 4
            length = LENGTH.search(client.received, 0, head)
            whole = head + int(length[1]) if length else head
            if head > 3 and len(client.received) >= whole:
                self._answer(client, bytes(client.received), head)
                client.received.clear()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(text)

    def _answer(self, client: Client, request: bytes, head: int) -> None:
        method, path = request.split(b" ", 2)[:2]
        if method != b"POST" or path not in (b"/v1/chat/completions", b"/v1/completions"):
            client.socket.send(client.port.page(path))
            return
        client.port.requests += 1
        fields = request[head : head + EDGE] + request[max(head + EDGE, len(request) - EDGE) :]
        if not STREAMS.search(fields):
            client.socket.send(PLAIN)
            return
        tokens, pace = TOKENS.search(fields), PACE.search(fields)
        client.events_left = int(tokens[1]) if tokens else 16
        client.pace = int(pace[1]) / 1000 if pace else 0.005
        client.port.open += 1
        now = time.monotonic()
        phase = client.pace * client.port.index / len(self.ports)
        self._send_event(client, now - (now - phase) % client.pace if client.pace else now, STREAM)

    def _send_event(self, client: Client, due: float, head: bytes = b"") -> None:
        """Send one event; the next is due at the port's next step."""
        client.events_left -= 1
        client.socket.send(head + EVENT_CHUNK + (b"" if client.events_left else LAST_CHUNK))
        if client.events_left:
            heapq.heappush(self._due, (due + client.pace, next(self._order), client))
        else:
            client.port.open -= 1

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, _, client = heapq.heappop(self._due)
            if not client.closed:
                try:
                    self._send_event(client, due)
                except OSError:
                    self._drop(client.socket.fileno())


def main() -> None:
    backend = Backend(int(sys.argv[1]))
    print(*(port.socket.getsockname()[1] for port in backend.ports), flush=True)
    backend.serve()


if __name__ == "__main__":
    main()
