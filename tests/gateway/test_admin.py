"""The admin API: TCP requires its key, the local socket does not; responses are plain data."""

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
from pointsman.config.revision import ManifestText, Revision
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.gateway.admin import Admin
from pointsman.gateway.connection import GatewayConnection
from pointsman.placement import Claim, Place, Tier
from pointsman.placement.fleet import Occupant, Snapshot
from pointsman.reasons import Reason
from pointsman.runtimes.event_log import THE_PLANE, Asker, EventLog
from pointsman.runtimes.machine.state_directory import AdminSocket
from pointsman.runtimes.stores import StoredManifest
from pointsman.scaling.deployment import ScaledDeployment
from pointsman.types import Worker
from tests.gateway.backends import OK, answer, answers, hangs
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.test_names_of_kinds import deployment
from tests.gateway.wire import HEALTH, Client, Message, chat, wait_for

KEY = "key-of-admin-90bc"
KEYED = {"adminKeySha256": sha256(KEY.encode()).hexdigest()}


class FakePlane:
    """A plane that records the calls of the admin API."""

    revision = Revision()

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answers: Callable[[], Any] = lambda: None
        self.slow: asyncio.Event | None = None
        self.stopped = 0
        self.events = EventLog(lambda: 1_700_000_000.0)

    def _do(self, *call: Any) -> Any:
        self.calls.append(call)
        return self.answers()

    def status(self) -> dict[str, Any]:
        self._do("status")
        node = {"name": "n", "kind": "class", "deployments": ["app.n"]}
        return {
            "ready": True,
            "applications": [{"name": "app", "path": "/app", "nodes": [node]}],
            "deployments": [deployment("chat", "smollm2"), deployment("app.n", internal=True)],
        }

    def plan(self, manifest: ManifestText) -> Changes:
        self._do("plan", manifest)
        return Changes((Change("start", "chat-1", Reason("2 replicas are wanted")),))

    async def apply(
        self, document: ManifestText, confirmation: str | None = None, asker: Asker = THE_PLANE, note: str = ""
    ) -> Changes:
        self.asker = asker
        self._do("apply", document, confirmation)
        if self.slow is not None:
            await self.slow.wait()
        return Changes(())

    def fleet(self) -> Snapshot:
        self._do("fleet")
        place = Place(tier=Tier.CPU, claims=(Claim(worker="w", memory_bytes=5),))
        return Snapshot((Worker(name="w", cpus=2, memory_bytes=9),), (Occupant("m-1", place, "m"),))

    async def deploy(
        self, document: ManifestText, confirmation: str | None = None, asker: Asker = THE_PLANE
    ) -> Changes:
        self._do("deploy", document, confirmation)
        return Changes((Change("open", "app", Reason("new")),))

    async def rollback(self, name: str, confirmation: str | None = None, asker: Asker = THE_PLANE) -> Changes:
        self._do("rollback", name, confirmation)
        return Changes()

    def history(self) -> list[StoredManifest]:
        self._do("history")
        return [StoredManifest(2, 1e9, "start chat-1", 1, ManifestText("x", "/", "m.yaml"))]

    async def restore(
        self, generation: int | None, confirmation: str | None = None, asker: Asker = THE_PLANE
    ) -> Changes:
        self._do("restore", generation, confirmation)
        return Changes()

    async def delete(self, name: str, asker: Asker = THE_PLANE) -> Changes:
        self._do("delete", name)
        return Changes((Change("close", name, Reason("gone")),))

    def application(self, name: str) -> str:
        self._do("application", name)
        return f"name: {name}\n"

    async def logs(self, instance_id: str, lines: int) -> str:
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


