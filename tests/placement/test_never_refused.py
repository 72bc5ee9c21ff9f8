"""Every ask that fits is placed, in the first tier that fits, and its place is valid: checked by brute force."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.placement.asks import Ask, EngineAbility, Tier
from pointsman.placement.fit import (
    FitsOnCpu,
    FitsOnOneGpu,
    FitsOnSeveralGpus,
    FitsOnSeveralWorkers,
    FitsPartly,
    ResourceFit,
)
from pointsman.placement.fleet import Fleet
from pointsman.placement.fragmentation import Workload
from pointsman.placement.placer import Placed, Placer
from pointsman.types import Gpu, Worker
from tests.placement.fleets import places_in
from tests.placement.judging import feasible_tiers, most_layers, wrong_with
from tests.placement.situations import asks, needs, workers
from tests.properties import examples


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Up to three workers, some of them in use."""
    listed = [draw(workers(f"w{number}", shared_memory=False)) for number in range(draw(st.sampled_from([3, 2, 3, 1])))]
    fleet = Fleet(listed)
    placer = Placer(fleet)
    for number in range(draw(st.integers(0, 2))):
        ask = draw(asks(f"i{number}"))
        found = placer.place(ask)
        if isinstance(found, Placed):
            fleet.claim(ask.instance_id, found.place, ask.deployment)
    return fleet


@given(fleets(), asks(), st.lists(asks(), max_size=2))
@settings(max_examples=examples(100))
def test_the_first_tier_that_fits_is_used(fleet: Fleet, ask: Ask, usual: list[Ask]) -> None:
    feasible = feasible_tiers(ask, fleet)
    first = next((tier for tier in ask.tiers or Tier if tier in feasible), None)
    found = Placer(fleet, Workload(usual) if usual else None).place(ask)
    assert (found.place.tier if isinstance(found, Placed) else None) is first
    if isinstance(found, Placed):
        assert wrong_with(ask, found.place, fleet) is None
        if found.place.tier is Tier.PARTIAL_OFFLOAD:
            assert found.place.gpu_layers == most_layers(ask, fleet)


EVERYTHING = EngineAbility(needs_gpu=False, partial_offload=True)


@pytest.mark.parametrize(
    "tier",
    [FitsOnOneGpu, FitsOnSeveralGpus, FitsOnSeveralWorkers, FitsPartly, FitsOnCpu],
    ids=lambda tier: tier.__name__,
)
@given(fleet=fleets(), ask=asks())
@settings(max_examples=examples(100))
def test_each_tier_alone(tier: type[ResourceFit], fleet: Fleet, ask: Ask) -> None:
    ask = msgspec.structs.replace(
        ask,
        engine=EVERYTHING,
        several_gpus=True,
        several_workers=True,
        partial_offload=True,
        workers=frozenset(),
        tiers=(),
    )
    expected = tier.tier in feasible_tiers(ask, fleet)
    alone = Placer(fleet)
    if tier(fleet, alone.devices).forbidden(ask) is not None:
        assert not expected
        return
    admitted = alone.admitted(ask)
    fit = tier(fleet, alone.devices).fit(ask, admitted)
    assert bool(fit.fits.any()) is expected
    for host in fleet.workers:
        if fit.fits[host.row]:
            assert wrong_with(ask, fit.place(host), fleet) is None
        else:
            assert str(fit.why(host))


@st.composite
def bare_workers(draw: st.DrawFn, name: str) -> Worker:
    """Nothing but GPUs of different sizes."""
    gpus = tuple(Gpu(index=place, memory_bytes=draw(st.integers(3, 14))) for place in range(draw(st.integers(0, 3))))
    return Worker(name=name, cpus=1, memory_bytes=99, gpus=gpus)


@given(st.tuples(*(bare_workers(f"w{number}") for number in range(3))), needs())
@settings(max_examples=examples(120))
def test_pipelines_over_gpus_of_all_sizes(listed: tuple[Worker, ...], need: object) -> None:
    fleet = Fleet(listed)
    ask = Ask(instance_id="new", need=need, several_workers=True)  # type: ignore[arg-type]
    if ask.need.layers > 1:
        expected = Tier.SEVERAL_WORKERS in feasible_tiers(ask, fleet)
        assert bool(places_in(FitsOnSeveralWorkers, ask, fleet)) is expected
