"""The admin API: closed over TCP without its key, open over the local socket, and plain data in return."""

import asyncio
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.config.changes import Change, Changes
from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.gateway.admin import Admin
from pointsman.gateway.connection import GatewayConnection
from pointsman.placement import Claim, Place, Tier
from pointsman.placement.fleet import Occupant, Snapshot
from pointsman.runtimes.local.runtime import AdminSocket
from pointsman.scaling.deployment import ScaledDeployment
from pointsman.types import Worker
from tests.gateway.backends import OK, answer, answers, hangs
from tests.gateway.bed import Bed, Lay
from tests.gateway.wire import HEALTH, Client, Message, chat, wait_for

KEY = "key-of-admin-90bc"
KEYED = {"adminKeySha256": sha256(KEY.encode()).hexdigest()}


class FakePlane:
    """A plane whose answers are listed."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answers: Callable[[], Any] = lambda: None
        self.slow: asyncio.Event | None = None
        self.stopped = 0

    def _do(self, *asked: Any) -> Any:
        self.asked.append(asked)
        return self.answers()

    def status(self) -> dict[str, Any]:
        self._do("status")
        node = {"name": "n", "kind": "class", "deployments": ["app.n"]}
        return {
            "ready": True,
            "applications": [{"name": "app", "path": "/app", "nodes": [node]}],
            "deployments": [{"name": "chat"}, {"name": "app.n"}],
        }

    def plan(self, manifest: ManifestText) -> Changes:
        self._do("plan", manifest)
        return Changes((Change("start", "chat-1", "2 replicas are wanted"),))

    async def apply(self, manifest: ManifestText) -> Changes:
        self._do("apply", manifest)
        if self.slow is not None:
            await self.slow.wait()
        return Changes(())

    def fleet(self) -> Snapshot:
        self._do("fleet")
        place = Place(tier=Tier.CPU, claims=(Claim(worker="w", memory_bytes=5),))
        return Snapshot((Worker(name="w", cpus=2, memory_bytes=9),), (Occupant("m-1", place, "m"),))

    async def deploy(self, document: ManifestText) -> Changes:
        self._do("deploy", document)
        return Changes((Change("open", "app", "new"),))

    async def rollback(self, name: str) -> Changes:
        self._do("rollback", name)
        return Changes()

    async def delete(self, name: str) -> Changes:
        self._do("delete", name)
        return Changes((Change("close", name, "gone"),))

    def application(self, name: str) -> str:
        self._do("application", name)
        return f"name: {name}\n"

    def logs(self, instance_id: str, lines: int) -> str:
        self._do("logs", instance_id, lines)
        return "a line\n"

    def drain(self, instance_id: str) -> None:
        self._do("drain", instance_id)

    @property
    def documents(self) -> "FakePlane":
        return self

    instances = control = documents

    @property
    def plan_in_force(self) -> PointsmanPlan:
        return PointsmanPlan()

    @property
    def scaling(self) -> "FakeScaling":
        return FakeScaling(self._do)

    def stop(self) -> None:
        self.stopped += 1


class FakeScaling:
    def __init__(self, do: Callable[..., Any]) -> None:
        self._do = do

    def status(self, name: str) -> dict[str, Any]:
        self._do("scaling", name)
        return {"deployment": name, "desired": 3, "ongoing": 7, "queued": 2}

    def load_history(self, name: str) -> dict[str, Any]:
        self._do("load", name)
        return {"deployment": name, "bin_s": 600.0, "bins": [{"began": 0.0, "per_second": 2.5}]}

    def scale(self, name: str, replicas: int | None, for_s: float | None, by: str) -> None:
        self._do("scale", name, replicas, for_s, by)

    def each(self) -> list[ScaledDeployment]:
        return []


class Office:
    """A gateway with an admin API, and the local socket to it."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed = bed
        self.plane = FakePlane()
        self.admin = bed.thread.call(lambda: Admin(bed.gateway, self.plane, self.plane.status, self.plane.stop))
        self.path = folder / "admin.sock"
        admin = AdminSocket(self.path)
        bed.thread.run(admin.listen(lambda: GatewayConnection(bed.gateway, is_local=True)))
        bed.closing.append(admin.close)

    def client(self) -> Client:
        return self.bed.local_client(self.path)

    def ask(self, request: bytes) -> Message:
        """Over the local socket."""
        client = self.client()
        try:
            return client.ask(request)
        finally:
            client.close()


@pytest.fixture
def office(lay: Lay, tmp_path: Path) -> Office:
    return Office(lay(KEYED), tmp_path)


def call(method: str, path: str, body: object = None, *lines: str) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = "".join(f"{line}\r\n" for line in lines)
    return f"{method} /admin/v1/{path} HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data


