"""A trace as a table and as JSON."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pointsman.render.text import trace_table
from pointsman.selection import Cycle, MaxScorePicker, Profile, Roster, Scheduler, Trace


class NotC:
    def rejections(self, cycle: Cycle[Any], candidates: Roster[str]) -> Iterable[tuple[str, str]]:
        return [(name, "full: 8 of 8") for name in candidates if name == "c"]


class Length:
    def scores(self, cycle: Cycle[Any], candidates: Roster[str]) -> Sequence[float]:
        return [len(name) / 10 for name in candidates]


REASON = {"code": "not-c", "facts": {"text": "full: 8 of 8"}, "text": "full: 8 of 8"}


def traced() -> Trace:
    trace = Trace()
    Scheduler([Profile[str]("default", NotC(), (Length(), 2.0), MaxScorePicker())]).run(
        Cycle("r", trace=trace), Roster(["a", "bbb", "c"])
    )
    return trace


def test_as_table() -> None:
    assert trace_table(traced().as_dict()).splitlines() == [
        'profile "default", 3 candidates',
        "candidate  length x2  total  verdict",
        "---------  ---------  -----  -------------------",
        "bbb            0.300  0.600  chosen",
        "a              0.100  0.200",
        "c                            not-c: full: 8 of 8",
    ]


def test_as_json() -> None:
    [profile] = json.loads(traced().as_json())["profiles"]
    assert profile == {
        "profile": "default",
        "candidates": 3,
        "rejected": [{"candidate": "c", "filter": "not-c", "reason": REASON}],
        "scored": [
            {"candidate": "a", "total": 0.2, "scores": {"length": 0.1}},
            {"candidate": "bbb", "total": 0.6, "scores": {"length": 0.3}},
        ],
        "weights": {"length": 2.0},
        "clamped": {},
        "picker": "max-score-picker",
        "targets": ["bbb"],
    }


def test_nothing_is_collected_without_a_trace() -> None:
    cycle = Cycle("r")
    Scheduler([Profile[str]("default", NotC(), Length(), MaxScorePicker())]).run(cycle, Roster(["a"]))
    assert cycle.trace is None
