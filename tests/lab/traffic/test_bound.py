"""No policy exceeds the bound, and the bound is what brute force finds."""

import random
from itertools import combinations

import msgspec
import numpy as np
import pytest

from pointsman.errors import PointsmanError
from pointsman.lab.traffic import (
    LAB_POLICIES,
    Objectives,
    RecordedRequest,
    ReplayLoad,
    bound,
    bound_capacity,
    figures,
    fleet_of,
    policy_of,
    replay,
)
from pointsman.lab.traffic.bound import most_in_time, work_of
from pointsman.simulator.performance import hardware
from tests.lab.traffic.workloads import FLEET, conversations, recorded, setting


def on_time(jobs: list[tuple[float, float, float]]) -> bool:
    """Whether one machine ends all jobs (arrival, work, deadline) in time, in order."""
    now = 0.0
    for at, need, deadline in jobs:
        now = max(now, at) + need
        if now > deadline + 1e-9:
            return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_most_in_time_is_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, 10) for _ in range(rng.randint(1, 10)))
    jobs = [(at, rng.choice([0.3, 1.0, 2.5, 4.0]) * rng.random(), at + rng.uniform(1, 3)) for at in times]
    limit = 0.0
    for index, (at, need, deadline) in enumerate(jobs):  # deadlines in the order of arrivals
        limit = max(limit, deadline)
        jobs[index] = (at, need, limit)
    best = max(size for size in range(len(jobs) + 1) if any(on_time(list(some)) for some in combinations(jobs, size)))
    arrived, needs, deadlines = (np.array(column) for column in zip(*jobs, strict=True))
    assert most_in_time(arrived, needs, deadlines - arrived) == best


WORKLOADS = {
    "conversations": conversations(40, per_second=8.0),
    "long prompts": [
        RecordedRequest(
            timestamp=number * 150, input_length=40_000 if number % 5 == 0 else 3_000, output_length=1 + number % 90,
            hash_ids=(0, 1, 2, number + 10),
        )
        for number in range(120)
    ],
    "deadlines": [msgspec.structs.replace(one, slo_ms=1500) for one in conversations(40, per_second=8.0)],
}  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", [*LAB_POLICIES, "slo-aware"])
def test_no_policy_exceeds_the_bound(policy: str, workload: str) -> None:
    load = recorded(*WORKLOADS[workload])
    for speed, objectives in ((1.0, Objectives()), (6.0, Objectives(ttft_s=0.3)), (30.0, Objectives(ttft_s=1.0))):
        replayed = replay(load, setting(speed=speed), policy_of(policy), seed=2)
        found = figures(replayed, objectives, policy=policy, speed=speed, seed=2)
        best = bound(load, ReplayLoad(speed=speed), fleet_of(FLEET), objectives, seed=2)
        assert found.attainment <= best.attainment + 1e-9
        assert found.hit_rate <= best.hit_rate + 1e-9
        assert max(one.ttft_s for one in replayed.ended) >= best.least_wait_s - 1e-9
        assert replayed.seconds * 2 >= work_of([one.request for one in replayed.ended], MACHINE).whole.sum()


MACHINE = hardware(FLEET.partition("x")[2])


def test_a_hopeless_request_is_an_intrinsic_miss() -> None:
    each = [
        RecordedRequest(timestamp=number * 1000, input_length=100_000 if number < 3 else 500, output_length=5)
        for number in range(10)
    ]
    alone = work_of(each, MACHINE).alone
    assert alone[0] > 1 > alone[9]
    found = bound(recorded(*each), ReplayLoad(), fleet_of(FLEET), Objectives(ttft_s=1.0))
    assert found.intrinsic_misses == pytest.approx(0.3)
    assert found.attainment == pytest.approx(0.7)
    assert bound_capacity(recorded(*each), ReplayLoad(), fleet_of(FLEET), Objectives(ttft_s=1.0)) == 0.0


def test_capacity_and_the_longest_wait() -> None:
    load, fleet = recorded(*conversations(40)), fleet_of(FLEET)
    free = bound_capacity(load, ReplayLoad(), fleet, Objectives())
    limited = bound_capacity(load, ReplayLoad(), fleet, Objectives(), longest_wait_s=0.3)
    assert 0 < limited < free
    found = bound(load, ReplayLoad(speed=free), fleet, Objectives())
    assert found.attainment_within(found.least_wait_s) == found.attainment
    assert found.attainment_within(found.least_wait_s * 0.9) is None


def test_other_fleets_have_no_bound() -> None:
    fleet = fleet_of(FLEET)
    scaled = msgspec.structs.replace(
        fleet, document={"deployments": [fleet.document["deployments"][0] | {"scaling": {"max": 3}}]}
    )
    with pytest.raises(PointsmanError, match="fixed number"):
        bound(recorded(*conversations(2)), ReplayLoad(), scaled, Objectives())