class AdminBed:
    """A gateway with an admin API and its local socket."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed = bed
        self.plane = FakePlane()
        self.admin = bed.thread.call(lambda: Admin(bed.gateway, self.plane, self.plane.status, self.plane.stop))
        self.path = folder / "admin.sock"
        admin = AdminSocket(self.path)
        bed.thread.run(admin.listen(lambda: GatewayConnection(bed.gateway, is_local=True), list))
        bed.closing.append(admin.close)

    def client(self) -> Client:
        return self.bed.local_client(self.path)

    def fetch(self, request: bytes) -> Message:
        """Send one request over the local socket."""
        client = self.client()
        try:
            return client.fetch(request)
        finally:
            client.close()


@pytest.fixture
def admin_bed(make_bed: MakeBed, tmp_path: Path) -> AdminBed:
    return AdminBed(make_bed(KEYED), tmp_path)


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
names = pytest.mark.parametrize("raw", CALLS, ids=lambda raw: raw.split(b" HTTP")[0].decode())


@names
@pytest.mark.parametrize(
    "line", ["", "authorization: Bearer wrong", f"authorization: Bearer {KEYED['adminKeySha256']}", f"cookie: {KEY}"]
)
def test_tcp_requires_the_admin_key(admin_bed: AdminBed, raw: bytes, line: str) -> None:
    got = admin_bed.bed.fetch(raw.replace(b"\r\n", b"\r\n" + (f"{line}\r\n".encode() if line else b""), 1))
    assert (got.status, got.error["type"]) == (401, "authentication_error")
    assert admin_bed.plane.calls == []
    assert admin_bed.plane.stopped == 0


@names
def test_tcp_is_closed_without_a_configured_key(make_bed: MakeBed, tmp_path: Path, raw: bytes) -> None:
    admin_bed = AdminBed(make_bed(), tmp_path)
    for line in (b"", b"authorization: Bearer \r\n", b"authorization: Bearer x\r\n", b"x-api-key:\r\n"):
        assert admin_bed.bed.fetch(raw.replace(b"\r\n", b"\r\n" + line, 1)).status == 401
    assert admin_bed.plane.calls == []


def test_a_tenants_key_is_not_an_admin_key(make_bed: MakeBed, tmp_path: Path) -> None:
    other = sha256(b"red").hexdigest()
    admin_bed = AdminBed(
        make_bed({**KEYED, "keys": [{"sha256": other, "tenant": "red"}], "tenants": [{"name": "red"}]}), tmp_path
    )
    assert admin_bed.bed.fetch(call("GET", "status", None, "authorization: Bearer red")).status == 401
    assert admin_bed.bed.fetch(chat(f"authorization: Bearer {KEY}")).status == 401, "nor is the admin key a tenant's"


@pytest.mark.parametrize("line", [f"authorization: Bearer {KEY}", f"x-api-key: {KEY}"])
def test_tcp_accepts_the_admin_key(admin_bed: AdminBed, line: str) -> None:
    got = admin_bed.bed.fetch(call("GET", "status", None, line))
    assert (got.status, got.json()["ready"]) == (200, True)


def test_events_are_listed_and_awaited(admin_bed: AdminBed) -> None:
    events = admin_bed.plane.events
    assert admin_bed.fetch(call("GET", "events")).json() == {"events": []}
    assert admin_bed.fetch(call("GET", "events?wait=x")).status == 400
    waiting = admin_bed.client()
    waiting.send(call("GET", "events?wait=30&deployment=chat"))
    wait_for(lambda: bool(events.followers), "the request waits")
    admin_bed.bed.thread.call(lambda: events.note("other", Reason("drained")))
    admin_bed.bed.thread.call(lambda: events.note("chat", Reason("drained")))
    assert [one["number"] for one in waiting.read_response().json()["events"]] == [2]
    assert [one["number"] for one in admin_bed.fetch(call("GET", "events?after=1&limit=5")).json()["events"]] == [2]
    assert events.followers == []


def test_events_are_streamed_as_they_happen(admin_bed: AdminBed) -> None:
    events, thread = admin_bed.plane.events, admin_bed.bed.thread

    def note(name: str) -> None:
        thread.call(lambda: events.note(name, Reason("drained")))

    for name in ("chat", "other", "chat"):
        note(name)
    accept = "accept: text/event-stream"
    client = admin_bed.client()
    client.send(call("GET", "events?after=1&deployment=chat", None, accept))
    assert client.head().header("content-type") == "text/event-stream; charset=utf-8"
    assert b"id: 1\n" not in client.until(b"id: 3\ndata: {")
    note("other")
    note("chat")
    assert b"id: 4" not in client.until(b"id: 5\n")
    client.close()
    wait_for(lambda: not events.followers, "the stream ends with its client")
    again = admin_bed.client()
    again.send(call("GET", "events", None, accept, "last-event-id: 4"))
    assert b"id: 4\n" not in again.until(b"id: 5\n")
    again.close()
    assert admin_bed.fetch(call("GET", "events", None, accept, "last-event-id: x")).status == 400
    wait_for(lambda: not events.followers)


def test_memory_for_a_slow_reader_of_events_is_bounded(admin_bed: AdminBed) -> None:
    events, thread = admin_bed.plane.events, admin_bed.bed.thread
    client = admin_bed.bed.client(narrow=True)
    client.send(call("GET", "events", None, "accept: text/event-stream", f"authorization: Bearer {KEY}"))
    client.head()

    def burst() -> None:
        for _ in range(500):
            events.note("chat", Reason("turned-away", {"text": "x" * 1000}))

    for _ in range(8):
        thread.call(burst)
    buffered = thread.call(lambda: max(one.transport.get_write_buffer_size() for one in admin_bed.bed.gateway.clients))
    assert buffered < 2_000_000
    assert client.until(b"id: 4000\n")
    client.close()
    wait_for(lambda: not events.followers)


def test_what_operators_ask_for_is_an_event(admin_bed: AdminBed) -> None:
    admin_bed.fetch(call("GET", "status"))
    admin_bed.fetch(call("POST", "plan", {"text": "", "folder": "."}))
    admin_bed.fetch(call("POST", "instances/chat-0/drain", None, "x-pointsman-author: Ada"))
    admin_bed.bed.fetch(call("POST", "applications/none/rollback", b"?", f"authorization: Bearer {KEY}"))
    events = admin_bed.plane.events.since(0, 10)
    assert [(one["by"], one["key"], one["text"]) for one in events] == [
        ("Ada", "", "POST instances chat-0 drain: answered with 200"),
        ("the admin API", KEYED["adminKeySha256"][:8], "POST applications none rollback: answered with 400"),
    ]
    body = {"text": "", "folder": "."}
    lines = (f"authorization: Bearer {KEY}", "x-pointsman-author: Ada")
    assert admin_bed.bed.fetch(call("POST", "apply", body, *lines)).status == 200
    assert admin_bed.plane.asker == Asker("Ada", KEYED["adminKeySha256"][:8])


def test_scaling_can_be_read_and_ordered(admin_bed: AdminBed) -> None:
    got = admin_bed.fetch(call("GET", "deployments/diamond%2Fm1/scaling")).json()
    assert (got["desired"], got["ongoing"], got["queued"]) == (3, 7, 2)
    assert admin_bed.fetch(call("POST", "deployments/chat/scale", {"replicas": 4, "for_s": 60})).json()["desired"] == 3
    assert admin_bed.fetch(call("POST", "deployments/chat/scale", {"replicas": None, "by": "Ada"})).status == 200
    year, wordy = 366 * 86400, "Ada\n\x1b[2J and " + "x" * 1000
    assert (
        admin_bed.fetch(call("POST", "deployments/chat/scale", {"replicas": 1, "for_s": year, "by": wordy})).status
        == 200
    )
    assert admin_bed.fetch(call("POST", "deployments/chat/scale", {"replicas": 1, "by": "\n"})).status == 200
    assert [made for made in admin_bed.plane.calls if made[0] == "scale"] == [
        ("scale", "chat", 4, 60.0, "this machine"),
        ("scale", "chat", None, None, "Ada"),
        ("scale", "chat", 1, float(year), "Ada [2J and " + "x" * 85 + "..."),
        ("scale", "chat", 1, None, "this machine"),
    ]
    assert ("scaling", "diamond/m1") in admin_bed.plane.calls


def test_recorded_load_can_be_read(admin_bed: AdminBed) -> None:
    got = admin_bed.fetch(call("GET", "deployments/diamond%2Fm1/load")).json()
    assert (got["bin_s"], got["bins"]) == (600.0, [{"began": 0.0, "per_second": 2.5}])
    assert admin_bed.plane.calls == [("load", "diamond/m1")]


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
def test_an_invalid_scale_order_is_refused(admin_bed: AdminBed, body: object) -> None:
    assert admin_bed.fetch(call("POST", "deployments/chat/scale", body)).status == 400
    assert admin_bed.plane.calls == []


def test_a_scale_order_for_more_than_a_year_is_refused(admin_bed: AdminBed) -> None:
    got = admin_bed.fetch(call("POST", "deployments/chat/scale", {"replicas": 1, "for_s": 1e308}))
    assert got.error["message"] == (
        "for_s may be at most a year, which is 31622400, found 1e+308; "
        "leave it out to hold the number until further notice"
    )


def test_the_local_socket_needs_no_key(admin_bed: AdminBed) -> None:
    assert admin_bed.fetch(call("GET", "status")).json()["ready"] is True
    assert admin_bed.fetch(HEALTH).status == 200


def test_the_local_socket_is_exempt_from_the_connection_limit(make_bed: MakeBed, tmp_path: Path) -> None:
    """Operators need it most when the gateway is full."""
    admin_bed = AdminBed(make_bed({"limits": {"maxConnections": 1}}), tmp_path)
    first = admin_bed.bed.client()
    assert first.fetch(HEALTH).status == 200
    assert admin_bed.fetch(call("GET", "status")).status == 200


def test_plan_and_apply(admin_bed: AdminBed) -> None:
    manifest = {"text": "deployments: []", "folder": "/somewhere", "file": "x.yaml"}
    planned = admin_bed.fetch(call("POST", "plan", manifest)).json()
    [change] = planned["changes"]
    reason = {"code": "2 replicas are wanted", "facts": {}, "text": "2 replicas are wanted"}
    assert change == {"what": "start", "subject": "chat-1", "why": reason["text"], "reason": reason}
    assert "chat-1" in planned["text"]
    assert admin_bed.fetch(call("POST", "apply", manifest)).json()["changes"] == []
    expected = ManifestText("deployments: []", "/somewhere", "x.yaml")
    assert admin_bed.plane.calls == [("plan", expected), ("apply", expected, "")]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", [], {"text": 5, "folder": "."}, {}, b"\xff", b"[" * 99999],
    ids=["empty", "no JSON", "a list", "another type", "fields missing", "no UTF-8", "too deep"],
)
def test_what_is_not_a_manifest_is_refused(admin_bed: AdminBed, body: object) -> None:
    got = admin_bed.fetch(call("POST", "apply", body))
    assert got.status == 400
    assert got.error["message"]
    assert admin_bed.plane.calls == []


def raises(error: Exception) -> Callable[[], Any]:
    def raise_error() -> Any:
        raise error

    return raise_error


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
def test_errors_of_the_plane_are_answered(admin_bed: AdminBed, error: Exception, status: int) -> None:
    admin_bed.plane.answers = raises(error)
    for request in (call("GET", "status"), call("POST", "apply", {"text": "", "folder": "."})):
        got = admin_bed.fetch(request)
        assert got.status == status
        assert str(error) in got.error["message"] or status == 422
        if status == 422:
            assert len(got.error["problems"]) == 2
    admin_bed.plane.answers = lambda: None
    assert admin_bed.fetch(call("GET", "status")).status == 200


def test_the_name_of_something_else_is_recognised(admin_bed: AdminBed) -> None:
    def unknown() -> None:
        if admin_bed.plane.calls[-1][0] == "drain":
            raise UnknownName("instance", admin_bed.plane.calls[-1][1], ["chat-1"])

    admin_bed.plane.answers = unknown
    got = admin_bed.fetch(call("POST", "instances/smollm2/drain"))
    assert got.status == 404
    assert got.error["message"] == '"smollm2" is a model, not an instance; use: chat-1, chat-2'


def test_a_request_that_is_a_deployment(admin_bed: AdminBed) -> None:
    told = admin_bed.fetch(call("GET", "requests/chat")).error["message"]
    assert told.startswith('"chat" is a deployment, not a request; to list requests: pointsman requests')
    assert "there is no record of a request" in admin_bed.fetch(call("GET", "requests/chut")).error["message"]


def test_applications_are_deployed_read_rolled_back_and_deleted(admin_bed: AdminBed) -> None:
    document = {"text": "kind: Application", "folder": "/somewhere", "file": "app.yaml"}
    written = ManifestText("kind: Application", "/somewhere", "app.yaml")
    assert admin_bed.fetch(call("POST", "applications/plan", document)).json()["changes"][0]["what"] == "start"
    assert admin_bed.fetch(call("POST", "applications", document)).json()["changes"][0]["what"] == "open"
    assert [one["name"] for one in admin_bed.fetch(call("GET", "applications")).json()["applications"]] == ["app"]
    body = admin_bed.fetch(call("GET", "applications/app")).json()
    assert (body["name"], body["yaml"], [one["name"] for one in body["deployments"]]) == (
        "app",
        "name: app\n",
        ["app.n"],
    )
    assert admin_bed.fetch(call("POST", "applications/app/rollback")).json()["changes"] == []
    assert admin_bed.fetch(call("DELETE", "applications/app")).json()["changes"][0]["what"] == "close"
    expected = [("plan", written), ("deploy", written, ""), ("status",), ("application", "app"), ("status",)]
    assert admin_bed.plane.calls == [*expected, ("rollback", "app", ""), ("delete", "app")]
    for wrong in (call("DELETE", "applications"), call("POST", "applications/app"), call("GET", "applications/a/b")):
        assert admin_bed.fetch(wrong).error["code"] == "not_found"


def test_logs_and_draining(admin_bed: AdminBed) -> None:
    assert admin_bed.fetch(call("GET", "instances/chat-0/logs?lines=5")).json() == {
        "instance": "chat-0",
        "text": "a line\n",
    }
    assert admin_bed.fetch(call("GET", "instances/a%2Fb%20c/logs")).json()["instance"] == "a/b c"
    assert admin_bed.fetch(call("POST", "instances/chat-0/drain")).json() == {"instance": "chat-0", "draining": True}
    assert admin_bed.plane.calls == [("logs", "chat-0", 5), ("logs", "a/b c", 100), ("drain", "chat-0")]


@pytest.mark.parametrize("number", ["-1", "x", "1.5", "%C2%B2", "9" * 5000, "1e3", "%D9%A3"])
@pytest.mark.parametrize("path", ["instances/chat-0/logs?lines=", "requests?limit="])
def test_invalid_numbers_in_queries(admin_bed: AdminBed, path: str, number: str) -> None:
    got = admin_bed.fetch(call("GET", path + number))
    assert got.status == 400
    assert "whole number" in got.error["message"]


def test_stopping(admin_bed: AdminBed) -> None:
    assert admin_bed.fetch(call("POST", "down")).json() == {"stopping": True}
    wait_for(lambda: admin_bed.plane.stopped == 1)


@pytest.mark.parametrize("raw", [call("POST", "status"), call("GET", "apply"), call("DELETE", "requests/it")])
def test_unknown_paths_are_not_found(admin_bed: AdminBed, raw: bytes) -> None:
    assert admin_bed.fetch(raw).error["code"] == "not_found"


def test_head_is_get_without_a_body(admin_bed: AdminBed) -> None:
    client = admin_bed.client()
    client.send(call("HEAD", "status"))
    assert client.read_response(to_head=True).status == 200
    assert client.stays_open()


# Records


def test_records_are_listed_newest_first(admin_bed: AdminBed) -> None:
    bed = admin_bed.bed
    bed.backend(answers(answer({"error": "oops"}, 500), OK))
    for number in range(5):
        tenant = "red" if number % 2 else "blue"
        assert bed.fetch(chat(f"x-request-id: n{number}", f"x-pointsman-tenant: {tenant}")).status == 200
    body = admin_bed.fetch(call("GET", "requests")).json()
    assert body["found"] == 5
    assert [one["request_id"] for one in body["requests"]] == ["n4", "n3", "n2", "n1", "n0"]
    assert {one["state"] for one in body["requests"]} == {"served"}

    def found(query: str) -> list[str]:
        return [one["request_id"] for one in admin_bed.fetch(call("GET", f"requests?{query}")).json()["requests"]]

    assert found("tenant=red") == ["n3", "n1"]
    assert found("tenant=red&limit=1") == ["n3"]
    assert found("limit=0") == []
    assert found("model=m&instance=chat-0&state=served&limit=2") == ["n4", "n3"]
    assert found("instance=unknown") == found("state=waiting") == found("model=x") == []


def test_the_record_of_a_request(admin_bed: AdminBed) -> None:
    bed = admin_bed.bed
    bed.backend(answers(answer({"error": "oops"}, 500), OK))
    bed.fetch(chat("x-request-id: a/b c", "x-pointsman-priority: high"))
    body = admin_bed.fetch(call("GET", "requests/a%2Fb%20c")).json()
    assert (body["request_id"], body["state"], body["tries"], body["priority"]) == ("a/b c", "served", 2, 1)
    facts, text = {"status": 500, "body": '{"error": "oops"}'}, 'it answered 500: {"error": "oops"}'
    reason = {"code": "answered-error", "facts": facts, "text": text}
    assert body["failed_tries"] == [{"instance": "chat-0", "why": text, "reason": reason}]
    assert body["decision"]["target_instance_id"] == "chat-0"
    assert body["trace"]
    assert body["output_tokens"] == 2
    assert body["arrived"].startswith("20")
    assert "tried chat-0" in body["text"]


def test_the_record_of_a_waiting_request_has_current_reasons(admin_bed: AdminBed) -> None:
    bed = admin_bed.bed
    bed.backend(hangs(), max_concurrency=1)
    first, second = bed.client(), bed.client()
    first.send(chat())
    wait_for(bed.running)
    second.send(chat("x-request-id: it"))
    wait_for(bed.waiting)
    body = admin_bed.fetch(call("GET", "requests/it")).json()
    assert body["state"] == "waiting"
    assert "chat-0" in body["rejected"]


def test_an_unknown_request_id_is_not_found(admin_bed: AdminBed) -> None:
    got = admin_bed.fetch(call("GET", "requests/unknown"))
    assert (got.status, got.error["code"]) == (404, "not_found")
    assert "unknown" in got.error["message"]


# Clients that disconnect


def test_admin_work_is_done_although_its_client_disconnects(admin_bed: AdminBed) -> None:
    slow = admin_bed.plane.slow = admin_bed.bed.thread.call(asyncio.Event)
    client = admin_bed.client()
    client.send(call("POST", "apply", {"text": "", "folder": "."}))
    wait_for(lambda: admin_bed.plane.calls)
    client.close()
    wait_for(lambda: not admin_bed.bed.gateway.clients)
    assert admin_bed.admin._tasks
    admin_bed.bed.thread.call(slow.set)
    wait_for(lambda: not admin_bed.admin._tasks)


def test_slow_admin_requests_do_not_delay_others(admin_bed: AdminBed) -> None:
    slow = admin_bed.plane.slow = admin_bed.bed.thread.call(asyncio.Event)
    client = admin_bed.client()
    client.send(call("POST", "apply", {"text": "", "folder": "."}) + call("GET", "status"))
    wait_for(lambda: admin_bed.plane.calls)
    admin_bed.bed.backend()
    assert admin_bed.bed.fetch(chat()).status == 200
    assert admin_bed.fetch(call("GET", "status")).status == 200
    admin_bed.bed.thread.call(slow.set)
    assert [client.read_response().status for _ in range(2)] == [200, 200]


def test_the_fleet_is_complete_for_a_rehearsal(admin_bed: AdminBed) -> None:
    snapshot = msgspec.convert(admin_bed.fetch(call("GET", "fleet")).json(), Snapshot)
    assert snapshot == admin_bed.plane.fleet()
    assert "m-1" in snapshot.fleet().occupants
