"""The fleet: whatever happens to its members, its columns are current."""

from collections.abc import Iterable
from math import inf, isnan, nan
from typing import Any

import pytest

from pointsman.errors import ConfigError, UnknownName
from pointsman.routing.endpoints import (
    ACCEPTS,
    GPUS,
    IN_FLIGHT_REQUESTS,
    IN_FLIGHT_TOKENS,
    IS_FULL,
    KV_USAGE,
    LATENCY_MS,
    LIGHTNESS,
    LIMIT,
    LOAD,
    MEASURED_AT,
    METRICS,
    PRICE,
    RUNNING,
    SENT_SINCE_MEASURED,
    THROUGHPUT,
    WAITING,
    Attribute,
    Endpoint,
    EndpointTable,
    Metrics,
    ingest,
    observe,
)
from pointsman.selection.columns import ARRAYS_FROM
from pointsman.types import ExecutionInstance

EVERY = (
    WAITING, RUNNING, KV_USAGE, MEASURED_AT, SENT_SINCE_MEASURED, IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS, LOAD, LIMIT,
    IS_FULL, LIGHTNESS, ACCEPTS, LATENCY_MS, THROUGHPUT, GPUS, PRICE,
)  # fmt: skip


def instance(name: str, limit: int | None = 4, **facts: Any) -> ExecutionInstance:
    return ExecutionInstance(instance_id=name, max_concurrency=limit, **facts)


def fleet_of(number: int, **facts: Any) -> EndpointTable:
    return EndpointTable([instance(f"i{n}", **facts) for n in range(number)])


def value(fleet: EndpointTable, name: str, column: str) -> float:
    return float(fleet.roster.column(column)[fleet[name].row])


def row_of(fleet: EndpointTable, name: str) -> dict[str, float]:
    return {column: value(fleet, name, column) for column in EVERY}


sizes = pytest.mark.parametrize("extra", [0, ARRAYS_FROM], ids=["lists", "arrays"])
"""Alone, or with enough other members for the columns to be arrays."""


# Members


def test_a_fleet_without_members_has_empty_columns() -> None:
    fleet = EndpointTable()
    assert (len(fleet), len(fleet.roster), fleet.instances()) == (0, 0, [])
    assert "i0" not in fleet
    assert len(fleet.serving("m")) == len(fleet.serving("")) == 0


@sizes
def test_declared_values_fill_columns_and_unknown_ones_are_nan(extra: int) -> None:
    fleet = fleet_of(extra)
    fleet.add(
        instance(
            "full",
            limit=2,
            current_load=2,
            can_accept_request=False,
            avg_latency_ms=80,
            throughput_tokens_per_sec=50,
            gpu_count=4,
            price_per_gpu_hour=0.0,
        )
    )
    fleet.add(instance("bare", limit=None))
    assert row_of(fleet, "full") == {
        WAITING: 0, RUNNING: 0, KV_USAGE: 0, MEASURED_AT: -inf, SENT_SINCE_MEASURED: 0,
        IN_FLIGHT_REQUESTS: 0, IN_FLIGHT_TOKENS: 0,
        LOAD: 2, LIMIT: 2, IS_FULL: 1, LIGHTNESS: 0.5, ACCEPTS: 0,
        LATENCY_MS: 80, THROUGHPUT: 50, GPUS: 4, PRICE: 0,
    }  # fmt: skip
    bare = row_of(fleet, "bare")
    unknown = {LATENCY_MS, THROUGHPUT, PRICE}
    assert {name for name, number in bare.items() if isnan(number)} == unknown
    assert (bare[LIMIT], bare[IS_FULL], bare[LIGHTNESS], bare[ACCEPTS]) == (inf, 0, 1, 1)
    assert fleet["bare"].metrics is None


@pytest.mark.parametrize("nothing", [None, 0, 0.0, -5.0, nan])
def test_a_speed_of_zero_counts_as_never_measured(nothing: float | None) -> None:
    fleet = EndpointTable([instance("i", avg_latency_ms=nothing, throughput_tokens_per_sec=nothing)])
    assert isnan(value(fleet, "i", LATENCY_MS))
    assert isnan(value(fleet, "i", THROUGHPUT))
    assert fleet.instances()[0].avg_latency_ms is None


def test_a_limit_of_zero_has_no_room() -> None:
    fleet = EndpointTable([instance("i", limit=0)])
    assert (value(fleet, "i", IS_FULL), value(fleet, "i", LIGHTNESS)) == (1, 1)


