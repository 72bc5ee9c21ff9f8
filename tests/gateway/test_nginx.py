"""The same raw sequences to nginx and to the gateway: the verdicts are equal, except those that docs/gateway.md lists.

Needs nginx on the PATH, or in the folder POINTSMAN_NGINX; skipped otherwise.
"""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gateway.backends import Backend, BackendConnection, answer, completion
from tests.gateway.bed import Bed
from tests.gateway.mutations import TOKENS
from tests.gateway.test_fuzz import REQUESTS
from tests.gateway.test_smuggling import ACCEPTED, ONE_CHUNK, REFUSED, SIZE, SMUGGLED, chunked, sized
from tests.gateway.wire import TIMEOUT_S, Message, wait_for

NGINX = shutil.which("nginx", path=os.environ.get("POINTSMAN_NGINX", "") + os.pathsep + os.environ.get("PATH", ""))
pytestmark = pytest.mark.skipif(
    NGINX is None, reason="nginx is not installed: apt-get install nginx-light, or set POINTSMAN_NGINX to its folder"
)
PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
LAST = b"GET /health HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n"
"""Behind every sequence: its answer shows that the connection was kept, and ends it."""
BY_INSTANCE = 201
"""The status of instances; what a proxy answers by itself has another one."""
USAGE_QUESTION = b'{"stream_options":{"include_usage":true},'
NO_STATUS_LINE = 0
"""An answer in the format of HTTP/0.9."""


class Exchange(NamedTuple):
    """What became of a sequence."""

    statuses: tuple[int, ...]
    forwarded: tuple[tuple[bytes, bytes], ...]
    """Start line and body of each request that reached the instance."""

    def __str__(self) -> str:
        return " ".join("no status line" if one == NO_STATUS_LINE else str(one) for one in self.statuses) or "closed"


def places(request: bytes) -> dict[str, int]:
    """Where a token is inserted."""
    body = request.index(b"\r\n\r\n") + 4
    return {
        "before the request": 0,
        "before the headers": request.index(b"\r\n") + 2,
        "behind the headers": body - 2,
        "before the body": body,
        "behind the body": len(request),
    }


def mutations() -> Iterator[tuple[str, bytes]]:
    """Every token at every place of a request with a length and of one with chunks."""
    for kind, request in (("a length", sized(SIZE)), ("chunks", chunked(ONE_CHUNK))):
        for place, at in places(request).items():
            for token in TOKENS:
                yield f"`{str(token)[2:-1][:40]}` {place}, {kind}", request[:at] + token + request[at:]


SEQUENCES: Mapping[str, bytes] = {
    **REFUSED,
    **ACCEPTED,
    **{f"request {number} of test_fuzz.py": request for number, request in enumerate(REQUESTS)},
    **dict(mutations()),
}


def records(connection: BackendConnection) -> None:
    """Record each request, which must have one length and no transfer encoding."""
    while True:
        head = connection.until(b"\r\n\r\n")
        assert not re.search(rb"\r\ntransfer-encoding:", head, re.IGNORECASE)
        [length] = re.findall(rb"\r\ncontent-length: (\d+)\r\n", head, re.IGNORECASE)
        body = connection.exactly(int(length))
        connection.backend.received.append(Message(head.partition(b"\r\n")[0], [], body))
        connection.send(answer(completion(), BY_INSTANCE))