CALLS = [
    call("GET", "status"),
    call("GET", "applications"),
    call("POST", "applications", {"text": "", "folder": "."}),
    call("DELETE", "applications/app"),
    call("GET", "fleet"),
    call("POST", "plan", {"text": "", "folder": "."}),
    call("POST", "apply", {"text": "", "folder": "."}),
    call("GET", "requests"),
    call("GET", "requests/it"),
    call("GET", "instances/chat-0/logs"),
    call("POST", "instances/chat-0/drain"),
    call("POST", "down"),
    call("GET", "nothing"),
    call("GET", "deployments/chat/scaling"),
    call("GET", "deployments/chat/load"),
    call("POST", "deployments/chat/scale", {"replicas": 2}),
]
names = pytest.mark.parametrize("asked", CALLS, ids=lambda asked: asked.split(b" HTTP")[0].decode())


@names
@pytest.mark.parametrize(
    "line", ["", "authorization: Bearer wrong", f"authorization: Bearer {KEYED['adminKeySha256']}", f"cookie: {KEY}"]
)
def test_tcp_requires_the_admin_key(office: Office, asked: bytes, line: str) -> None:
    got = office.bed.ask(asked.replace(b"\r\n", b"\r\n" + (f"{line}\r\n".encode() if line else b""), 1))
    assert (got.status, got.error["type"]) == (401, "authentication_error")
    assert office.plane.asked == []
    assert office.plane.stopped == 0


@names
def test_tcp_is_closed_without_a_configured_key(lay: Lay, tmp_path: Path, asked: bytes) -> None:
    office = Office(lay(), tmp_path)
    for line in (b"", b"authorization: Bearer \r\n", b"authorization: Bearer x\r\n", b"x-api-key:\r\n"):
        assert office.bed.ask(asked.replace(b"\r\n", b"\r\n" + line, 1)).status == 401
    assert office.plane.asked == []


def test_a_tenants_key_is_not_an_admin_key(lay: Lay, tmp_path: Path) -> None:
    other = sha256(b"red").hexdigest()
    office = Office(
        lay({**KEYED, "keys": [{"sha256": other, "tenant": "red"}], "tenants": [{"name": "red"}]}), tmp_path
    )
    assert office.bed.ask(call("GET", "status", None, "authorization: Bearer red")).status == 401
    assert office.bed.ask(chat(f"authorization: Bearer {KEY}")).status == 401, "nor the other way round"


@pytest.mark.parametrize("line", [f"authorization: Bearer {KEY}", f"x-api-key: {KEY}"])
def test_tcp_accepts_the_admin_key(office: Office, line: str) -> None:
    got = office.bed.ask(call("GET", "status", None, line))
    assert (got.status, got.json()["ready"]) == (200, True)


def test_scaling_can_be_read_and_ordered(office: Office) -> None:
    got = office.ask(call("GET", "deployments/diamond%2Fm1/scaling")).json()
    assert (got["desired"], got["ongoing"], got["queued"]) == (3, 7, 2)
    assert office.ask(call("POST", "deployments/chat/scale", {"replicas": 4, "for_s": 60})).json()["desired"] == 3
    assert office.ask(call("POST", "deployments/chat/scale", {"replicas": None, "by": "Ada"})).status == 200
    year, wordy = 366 * 86400, "Ada\n\x1b[2J and " + "x" * 1000
    assert office.ask(call("POST", "deployments/chat/scale", {"replicas": 1, "for_s": year, "by": wordy})).status == 200
    assert office.ask(call("POST", "deployments/chat/scale", {"replicas": 1, "by": "\n"})).status == 200
    assert [asked for asked in office.plane.asked if asked[0] == "scale"] == [
        ("scale", "chat", 4, 60.0, "the admin API"),
        ("scale", "chat", None, None, "Ada"),
        ("scale", "chat", 1, float(year), "Ada [2J and " + "x" * 85 + "..."),
        ("scale", "chat", 1, None, "the admin API"),
    ]
    assert ("scaling", "diamond/m1") in office.plane.asked


def test_recorded_load_can_be_read(office: Office) -> None:
    got = office.ask(call("GET", "deployments/diamond%2Fm1/load")).json()
    assert (got["bin_s"], got["bins"]) == (600.0, [{"began": 0.0, "per_second": 2.5}])
    assert office.plane.asked == [("load", "diamond/m1")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        {},
        {"replicas": -1},
        {"replicas": "many"},
        {"replicas": 1, "for_s": 0},
        {"replicas": 1, "for_s": 1e308},
        {"n": 1},
    ],
)
def test_an_invalid_scale_order_is_refused(office: Office, body: object) -> None:
    assert office.ask(call("POST", "deployments/chat/scale", body)).status == 400
    assert office.plane.asked == []