def test_ids_are_unique_and_a_bad_list_changes_nothing() -> None:
    fleet = fleet_of(2)
    before = fleet.roster
    for bad in (instance("i1"), instance("new"), instance("new")), (instance("new"), instance("i0")):
        with pytest.raises(ConfigError, match="must be unique"):
            fleet._join(bad)
    with pytest.raises(ConfigError, match="given twice: i1"):
        fleet.add(instance("i1"))
    assert [str(endpoint) for endpoint in fleet.roster] == ["i0", "i1"]
    assert fleet.roster is before
    assert "new" not in fleet


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    fleet = EndpointTable([instance("llama-0")])
    attempts: list[Any] = [
        lambda: fleet["lama-0"],
        lambda: fleet.remove("lama-0"),
        lambda: fleet.update(instance("lama-0")),
        lambda: fleet.measure("lama-0", Metrics(), 0.0),
        lambda: observe(fleet, "lama-0", Attribute[int]("x"), 1, 0.0),
        lambda: ingest(fleet, Thermometer(), "lama-0", "", 0.0),
    ]
    for attempt in attempts:
        with pytest.raises(UnknownName, match='unknown instance "lama-0"; did you mean "llama-0"'):
            attempt()


def test_rows_and_columns_move_up_when_an_instance_leaves() -> None:
    fleet = fleet_of(4)
    for load, endpoint in enumerate(list(fleet.roster)):
        for _ in range(load):
            fleet.load.reserve(endpoint, 10.0)
    gone = fleet.remove("i1")
    assert gone.row == -1
    assert [(str(endpoint), endpoint.row) for endpoint in fleet.roster] == [("i0", 0), ("i2", 1), ("i3", 2)]
    assert list(fleet.roster.column(LOAD)) == [0, 2, 3]
    assert list(fleet.roster.column(IN_FLIGHT_TOKENS)) == [0, 20, 30]
    assert "i1" not in fleet


@sizes
def test_an_endpoint_that_left_counts_nowhere(extra: int) -> None:
    fleet = fleet_of(extra + 2)
    stale = fleet["i1"]
    fleet.load.reserve(stale, 5.0)
    fleet.remove("i1")
    before = {column: list(fleet.roster.column(column)) for column in EVERY}
    fleet.load.reserve(stale, 7.0)
    fleet.load.release(stale, 7.0)
    fleet.load.release(stale, 5.0)
    fleet.load.release_tokens(stale, 5.0)
    fleet.load.sent_from_backlog(stale)
    fleet.load.learn_latency(stale, 100.0, 1.0)
    after = {column: list(fleet.roster.column(column)) for column in EVERY}
    assert str(after) == str(before)
    assert str(stale) == "i1", "it stays valid for those that hold it"


def test_a_reused_id_is_a_new_endpoint() -> None:
    fleet = fleet_of(2)
    old = fleet["i0"]
    fleet.load.reserve(old, 5.0)
    fleet.measure("i0", Metrics(running_requests_size=3), 1.0)
    observe(fleet, "i0", Attribute[int]("x"), 1, 1.0)
    fleet.load.learn_latency(old, 100.0, 1.0)
    fleet.remove("i0")
    new = fleet.add(instance("i0"))
    assert new is not old
    assert fleet["i0"] is new
    assert (new.row, new.metrics, new.observed(Attribute[int]("x"))) == (1, None, None)
    fleet.load.release(old, 5.0)
    assert row_of(fleet, "i0")[LOAD] == 0
    assert row_of(fleet, "i0")[MEASURED_AT] == -inf
    assert isnan(value(fleet, "i0", LATENCY_MS))


def test_columns_are_arrays_from_64_members_on_and_keep_their_values() -> None:
    fleet = fleet_of(ARRAYS_FROM - 1)
    fleet.load.reserve(fleet["i3"], 12.0)
    fleet.measure("i5", Metrics(kv_cache_usage=0.5), 7.0)
    fleet.load.learn_latency(fleet["i6"], 30.0, 1.0)
    before = {name: str(row_of(fleet, name)) for name in ("i3", "i5", "i6", "i62")}
    assert isinstance(fleet.roster.column(LOAD), list)
    for _ in range(2):
        fleet.add(instance("one more"))
        assert fleet.roster.arrays
        assert not isinstance(fleet.roster.column(LOAD), list)
        assert {name: str(row_of(fleet, name)) for name in before} == before
        fleet.load.reserve(fleet["i3"], 1.0)
        fleet.load.release(fleet["i3"], 1.0)
        fleet.remove("one more")
        assert not fleet.roster.arrays
        assert all(isinstance(fleet.roster.column(column), list) for column in EVERY)
        assert all(type(number) is float for column in EVERY for number in fleet.roster.column(column))
        assert {name: str(row_of(fleet, name)) for name in before} == before


# The identity of the list of members, by which plugins cache