@contextmanager
def nginx(folder: Path, backend: Backend) -> Iterator[tuple[str, int]]:
    """nginx with the paths and times of the gateway. Yields its address."""
    assert NGINX is not None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address: tuple[str, int] = taken.getsockname()
    temporary = " ".join(f"{path}_temp_path {folder};" for path in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    # Without a master there is a single process, which cannot leave a worker behind.
    config = f"""
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr crit;
events {{ worker_connections 64; }}
http {{
  access_log off; {temporary}
  client_header_timeout 1s; client_body_timeout 1s; client_max_body_size 32m;
  server {{
    listen 127.0.0.1:{address[1]};
    location = /health {{ return 200 "ok"; }}
    location = /v1/chat/completions {{
      proxy_pass http://127.0.0.1:{backend.port}; proxy_http_version 1.1; proxy_set_header Connection "";
    }}
    location / {{ return 404; }}
  }}
}}
"""
    file = folder / "nginx.conf"
    file.write_text(config, encoding="utf-8")
    with subprocess.Popen([NGINX, "-p", str(folder), "-e", "stderr", "-c", str(file)]) as process:
        try:
            wait_for(lambda: accepts(address), "nginx listens")
            yield address
        finally:
            process.terminate()


def accepts(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address):
        return True
    return False


def exchange(address: tuple[str, int], backend: Backend, sequence: bytes) -> Exchange:
    """Send a sequence, a request behind it and the last one; read until the connection is closed."""
    backend.received.clear()
    data = b""
    with socket.create_connection(address, TIMEOUT_S) as client, suppress(ConnectionError):
        client.sendall(sequence + SMUGGLED + LAST)
        while received := client.recv(65_536):
            data += received
    return Exchange(tuple(statuses(data)), tuple((one.start, one.body) for one in backend.received))


def statuses(data: bytes) -> Iterator[int]:
    """The status of every answer in these bytes."""
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        found = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        if found is None:
            yield NO_STATUS_LINE
            return
        yield int(found[1])
        length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
        data = rest[int(length[1]) if length else 0 :]


def without_usage_question(verdict: Exchange) -> Exchange:
    """The verdict of the gateway without what it adds to streams: it asks engines for their usage."""
    return verdict._replace(
        forwarded=tuple((start, body.replace(USAGE_QUESTION, b"{", 1)) for start, body in verdict.forwarded)
    )


def with_json_checked(verdict: Exchange) -> Exchange:
    """The verdict of nginx if it answered bodies that are not JSON by itself, as the gateway does."""
    forwarded = iter(verdict.forwarded)
    codes, kept = [], []
    for status in verdict.statuses:
        request = next(forwarded) if status == BY_INSTANCE else None
        codes.append(400 if request is not None and not is_json(request[1]) else status)
        if request is not None and is_json(request[1]):
            kept.append(request)
    return Exchange(tuple(codes), tuple(kept))


def is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def listed() -> tuple[str, dict[str, tuple[str, str]]]:
    """The version of nginx that the page names, and its table: sequence -> verdicts of nginx and of the gateway."""
    text = PAGE.read_text(encoding="utf-8").partition("## Beside nginx")[2].partition("\n## ")[0]
    version = re.search(r"nginx (\d+\.\d+)", text)
    assert version is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    found = {name: (row[1], row[2]) for row in rows[2:] for name in row[0].split("; ")}
    assert len(found) == sum(len(row[0].split("; ")) for row in rows[2:]), "a sequence is listed twice"
    assert all(row[3] for row in rows[2:]), "a difference has no reason"
    return version[1], found


def installed() -> str:
    assert NGINX is not None
    output = subprocess.run([NGINX, "-v"], capture_output=True, text=True, check=True).stderr
    version = re.search(r"nginx/(\d+\.\d+)", output)
    assert version is not None, output
    return version[1]


def test_verdicts_differ_from_those_of_nginx_only_as_listed(tmp_path: Path) -> None:
    bed = Bed({"limits": {"headerTimeout": "1s", "bodyTimeout": "1s"}})
    differing: dict[str, tuple[str, str]] = {}
    try:
        with Backend([records]) as behind_nginx, nginx(tmp_path, behind_nginx) as address:
            backend = bed.backend(records)
            for name, sequence in SEQUENCES.items():
                theirs = with_json_checked(exchange(address, behind_nginx, sequence))
                ours = without_usage_question(exchange(bed.address, backend, sequence))
                if ours.forwarded and theirs.forwarded:
                    assert ours.forwarded == theirs.forwarded[: len(ours.forwarded)], name
                if theirs != ours:
                    differing[name] = (str(theirs), str(ours))
    finally:
        bed.close()
    assert len(SEQUENCES) > 500
    version, expected = listed()
    print(f"\n{len(SEQUENCES)} sequences, {len(differing)} verdicts differ from those of nginx {installed()}")
    assert {name: one for name, one in differing.items() if expected.get(name) != one} == {}
    if installed() == version:  # a later nginx may have become stricter
        assert differing == expected