def test_a_scale_order_for_more_than_a_year_is_refused(office: Office) -> None:
    got = office.ask(call("POST", "deployments/chat/scale", {"replicas": 1, "for_s": 1e308}))
    assert got.error["message"] == (
        "for_s may be at most a year, which is 31622400, found 1e+308; "
        "leave it out to hold the number until further notice"
    )


def test_the_local_socket_needs_no_key(office: Office) -> None:
    assert office.ask(call("GET", "status")).json()["ready"] is True
    assert office.ask(HEALTH).status == 200


def test_the_local_socket_is_exempt_from_the_connection_limit(lay: Lay, tmp_path: Path) -> None:
    """The owner must be able to look at an overloaded gateway."""
    office = Office(lay({"limits": {"maxConnections": 1}}), tmp_path)
    first = office.bed.client()
    assert first.ask(HEALTH).status == 200
    assert office.ask(call("GET", "status")).status == 200


def test_plan_and_apply(office: Office) -> None:
    manifest = {"text": "deployments: []", "folder": "/somewhere", "file": "x.yaml"}
    planned = office.ask(call("POST", "plan", manifest)).json()
    assert planned["changes"] == [{"what": "start", "subject": "chat-1", "why": "2 replicas are wanted"}]
    assert "chat-1" in planned["text"]
    assert office.ask(call("POST", "apply", manifest)).json()["changes"] == []
    expected = ManifestText("deployments: []", "/somewhere", "x.yaml")
    assert office.plane.asked == [("plan", expected), ("apply", expected)]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", [], {"text": 5, "folder": "."}, {}, b"\xff", b"[" * 99999],
    ids=["empty", "no JSON", "a list", "another type", "fields missing", "no UTF-8", "too deep"],
)
def test_what_is_not_a_manifest_is_refused(office: Office, body: object) -> None:
    got = office.ask(call("POST", "apply", body))
    assert got.status == 400
    assert got.error["message"]
    assert office.plane.asked == []


def raises(error: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError(["line 3: there is no engine", "line 5: unknown field"]), 422),
        (UnknownName("instance", "chat-9", ["chat-0"]), 404),
        (PointsmanError("not now"), 400),
        (RuntimeError("oops"), 500),
    ],
    ids=["problems", "unknown", "refused", "broken"],
)
def test_errors_of_the_plane_are_answered(office: Office, error: Exception, status: int) -> None:
    office.plane.answers = raises(error)
    for asked in (call("GET", "status"), call("POST", "apply", {"text": "", "folder": "."})):
        got = office.ask(asked)
        assert got.status == status
        assert str(error) in got.error["message"] or status == 422
        if status == 422:
            assert len(got.error["problems"]) == 2
    office.plane.answers = lambda: None
    assert office.ask(call("GET", "status")).status == 200


def test_applications_are_deployed_read_rolled_back_and_deleted(office: Office) -> None:
    document = {"text": "kind: Application", "folder": "/somewhere", "file": "app.yaml"}
    written = ManifestText("kind: Application", "/somewhere", "app.yaml")
    assert office.ask(call("POST", "applications/plan", document)).json()["changes"][0]["what"] == "start"
    assert office.ask(call("POST", "applications", document)).json()["changes"][0]["what"] == "open"
    assert [one["name"] for one in office.ask(call("GET", "applications")).json()["applications"]] == ["app"]
    told = office.ask(call("GET", "applications/app")).json()
    assert (told["name"], told["yaml"], told["deployments"]) == ("app", "name: app\n", [{"name": "app.n"}])
    assert office.ask(call("POST", "applications/app/rollback")).json()["changes"] == []
    assert office.ask(call("DELETE", "applications/app")).json()["changes"][0]["what"] == "close"
    asked = [("plan", written), ("deploy", written), ("status",), ("application", "app"), ("status",)]
    assert office.plane.asked == [*asked, ("rollback", "app"), ("delete", "app")]
    for wrong in (call("DELETE", "applications"), call("POST", "applications/app"), call("GET", "applications/a/b")):
        assert office.ask(wrong).error["code"] == "not_found"


def test_logs_and_draining(office: Office) -> None:
    assert office.ask(call("GET", "instances/chat-0/logs?lines=5")).json() == {"instance": "chat-0", "text": "a line\n"}
    assert office.ask(call("GET", "instances/a%2Fb%20c/logs")).json()["instance"] == "a/b c"
    assert office.ask(call("POST", "instances/chat-0/drain")).json() == {"instance": "chat-0", "draining": True}
    assert office.plane.asked == [("logs", "chat-0", 5), ("logs", "a/b c", 100), ("drain", "chat-0")]


@pytest.mark.parametrize("number", ["-1", "x", "1.5", "%C2%B2", "9" * 5000, "1e3", "%D9%A3"])
@pytest.mark.parametrize("path", ["instances/chat-0/logs?lines=", "requests?limit="])
def test_invalid_numbers_in_queries(office: Office, path: str, number: str) -> None:
    got = office.ask(call("GET", path + number))
    assert got.status == 400
    assert "whole number" in got.error["message"]