@sizes
def test_the_list_of_members_changes_only_with_membership_or_block_sizes(extra: int) -> None:
    fleet = fleet_of(extra + 2)
    fleet.measure("i0", Metrics(block_size=16, num_blocks=10), 0.0)

    def after(change: Any) -> bool:
        """Whether the change leaves the same members."""
        before = fleet.roster.whole
        change()
        return fleet.roster.whole is before

    assert after(lambda: fleet.load.reserve(fleet["i0"], 1.0))
    assert after(lambda: fleet.load.release(fleet["i0"], 1.0))
    assert after(lambda: fleet.load.learn_latency(fleet["i0"], 1.0, 1.0))
    assert after(lambda: observe(fleet, "i0", Attribute[int]("x"), 1, 0.0))
    assert after(lambda: fleet.measure("i0", Metrics(5, 5, 0.5, block_size=16, num_blocks=10), 1.0))
    assert not after(lambda: fleet.measure("i0", Metrics(block_size=32, num_blocks=10), 2.0)), "it caches otherwise"
    assert not after(lambda: fleet.measure("i0", Metrics(block_size=32, num_blocks=11), 3.0))
    assert not after(lambda: fleet.measure("i1", Metrics(), 3.0)), "measured for the first time"
    assert not after(lambda: fleet.update(instance("i0", model_name="other"))), "it may serve another model now"
    assert not after(lambda: fleet.add(instance("new")))
    assert not after(lambda: fleet.remove("new"))


def test_a_roster_taken_before_a_measurement_has_live_columns() -> None:
    fleet = fleet_of(2)
    before = fleet.roster
    fleet.measure("i1", Metrics(waiting_queue_size=3, block_size=16), 1.0)
    fleet.load.reserve(fleet["i0"], 1.0)
    assert list(before.column(WAITING)) == [0, 3]
    assert list(before.column(LOAD)) == [1, 3]


# Serving


def test_an_endpoint_serves_its_model_its_adapters_and_the_empty_name() -> None:
    fleet = EndpointTable(
        [instance("i0", model_name="base", adapters=frozenset({"tuned"})), instance("i1", model_name="x")]
    )

    def names(model: str) -> list[str]:
        return [str(endpoint) for endpoint in fleet.serving(model)]

    assert (names("base"), names("tuned"), names("x")) == (["i0"], ["i0"], ["i1"])
    assert (names(""), names("unknown")) == (["i0", "i1"], [])
    assert fleet.serving("base") is fleet.serving("base")
    fleet.update(instance("i1", model_name="base"))
    assert (names("base"), names("x")) == (["i0", "i1"], [])
    fleet.remove("i0")
    assert (names("base"), names("tuned")) == (["i1"], [])


@sizes
def test_the_columns_of_a_model_s_roster_are_live(extra: int) -> None:
    fleet = fleet_of(extra, model_name="other")
    fleet.add(instance("mine", model_name="m"))
    serving = fleet.serving("m")
    assert serving.arrays == bool(extra)
    fleet.load.reserve(fleet["mine"], 5.0)
    assert list(serving.column(LOAD)) == [1]


def test_names_that_no_instance_serves_are_not_cached() -> None:
    fleet = fleet_of(1, model_name="m")
    for number in range(100):
        fleet.serving(f"made up {number}")
    assert list(fleet._serving) == []


# Measurements and attributes


def test_measuring_fills_the_columns() -> None:
    fleet = fleet_of(1)
    fleet.load.sent_from_backlog(fleet["i0"])
    assert value(fleet, "i0", SENT_SINCE_MEASURED) == 1
    metrics = Metrics(waiting_queue_size=1, running_requests_size=2, kv_cache_usage=0.25)
    fleet.measure("i0", metrics, 9.0)
    row = row_of(fleet, "i0")
    assert (row[WAITING], row[RUNNING], row[KV_USAGE], row[MEASURED_AT], row[SENT_SINCE_MEASURED]) == (1, 2, 0.25, 9, 0)
    assert fleet["i0"].metrics is metrics


@pytest.mark.parametrize(
    ("ours", "reported", "load"),
    [(0, 0, 0), (3, 0, 3), (0, 3, 3), (2, 3, 3), (3, 2, 3)],
)
def test_load_is_the_larger_of_ours_in_flight_and_reported(ours: int, reported: int, load: int) -> None:
    fleet = fleet_of(1)
    for _ in range(ours):
        fleet.load.reserve(fleet["i0"], 1.0)
    fleet.measure("i0", Metrics(running_requests_size=reported), 1.0)
    assert value(fleet, "i0", LOAD) == load
    assert value(fleet, "i0", IS_FULL) == 0
    for _ in range(ours):
        fleet.load.release(fleet["i0"], 1.0)
    assert value(fleet, "i0", LOAD) == load - ours


