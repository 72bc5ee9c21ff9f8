"""Filters for model, health and room."""

from typing import Any

import pytest

from pointsman.routing.endpoints import Endpoint, EndpointTable, Metrics
from pointsman.routing.filters.serving import HasRoom, IsHealthy, ServesModel
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Cycle, Filter
from pointsman.selection.columns import ARRAYS_FROM
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.routing.fleets import both_lengths, kept, reasons

Facts = dict[str, Any]


def fleet_of(rows: list[Facts], long: bool) -> EndpointTable:
    others = [ExecutionInstance(instance_id=f"other {n}", model_name="o") for n in range(ARRAYS_FROM if long else 0)]
    return EndpointTable([*(ExecutionInstance(instance_id=str(n), **row) for n, row in enumerate(rows)), *others])


def candidates(fleet: EndpointTable, rows: list[Facts]) -> Endpoints:
    return fleet.roster.without(range(len(rows), len(fleet))) if len(fleet) > len(rows) else fleet.roster


def asks(model: str = "") -> RequestCycle:
    return Cycle(RequestMetadata("r", model_name=model))


def serves(model: str, *adapters: str) -> Facts:
    return {"model_name": model, "adapters": frozenset(adapters)}


def load(running: int, limit: int | None) -> Facts:
    return {"current_load": running, "max_concurrency": limit}


OPEN, CLOSED = {"can_accept_request": True}, {"can_accept_request": False}
ANOTHER = "serving another model"


@both_lengths
@pytest.mark.parametrize(
    ("demand", "model", "rows", "expected", "why"),
    [
        (ServesModel(), "m", [serves("m"), serves("n"), serves("n", "m"), serves("")], [0, 2], [ANOTHER] * 2),
        (ServesModel(), "", [serves("m"), serves("")], [0, 1], []),
        (ServesModel(), "M", [serves("m")], [], [ANOTHER]),
        (ServesModel(), "m", [serves("m"), serves("m")], [0, 1], []),
        (ServesModel(), "m", [], [], []),
        (IsHealthy(), "", [OPEN, CLOSED, OPEN], [0, 2], ["not accepting requests"]),
        (IsHealthy(), "", [CLOSED, CLOSED], [], ["not accepting requests"] * 2),
        (IsHealthy(), "", [OPEN], [0], []),
        (IsHealthy(), "", [], [], []),
        (HasRoom(), "", [load(1, 2), load(2, 2), load(5, 2)], [0], ["full: 2 of 2 requests", "full: 5 of 2 requests"]),
        (HasRoom(), "", [load(0, 0), load(999, None)], [1], ["full: 0 of 0 requests"]),
        (HasRoom(), "", [load(0, 1)], [0], []),
        (HasRoom(), "", [], [], []),
    ],
)
def test_keeps_endpoints_that_can_serve(
    demand: Filter[Endpoint], model: str, rows: list[Facts], expected: list[int], why: list[str], long: bool
) -> None:
    roster = candidates(fleet_of(rows, long), rows)
    assert kept(demand, asks(model), roster) == expected
    assert reasons(demand, asks(model), roster) == why


@both_lengths
def test_cached_rejections_follow_changes_of_members(long: bool) -> None:
    demand, fleet = ServesModel(), fleet_of([serves("m"), serves("n")], long)

    def serving(model: str) -> list[str]:
        gone = {str(endpoint) for endpoint, _ in demand.rejections(asks(model), fleet.roster)}
        return [str(endpoint) for endpoint in fleet.roster if str(endpoint) not in gone]

    assert (serving("m"), serving("n"), serving("m")) == (["0"], ["1"], ["0"])
    fleet.update(ExecutionInstance(instance_id="1", model_name="m"))
    assert (serving("m"), serving("n")) == (["0", "1"], [])
    fleet.remove("0")
    fleet.add(ExecutionInstance(instance_id="0", model_name="n"))
    assert (serving("m"), serving("n")) == (["1"], ["0"])


@both_lengths
def test_candidates_already_rejected_are_not_rejected_again(long: bool) -> None:
    demand, fleet = ServesModel(), fleet_of([serves("n"), serves("m"), serves("n")], long)
    list(demand.rejections(asks("m"), fleet.roster))
    left = fleet.roster.without([0])
    assert [str(endpoint) for endpoint, _ in demand.rejections(asks("m"), left)][:1] == ["2"]
    assert str(left[0]) == "1"


def test_unknown_model_names_are_not_cached() -> None:
    demand, fleet = ServesModel(), fleet_of([serves("m")], long=False)
    for number in range(100):
        assert reasons(demand, asks(f"made up {number}"), fleet.roster) == [ANOTHER]
    assert demand._known.of(fleet.roster) == {}


@both_lengths
def test_a_reason_keeps_the_facts_of_its_moment(long: bool) -> None:
    fleet = fleet_of([load(1, 1)], long)
    rejected = HasRoom().rejections(asks(), fleet.roster)
    fleet.measure("0", Metrics(running_requests_size=7), 0.0)
    assert [str(why) for _, why in rejected] == ["full: 1 of 1 requests"]
    assert reasons(HasRoom(), asks(), fleet.roster) == ["full: 7 of 1 requests"]


@both_lengths
def test_room_is_taken_and_given_back_at_once(long: bool) -> None:
    fleet = fleet_of([load(0, 1)], long)
    fleet.load.reserve(fleet["0"], 1.0)
    assert reasons(HasRoom(), asks(), fleet.roster) == ["full: 1 of 1 requests"]
    fleet.load.release(fleet["0"], 1.0)
    assert reasons(HasRoom(), asks(), fleet.roster) == []
