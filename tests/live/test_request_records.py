"""`requests` lists every request once, with what became of it; `requests` and `explain` know them after a restart."""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from bench.chaos.planes import LivePlane
from pointsman.gateway.records import RECORD_FILE
from tests.live.manifests import hashed, manifest, simulated

PRICE = {"perMillionInputTokens": 1000.0, "perMillionOutputTokens": 3000.0}
GATEWAY = {
    "tenants": [
        {"name": "red", "costBudget": 1000},
        {"name": "blue", "requestsPerMinute": 1},
        {"name": "green", "costBudget": 0.001, "costPeriod": "1h"},
    ],
    "keys": [{"tenant": name, "sha256": hashed(f"k-{name}")} for name in ("red", "blue", "green")],
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlane]:
    plane = LivePlane(tmp_path_factory.mktemp("plane"))
    plane.up(manifest(simulated("m", 1, price=PRICE), simulated("spare", 1), **GATEWAY))
    yield plane
    plane.close()


class Client:
    """Sends requests, and knows what must be recorded of them."""

    def __init__(self, plane: LivePlane) -> None:
        self._plane = plane
        self.url = plane.url
        self.expected: dict[str, tuple[str, int | None]] = {}
        """Request id -> state and status."""

    def send(self, name: str, state: str, status: int, *, key: str = "red", content: bytes = b"", **body: Any) -> None:
        body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 8, **body}
        headers = {"authorization": f"Bearer k-{key}", "x-request-id": name, "content-type": "application/json"}
        content = content or json.dumps(body).encode()
        answer = httpx.post(f"{self.url}/v1/completions", content=content, headers=headers, timeout=30)
        assert answer.status_code == status, answer.text
        assert answer.headers["x-request-id"] == name
        self.expected[name] = (state, status)

    def leave(self, name: str) -> None:
        """Disconnect after the first event of a stream."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        body = json.dumps(
            {"model": "m", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer k-red\r\nx-request-id: {name}"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            read = b""
            while b"data:" not in read:
                read += client.recv(4096)
        self.expected[name] = ("abandoned", 200)


def listed(plane: LivePlane) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plane.admin.get("requests", limit=1000)["requests"]
    return found


def spent(plane: LivePlane) -> float:
    return float(next(one["spent"] for one in plane.status()["tenants"] if one["name"] == "red"))


def stored_lines(plane: LivePlane) -> int:
    file = plane.state / RECORD_FILE
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_every_request_is_listed_once_with_its_outcome_and_survives_a_kill(plane: LivePlane) -> None:
    client = Client(plane)
    for number in range(3):
        client.send(f"served-{number}", "served", 200)
    client.send("stream", "served", 200, stream=True)
    client.send("too-long", "failed", 400, prompt="word " * 40_000)
    client.send("unknown-model", "refused", 404, model="n")
    client.send("no-json", "refused", 400, content=b"{")
    client.send("wrong-key", "refused", 401, key="black")
    client.send("first-of-blue", "served", 200, key="blue")
    client.send("too-many", "refused", 429, key="blue")
    client.send("first-of-green", "served", 200, key="green")
    client.send("over-budget", "refused", 429, key="green")
    [instance] = plane.instances("m").values()
    fault = {"fault": "reset", "afterTokens": 3, "count": 1}
    httpx.post(f"{instance['url']}/faults", json=fault).raise_for_status()
    client.send("cut-off", "failed", 200, stream=True, ignore_eos=True, max_tokens=50)
    client.leave("left")
    plane.until(lambda: all(one["state"] != "running" for one in listed(plane)), "the disconnect is noticed")

    records = listed(plane)
    assert {one["request_id"]: (one["state"], one["status"]) for one in records} == client.expected
    assert Counter(one["request_id"] for one in records) == dict.fromkeys(client.expected, 1)
    assert sum(one["cost"] or 0 for one in records if one["tenant"] == "red") == pytest.approx(spent(plane))
    assert "requests per minute" in plane.pointsman("explain", "too-many").stdout
    assert "answered with 400" in plane.pointsman("explain", "too-long").stdout

    plane.until(lambda: stored_lines(plane) == len(records), "all of them are stored")
    time.sleep(1.1)  # what tenants have used is saved once a second
    history = plane.admin.get("history")
    plane.kill()
    plane.up()
    assert plane.admin.get("history") == history
    again = listed(plane)
    assert [one | {"arrived": ""} for one in again] == [one | {"arrived": ""} for one in records]
    assert again[0]["arrived"][:17] == records[0]["arrived"][:17]
    explained = plane.pointsman("explain", "served-1").stdout
    assert "sent to m-1" in explained
    assert "verdict" in explained
    assert "charged" in explained
    assert "too-many" in plane.pointsman("requests", "--tenant", "blue", "--only", "refused").stdout
    client.url = plane.url
    client.send("after", "served", 200)
    client.send("served-1", "served", 200)  # its id is used again
    assert Counter(one["request_id"] for one in listed(plane))["served-1"] == 2
    mine = [one["cost"] or 0 for one in listed(plane) if one["tenant"] == "red"]
    assert sum(mine) == pytest.approx(spent(plane))


def test_records_of_a_deployment_that_is_gone_stay(plane: LivePlane) -> None:
    client = Client(plane)
    client.send("of-spare", "served", 200, model="spare")
    text = manifest(simulated("m", 1, price=PRICE), **GATEWAY)
    plane.pointsman("apply", plane.write(text))
    plane.until(lambda: not plane.instances("spare"), "the deployment is gone")
    assert [one["state"] for one in listed(plane) if one["request_id"] == "of-spare"] == ["served"]
    assert plane.pointsman("explain", "of-spare").returncode == 0


def test_a_disk_that_cannot_be_written_is_shown_and_stops_nothing(tmp_path: Path) -> None:
    plane = LivePlane(tmp_path)
    try:
        plane.up(manifest(simulated("m", 1)))
        (plane.state / RECORD_FILE).mkdir()
        Client(plane).send("kept", "served", 200)
        plane.until(
            lambda: any(RECORD_FILE in one["text"] for one in plane.status()["problems"]), "the problem is shown"
        )
        (plane.state / RECORD_FILE).rmdir()
        plane.until(lambda: stored_lines(plane) == 1, "it is stored once that is possible")
        assert plane.status()["problems"] == []
    finally:
        plane.close()