def test_invalid_reports_do_not_corrupt_the_load() -> None:
    fleet = fleet_of(1)
    fleet.load.reserve(fleet["i0"], 1.0)
    fleet.measure("i0", Metrics(waiting_queue_size=nan, running_requests_size=-7), 1.0)
    assert value(fleet, "i0", LOAD) == 1
    fleet.load.release(fleet["i0"], 1.0)
    assert value(fleet, "i0", LOAD) == 0


TEMPERATURE: Attribute[float] = Attribute("temperature")


def test_attributes_have_their_time() -> None:
    fleet = fleet_of(2)
    assert fleet["i0"].observed(TEMPERATURE) is None
    observe(fleet, "i0", TEMPERATURE, 61.5, 10.0)
    seen = fleet["i0"].observed(TEMPERATURE)
    assert seen is not None
    assert (seen.value, seen.at, seen.age(12.5)) == (61.5, 10.0, 2.5)
    assert fleet["i1"].observed(TEMPERATURE) is None
    observe(fleet, "i0", TEMPERATURE, 70.0, 11.0)
    assert fleet["i0"].observed(TEMPERATURE).value == 70.0  # type: ignore[union-attr]


class Thermometer:
    def extract(self, source: Any, endpoint: Endpoint) -> Iterable[tuple[Attribute[Any], Any]]:
        yield TEMPERATURE, source["temperature"] + endpoint.row


class Queue:
    def extract(self, source: Any, endpoint: Endpoint) -> Iterable[tuple[Attribute[Any], Any]]:
        return [(METRICS, Metrics(waiting_queue_size=source["queue"]))] if "queue" in source else []


def test_extractors_read_what_a_source_delivers() -> None:
    fleet = EndpointTable([instance("i0"), instance("i1")])
    for extractor in (Thermometer(), Queue()):
        ingest(fleet, extractor, "i1", {"temperature": 60, "queue": 4}, 3.0)
    assert fleet["i1"].observed(TEMPERATURE).value == 61  # type: ignore[union-attr]
    assert row_of(fleet, "i1")[WAITING] == 4
    assert row_of(fleet, "i1")[MEASURED_AT] == 3.0
    assert fleet["i1"].observed(METRICS).age(5.0) == 2.0  # type: ignore[union-attr]
    for extractor in (Thermometer(), Queue()):
        ingest(fleet, extractor, "i1", {"temperature": 60}, 9.0)
    assert row_of(fleet, "i1")[MEASURED_AT] == 3.0, "what was not delivered keeps its time"


# Updates


@sizes
def test_an_update_replaces_declared_values_and_keeps_learned_ones(extra: int) -> None:
    fleet = fleet_of(extra)
    fleet.add(instance("i", avg_latency_ms=10))
    fleet.load.reserve(fleet["i"], 8.0)
    fleet.measure("i", Metrics(kv_cache_usage=0.5), 3.0)
    observe(fleet, "i", TEMPERATURE, 60.0, 3.0)
    endpoint = fleet["i"]
    declared = instance("i", limit=1, can_accept_request=False, throughput_tokens_per_sec=100, price_per_gpu_hour=3)
    assert fleet.update(declared) is endpoint
    row = row_of(fleet, "i")
    assert (row[LIMIT], row[ACCEPTS], row[THROUGHPUT], row[PRICE]) == (1, 0, 100, 3)
    assert (row[IN_FLIGHT_REQUESTS], row[IN_FLIGHT_TOKENS], row[KV_USAGE], row[MEASURED_AT]) == (1, 8, 0.5, 3)
    assert (row[LOAD], row[IS_FULL], row[LIGHTNESS]) == (1, 1, 0.5), "the new limit counts at once"
    assert row[LATENCY_MS] == 10
    assert endpoint.observed(TEMPERATURE) is not None
    fleet.update(instance("i", current_load=5, avg_latency_ms=20))
    assert (value(fleet, "i", LOAD), value(fleet, "i", LATENCY_MS)) == (5, 20)


@pytest.mark.parametrize("nothing", [None, 0.0])
def test_an_update_without_measurements_keeps_what_was_learned(nothing: float | None) -> None:
    fleet = fleet_of(1)
    fleet.load.learn_latency(fleet["i0"], 100.0, 1.0)
    fleet.update(instance("i0", avg_latency_ms=nothing))
    assert value(fleet, "i0", LATENCY_MS) == 100.0


def test_copies_of_the_instances_have_current_load_and_speed() -> None:
    given = instance("i0", current_load=1)
    fleet = EndpointTable([given])
    fleet.load.reserve(fleet["i0"], 1.0)
    fleet.load.learn_latency(fleet["i0"], 50.0, 1.0)
    [copy] = fleet.instances()
    assert (copy.current_load, copy.avg_latency_ms) == (2, 50.0)
    assert (given.current_load, given.avg_latency_ms) == (1, None), "the owner's own record is only read"
    copy.current_load = 99
    assert value(fleet, "i0", LOAD) == 2
