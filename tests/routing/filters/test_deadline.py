"""Requests with a deadline stay away from endpoints that would miss it."""

from typing import Any

import pytest

from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.filters.deadline import MeetsDeadline
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Cycle
from pointsman.selection.columns import ARRAYS_FROM
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.routing.fleets import both_lengths, kept, reasons

Facts = dict[str, Any]


def roster_of(rows: list[Facts], long: bool) -> Endpoints:
    others = [ExecutionInstance(instance_id=f"other {n}") for n in range(ARRAYS_FROM if long else 0)]
    fleet = EndpointTable([*(ExecutionInstance(instance_id=str(n), **row) for n, row in enumerate(rows)), *others])
    return fleet.roster.without(range(len(rows), len(fleet))) if long else fleet.roster


def asks(slo_ms: float | None, *, arrived: float | None = 10.0, now: float = 10.0) -> RequestCycle:
    return Cycle(RequestMetadata("r", max_tokens=100, slo_deadline_ms=slo_ms, arrival_time=arrived), now=now)


def takes(latency_ms: float | None, **more: Any) -> Facts:
    return {"avg_latency_ms": latency_ms, "max_concurrency": 4} | more


UNKNOWN = takes(None)


@both_lengths
@pytest.mark.parametrize(
    ("cycle", "rows", "expected"),
    [
        (asks(None), [takes(1e9)], [0]),
        (asks(500, arrived=None), [takes(1e9)], [0]),
        (asks(500), [takes(100), takes(500), takes(501)], [0, 1]),
        # Half of its time is over.
        (asks(500, now=10.25), [takes(100), takes(250), takes(251)], [0, 1]),
        # The deadline has passed: only endpoints without measurements pass.
        (asks(500, now=11.0), [takes(1), UNKNOWN], [1]),
        (asks(0), [takes(1), UNKNOWN], [1]),
        (asks(500), [UNKNOWN, takes(900), UNKNOWN], [0, 2]),
        (asks(500), [takes(300), takes(300, current_load=4)], [0]),
        # 100 tokens at 100 a second.
        (asks(500), [takes(None, throughput_tokens_per_sec=100), takes(None, throughput_tokens_per_sec=1000)], [1]),
        (asks(500), [], []),
    ],
)
def test_keeps_endpoints_that_meet_the_deadline(
    cycle: RequestCycle, rows: list[Facts], expected: list[int], long: bool
) -> None:
    assert kept(MeetsDeadline(), cycle, roster_of(rows, long)) == expected


@both_lengths
def test_says_why(long: bool) -> None:
    roster = roster_of([takes(900), takes(1), takes(600, current_load=4)], long)
    assert reasons(MeetsDeadline(), asks(1000, now=10.3), roster) == [
        "too slow: 900 ms expected, 700 ms left",
        "too slow: 1200 ms expected, 700 ms left",
    ]
    assert reasons(MeetsDeadline(), asks(1000, now=99.0), roster)[1] == "too slow: 1 ms expected, 0 ms left"
