"""The walks of a placement and of a scaling step in docs/architecture.md, compared with what a plane calls."""

import asyncio
import sys
from types import FrameType
from typing import Any

import pytest

from pointsman.runtimes.simulation.simulation import SimulatedArrival, Simulation
from pointsman.types import Gpu, RequestMetadata, Worker
from tests.architecture.house import PACKAGE
from tests.architecture.test_architecture_page import walks
from tests.runtimes.simulation.test_simulation import SCALED, manifest

REAL_TIME = {"PolicyLoop", "PolicyRunner", "LocalRuntime.launch"}
"""Their place is taken by the simulation, which has no clock and no processes."""
VALUES = {"TierFit", "Refused", "ScalingRecord"}
"""They are made without a call that can be traced."""


@pytest.fixture(scope="module")
def called() -> set[tuple[str, str]]:
    """(file, qualified name) of everything that a plane calls that places, refuses and scales instances."""
    found: set[tuple[str, str]] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            found.add((code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname))

    gpus = tuple(Gpu(index=index, memory_bytes=80 << 30) for index in range(2))
    workers = [Worker(name=name, cpus=8, memory_bytes=64 << 30, gpus=gpus) for name in ("w1", "w2")]
    scaled = SCALED.replace("min: 1", "min: 6").replace("max: 4", "max: 9")
    placed = f"{scaled}\n    placement: {{resources: {{gpus: 1, gpuMemory: 60Gi}}}}"
    requests = [
        RequestMetadata(f"r{number}", model_name="chat", prompt_tokens=1000, arrival_time=5.0 + number / 20)
        for number in range(100)
    ]
    sys.setprofile(trace)
    try:
        simulation = Simulation(manifest(6, more=placed), workers)
        simulation.play([SimulatedArrival(5.0 + number / 20, one, 100) for number, one in enumerate(requests)])
        simulation.run(60.0)
        asyncio.run(simulation.plane.documents.apply(manifest(3)))
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("walk", ["A placement", "A scaling step"])
def test_every_step_of_a_walk_is_taken(called: set[tuple[str, str]], walk: str) -> None:
    missed = [
        (file, name)
        for file, name in walks()[walk]
        if name not in REAL_TIME | VALUES
        and not any(at == file and f"{passed}.".startswith(f"{name}.") for at, passed in called)
    ]
    assert missed == []
