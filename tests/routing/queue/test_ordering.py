from math import inf

import pytest

from pointsman.routing.queue import (
    BandSettings,
    EdfOrderingPolicy,
    FcfsOrderingPolicy,
    FlowControl,
    OrderingPolicy,
    SloDeadlineOrderingPolicy,
)
from tests.routing.queue.waiting import item, offer, served

SLO, OLD_SLO = "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"


def queue_with(ordering: OrderingPolicy, **settings: float) -> FlowControl:
    return FlowControl([BandSettings(ordering=ordering)], **settings)  # type: ignore[arg-type]


def test_first_come_first_served() -> None:
    queue = queue_with(FcfsOrderingPolicy())
    offer(queue, item("late"), now=2.0)
    offer(queue, item("early"), now=1.0)
    offer(queue, item("early too"), now=1.0)
    assert served(queue) == ["early", "early too", "late"]


@pytest.mark.parametrize(
    ("default_ttl_s", "order"),
    [
        (60.0, ["short", "older", "newer"]),
        (0.0, ["short", "older", "newer"]),  # no limit: requests without one of their own go last
        (1.0, ["older", "short", "newer"]),  # the queue's limit is the shorter one for all
    ],
)
def test_earliest_deadline_first(default_ttl_s: float, order: list[str]) -> None:
    queue = queue_with(EdfOrderingPolicy(), default_request_ttl_s=default_ttl_s)
    offer(queue, item("older"), now=0.0)
    offer(queue, item("short", ttl_s=5.0), now=1.0)
    offer(queue, item("newer", ttl_s=0.0), now=2.0)
    assert served(queue) == order


@pytest.mark.parametrize(
    ("headers", "slo_ms", "due"),
    [
        ({}, None, inf),
        ({SLO: "250"}, None, 10.25),
        ({SLO: "+250"}, None, 10.25),
        ({OLD_SLO: "250"}, None, 10.25),
        ({OLD_SLO: "250", SLO: "500"}, None, 10.5),
        ({SLO: "0"}, None, 10.0),
        ({SLO: "-1"}, None, inf),
        ({SLO: "2.5"}, None, inf),
        ({SLO: " 5"}, None, inf),
        ({SLO: "1_000"}, None, inf),
        ({SLO: "soon"}, None, inf),
        ({SLO: ""}, None, inf),
        ({SLO: "9223372036854"}, None, 10.0 + 9223372036.854),
        ({SLO: "9223372036855"}, None, inf),
        ({SLO: "9" * 5000}, None, inf),
        ({}, 250.0, 10.25),
        ({}, -1.0, inf),
        ({SLO: "500"}, 250.0, 10.5),
        ({SLO: "soon"}, 250.0, inf),
    ],
)
def test_the_deadline_of_a_slo(headers: dict[str, str], slo_ms: float | None, due: float) -> None:
    one = item(headers=headers, slo_deadline_ms=slo_ms, arrival_time=10.0)
    assert SloDeadlineOrderingPolicy().key(one) == (due, 10.0)


def test_equal_deadlines_go_by_time_of_arrival() -> None:
    queue = queue_with(SloDeadlineOrderingPolicy())
    offer(queue, item("later", arrival_time=2.0, headers={SLO: "1000"}), now=5.0)
    offer(queue, item("earlier", arrival_time=1.0, headers={SLO: "2000"}), now=6.0)
    offer(queue, item("no deadline", arrival_time=0.0), now=6.0)
    offer(queue, item("due first", arrival_time=2.5, headers={SLO: "100"}), now=7.0)
    assert served(queue) == ["due first", "earlier", "later", "no deadline"]


def test_a_request_without_arrival_counts_from_when_it_was_offered() -> None:
    one = item(slo_deadline_ms=500.0, arrival_time=None)
    offer(FlowControl(), one, now=3.0)
    assert SloDeadlineOrderingPolicy().key(one) == (3.5, 3.0)
