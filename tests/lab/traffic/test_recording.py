"""Recordings: formats, errors with their lines, and arrivals at any speed."""

from itertools import pairwise
from pathlib import Path

import pytest

from pointsman.lab.traffic import (
    RecordedRequest,
    Recording,
    ReplayLoad,
    UnreadableRecording,
    arrivals,
    recording_of_file,
)
from tests.lab.traffic.workloads import conversations, recorded, written


def test_mooncake_lines_are_read_with_all_optional_fields(tmp_path: Path) -> None:
    given = RecordedRequest(
        timestamp=1200, input_length=600, output_length=3, hash_ids=(4, 5), session_id="a", tenant="x", priority=-1,
        slo_ms=900, model="chat", think_ms=10,
    )  # fmt: skip
    file = written(tmp_path / "one.jsonl", [given, given])
    file.write_text(file.read_text() + '\n{"timestamp": 1300.5, "input_length": 7, "output_length": 0, "other": 1}\n')
    read = list(recording_of_file(file))
    assert read[:2] == [given, given]
    assert read[2] == RecordedRequest(timestamp=1300.5, input_length=7, output_length=0)


def test_azure_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = recording_of_file(file)
    assert (first.input_length, first.output_length, second.input_length) == (374, 44, 396)
    assert second.timestamp - first.timestamp == pytest.approx(4314.579, abs=0.01)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"timestamp": 1, "input_length": 5, "output_length": 1}\nnonsense\n', "line 2: nonsense is not"),
        ("a.jsonl", '\n{"timestamp": 1, "input_length": 5}\n', "line 2: .*output_length"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 0, "output_length": 1}\n', "line 1: input_length 0"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}\n',
            "line 1: 2 hash_ids for 512 tokens",
        ),
        ("a.jsonl", "\n\n", "there is no request in it"),
        ("a.csv", "TIME,ContextTokens\n1,2\n", "no column TIMESTAMP or GeneratedTokens; the header has TIME"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n2,many,3\n", "line 3: .*many"),
    ],
)
def test_problems_have_their_lines(tmp_path: Path, name: str, text: str, words: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UnreadableRecording, match=words):
        recording_of_file(file).survey()


def test_requests_out_of_order_are_sorted() -> None:
    each = conversations()
    assert list(recorded(*reversed(each))) == each
    assert list(recorded(*each)) == each


def ticks(count: int = 300) -> Recording:
    return recorded(
        *(
            RecordedRequest(timestamp=number // 10 * 3000, input_length=1 + number, output_length=1)
            for number in range(count)
        )
    )


def test_coarse_timestamps_are_spread_in_their_order_and_can_be_kept() -> None:
    assert ticks().survey().tick_ms == 3000
    spread = list(arrivals(ticks(), ReplayLoad(), seed=1))
    assert [one.request.input_length for one in spread] == list(range(1, 301))
    assert all(before.at <= after.at for before, after in pairwise(spread))
    assert all(one.request.timestamp <= one.at * 1000 < one.request.timestamp + 3000 for one in spread)
    assert len({one.at for one in spread}) == 300
    kept = list(arrivals(ticks(), ReplayLoad(spread=False), seed=1))
    assert [one.at * 1000 for one in kept] == [one.request.timestamp for one in kept]


def test_fine_timestamps_are_not_spread() -> None:
    each = conversations()
    assert recorded(*each).survey().tick_ms == 0
    found = [one.at * 1000 + each[0].timestamp for one in arrivals(recorded(*each), ReplayLoad(), 1)]
    assert found == pytest.approx([one.timestamp for one in each])


def test_speed_compresses_time_and_seeds_differ() -> None:
    once, twice = (list(arrivals(ticks(), ReplayLoad(speed=speed), 5)) for speed in (1.0, 2.0))
    assert [one.at / 2 for one in once] == pytest.approx([one.at for one in twice])
    assert [one.at for one in arrivals(ticks(), ReplayLoad(), 6)] != [one.at for one in once]


def test_more_clients_repeat_the_recording_with_prompts_of_their_own() -> None:
    each = conversations(60)
    found = list(arrivals(recorded(*each), ReplayLoad(speed=2.5, clients=True), 3))
    assert 2.2 * len(each) < len(found) < 2.8 * len(each)
    assert all(before.at <= after.at for before, after in pairwise(found))
    assert [one.number for one in found] == list(range(len(found)))
    sessions: dict[str, set[int]] = {}
    for one in found:
        sessions.setdefault(one.request.session_id.rpartition("~")[2], set()).add(one.request.hash_ids[0])
    assert sessions["1"].isdisjoint(sessions["2"])
    turns = [sum(one.request.session_id == f"{name}~2" for one in found) for name in {one.session_id for one in each}]
    assert set(turns) == {0, 4}, "a share of clients is a share of conversations"


def test_the_first_requests_of_a_recording(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", conversations())
    whole, part = recording_of_file(file), recording_of_file(file, 7)
    assert list(part) == list(whole)[:7]
    assert whole.survey().digest != part.survey().digest
