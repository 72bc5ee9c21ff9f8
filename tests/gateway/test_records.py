"""The file of records: bounded, and readable whatever happened to its end."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.lookup import _closed_until
from pointsman.gateway.records import MAX_DETAILED, RECORD_FILE, RecordFile, RequestHistory, StoredRecord, stored_of
from pointsman.http.heads import HttpRequest
from pointsman.reasons import Reason
from pointsman.routing.records import Record
from pointsman.selection.trace import ProfileTrace, Trace
from tests.gateway.bed import Bed
from tests.gateway.wire import chat


def line(number: int) -> bytes:
    outcome = {"request_id": f"r{number}", "state": "served", "model": "m"}
    return msgspec.json.encode(StoredRecord(float(number), "", outcome))


def written(folder: Path, batches: list[list[bytes]], max_bytes: int) -> RecordFile:
    async def write() -> RecordFile:
        for lines in batches:
            file = RecordFile(folder, asyncio.get_running_loop())
            file.max_bytes = max_bytes
            file.append(lines)
            await file.close()
        return file

    return asyncio.run(write())


def test_the_file_is_bounded(tmp_path: Path) -> None:
    file = written(tmp_path, [[line(number)] for number in range(100)], 2000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    found = file.lines(1000)
    assert found[-1] == line(99)
    assert found == [line(number) for number in range(100 - len(found), 100)]
    assert file.lines(3) == [line(97), line(98), line(99)]
    assert (tmp_path / RECORD_FILE).stat().st_mode & 0o077 == 0


def test_nothing_is_stored_if_nothing_may_be(tmp_path: Path) -> None:
    written(tmp_path, [[line(1)]], 2000)
    written(tmp_path, [[line(2)]], 0)
    assert not list(tmp_path.iterdir())


def test_a_line_that_is_cut_off_is_left_out(tmp_path: Path, bed: Bed) -> None:
    file = written(tmp_path, [[line(1), line(2)]], 2000)
    with (tmp_path / RECORD_FILE).open("ab") as whole:
        whole.write(line(3)[:20])
    history = RequestHistory(10, bed.gateway.traffic, bed.gateway.admission)
    history.open(file, 10)
    assert [one.arrived for one in history.stored({})] == [2.0, 1.0]
    assert history.stored({"state": "refused"}) == []
    explained = stored_of(history, "r2")
    assert explained is not None
    assert "how it was decided is not stored" in explained.explained()["text"]


def test_a_busy_plane_stores_every_outcome_and_some_decisions(tmp_path: Path, bed: Bed) -> None:
    lines: list[bytes] = []

    class Lines(RecordFile):
        def append(self, given: Iterable[bytes]) -> None:
            lines.extend(given)

    bed.backend()
    for _ in range(60):
        assert bed.fetch(chat()).status == 200
    history = bed.gateway.history

    def collect() -> None:
        history.open(Lines(tmp_path, bed.gateway.loop), 10)
        for lane in bed.gateway.traffic.all_lanes():
            lane.dispatcher.ended_records.extend(lane.dispatcher.records.newest())
        history.collect()

    bed.thread.call(collect)
    stored = [msgspec.json.decode(one, type=StoredRecord) for one in lines]
    assert len(stored) >= 60
    kept = {one.request_id: one for lane in bed.gateway.traffic.all_lanes() for one in lane.dispatcher.records.newest()}
    assert {one.request_id: one.summary() for one in stored} == {name: one.summary() for name, one in kept.items()}
    told = {one.request_id: one.explained() for one in stored}
    assert all(one["state"] == "served" for one in told.values())
    with_decision = [request_id for request_id, one in told.items() if "decision" in one]
    assert 0 < len(with_decision) <= MAX_DETAILED
    for request_id in with_decision:
        assert told[request_id]["text"] == f"{kept[request_id]}\n(by an earlier run of this plane)"


@pytest.mark.parametrize("tenant", ["", "red"])
def test_strangers_do_not_displace_tenants(tenant: str, bed: Bed) -> None:
    history = RequestHistory(5000, bed.gateway.traffic, bed.gateway.admission)
    http = HttpRequest(b"POST", b"/v1/completions", b"/v1/completions", b"", {})
    for number in range(3000):
        error = NotAdmitted(401, "why", "x", tenant=tenant)
        assert history.note_refused(http, error, None, "m", f"r{number}") == f"r{number}"
    assert len(history.kept()) == (3000 if tenant else 1000)


def test_a_filter_of_a_user_may_be_called_paused() -> None:
    lunch = [("chat-0", Reason("paused", {"text": "at lunch"})), ("chat-1", Reason("paused", {"until": "noon"}))]
    ours = [("chat-2", Reason("ejected", {"until": 12.5}))]
    record = Record("r", "chat", 0, None, "", None, 1.0, 5)
    record.trace = Trace((ProfileTrace("default", 3, [("paused", lunch), ("serving-filter", ours)]),))
    assert _closed_until(record) == {"chat-2": 12.5}
