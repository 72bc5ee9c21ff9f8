"""Endpoints near the one that holds what the request needs."""

import pytest

from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.plugins import NEAR, RequestCycle
from pointsman.routing.scorers import TopologyAffinity
from pointsman.selection import Cycle
from pointsman.selection.columns import ARRAYS_FROM
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.routing.fleets import both_lengths, scores

NVLINK, NUMA, RACK = "pointsman/nvlink-domain", "pointsman/numa-node", "pointsman/rack"
PLACES: list[tuple[str, str, dict[str, str]]] = [
    ("anchor", "h1", {NVLINK: "0", NUMA: "0", RACK: "r"}),
    ("nvlink", "h1", {NVLINK: "0", NUMA: "1", RACK: "r"}),
    ("numa", "h1", {NVLINK: "1", NUMA: "0", RACK: "r"}),
    ("host", "h1", {}),
    ("rack", "h2", {NVLINK: "0", NUMA: "0", RACK: "r"}),
    ("far", "h3", {RACK: "q"}),
    ("silent", "", {}),
]


def fleet_of(long: bool) -> EndpointTable:
    others = [ExecutionInstance(instance_id=f"o{n}", host="elsewhere") for n in range(ARRAYS_FROM if long else 0)]
    return EndpointTable(
        [*(ExecutionInstance(instance_id=name, host=host, labels=labels) for name, host, labels in PLACES), *others]
    )


def near(name: str, header: str = "x-pointsman-near") -> RequestCycle:
    return Cycle(RequestMetadata("r", headers={header: name}))


WORTH = [1.0, 1.0, 0.9, 0.75, 0.5, 0.0, 0.0]


@both_lengths
@pytest.mark.parametrize(
    ("scorer", "cycle", "expected"),
    [
        (TopologyAffinity(), near("anchor"), WORTH),
        (TopologyAffinity("X-Near", 0.8, 0.6, 0.4, 0.2), near("anchor", "x-near"), [1, 0.8, 0.6, 0.4, 0.2, 0, 0]),
        (TopologyAffinity(), near("silent"), [0, 0, 0, 0, 0, 0, 1]),
        (TopologyAffinity(), near("no such endpoint"), [0.0] * 7),
        (TopologyAffinity(), near(""), [0.0] * 7),
        (TopologyAffinity(), near("anchor", "another-header"), [0.0] * 7),
        (TopologyAffinity(), Cycle(RequestMetadata("r")), [0.0] * 7),
    ],
)
def test_scores(scorer: TopologyAffinity, cycle: RequestCycle, expected: list[float], long: bool) -> None:
    assert scores(scorer, cycle, fleet_of(long).roster)[:7] == expected


@both_lengths
def test_near_in_the_cycle_overrides_the_header(long: bool) -> None:
    fleet = fleet_of(long)
    cycle = near("far")
    cycle[NEAR] = fleet["anchor"]
    assert scores(TopologyAffinity(), cycle, fleet.roster)[:7] == WORTH
    fleet.remove("anchor")
    assert scores(TopologyAffinity(), cycle, fleet.roster)[:6] == WORTH[1:], "what it held may still be near"


@both_lengths
def test_the_anchor_need_not_be_a_candidate(long: bool) -> None:
    roster = fleet_of(long).roster.without([0, 1])
    assert scores(TopologyAffinity(), near("anchor"), roster)[:5] == WORTH[2:]


@both_lengths
def test_no_candidates_no_scores(long: bool) -> None:
    fleet = fleet_of(long)
    empty = fleet.roster.without(range(len(fleet)))
    assert scores(TopologyAffinity(), near("anchor"), empty) == []
    assert scores(TopologyAffinity(), near("?"), empty) == []