def test_stopping(office: Office) -> None:
    assert office.ask(call("POST", "down")).json() == {"stopping": True}
    wait_for(lambda: office.plane.stopped == 1)


@pytest.mark.parametrize("asked", [call("POST", "status"), call("GET", "apply"), call("DELETE", "requests/it")])
def test_unknown_paths_are_not_found(office: Office, asked: bytes) -> None:
    assert office.ask(asked).error["code"] == "not_found"


def test_head_is_get_without_a_body(office: Office) -> None:
    client = office.client()
    client.send(call("HEAD", "status"))
    assert client.answer(to_head=True).status == 200
    assert client.stays_open()


# Records


def test_records_are_listed_newest_first(office: Office) -> None:
    bed = office.bed
    bed.backend(answers(answer({"error": "oops"}, 500), OK))
    for number in range(5):
        tenant = "red" if number % 2 else "blue"
        assert bed.ask(chat(f"x-request-id: n{number}", f"x-pointsman-tenant: {tenant}")).status == 200
    told = office.ask(call("GET", "requests")).json()
    assert told["found"] == 5
    assert [one["request_id"] for one in told["requests"]] == ["n4", "n3", "n2", "n1", "n0"]
    assert {one["state"] for one in told["requests"]} == {"served"}

    def found(query: str) -> list[str]:
        return [one["request_id"] for one in office.ask(call("GET", f"requests?{query}")).json()["requests"]]

    assert found("tenant=red") == ["n3", "n1"]
    assert found("tenant=red&limit=1") == ["n3"]
    assert found("limit=0") == []
    assert found("model=m&instance=chat-0&state=served&limit=2") == ["n4", "n3"]
    assert found("instance=unknown") == found("state=waiting") == found("model=x") == []


def test_the_record_of_a_request(office: Office) -> None:
    bed = office.bed
    bed.backend(answers(answer({"error": "oops"}, 500), OK))
    bed.ask(chat("x-request-id: a/b c", "x-pointsman-priority: high"))
    told = office.ask(call("GET", "requests/a%2Fb%20c")).json()
    assert (told["request_id"], told["state"], told["tries"], told["priority"]) == ("a/b c", "served", 2, 1)
    assert told["failed_tries"] == [{"instance": "chat-0", "why": 'it answered 500: {"error": "oops"}'}]
    assert told["decision"]["target_instance_id"] == "chat-0"
    assert told["trace"]
    assert told["output_tokens"] == 2
    assert told["arrived"].startswith("20")
    assert "tried chat-0" in told["text"]


def test_the_record_of_a_waiting_request_has_current_reasons(office: Office) -> None:
    bed = office.bed
    bed.backend(hangs(), max_concurrency=1)
    first, second = bed.client(), bed.client()
    first.send(chat())
    wait_for(bed.running)
    second.send(chat("x-request-id: it"))
    wait_for(bed.waiting)
    told = office.ask(call("GET", "requests/it")).json()
    assert told["state"] == "waiting"
    assert "chat-0" in told["rejected"]


def test_an_unknown_request_id_is_not_found(office: Office) -> None:
    got = office.ask(call("GET", "requests/unknown"))
    assert (got.status, got.error["code"]) == (404, "not_found")
    assert "unknown" in got.error["message"]


# Clients that leave


def test_admin_work_is_done_although_its_client_disconnects(office: Office) -> None:
    slow = office.plane.slow = office.bed.thread.call(asyncio.Event)
    client = office.client()
    client.send(call("POST", "apply", {"text": "", "folder": "."}))
    wait_for(lambda: office.plane.asked)
    client.close()
    wait_for(lambda: not office.bed.gateway.clients)
    assert office.admin._tasks
    office.bed.thread.call(slow.set)
    wait_for(lambda: not office.admin._tasks)


def test_slow_admin_requests_do_not_delay_others(office: Office) -> None:
    slow = office.plane.slow = office.bed.thread.call(asyncio.Event)
    client = office.client()
    client.send(call("POST", "apply", {"text": "", "folder": "."}) + call("GET", "status"))
    wait_for(lambda: office.plane.asked)
    office.bed.backend()
    assert office.bed.ask(chat()).status == 200
    assert office.ask(call("GET", "status")).status == 200
    office.bed.thread.call(slow.set)
    assert [client.answer().status for _ in range(2)] == [200, 200]


def test_the_fleet_is_complete_for_a_rehearsal(office: Office) -> None:
    told = msgspec.convert(office.ask(call("GET", "fleet")).json(), Snapshot)
    assert told == office.plane.fleet()
    assert "m-1" in told.fleet().occupants
