"""The openb cluster through the product's own path: a manifest is loaded, and a controller places what it says.

Nothing is handed to the placer: what is typical it learns from what was asked. A second plane begins with what the
first one has stored.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import yaml

from bench.placement.methods import gpus_of, share_of
from bench.placement.openb import INFLATION, stream
from pointsman.config import load_manifest
from pointsman.control.controller import Controller
from pointsman.control.desired import Desired, DesiredDeployment
from pointsman.control.events import Applied, WorkerSeen
from pointsman.control.places import remember
from pointsman.placement.asks import Ask
from pointsman.types import Worker

AT_ONCE = 500
"""Deployments that are applied together. Pods without a place are no longer desired the next time."""


def section(ask: Ask) -> dict[str, Any]:
    """The placement of a deployment for one pod."""
    memory = {"memory": ask.need.host_bytes} if ask.need.host_bytes else {}
    resources: dict[str, Any] = {"gpus": gpus_of(ask), **memory}
    if gpus_of(ask):
        resources["gpuShare"] = ask.gpu_share
    models = {"gpuModels": sorted(ask.gpu_models)} if ask.gpu_models else {}
    return {"arrangement": "binpack", "cpus": ask.cpus, "resources": resources, **models}


def deployments_of(asks: Sequence[Ask]) -> dict[str, DesiredDeployment]:
    """By pod: its deployment, as written in a manifest. Equal pods are written once."""
    kinds: dict[str, str] = {}
    names = {
        ask.instance_id: kinds.setdefault(msgspec.json.encode(section(ask)).decode(), f"k{len(kinds)}") for ask in asks
    }
    engine = {"type": "command", "parameters": {"command": "serve --port {port}"}}
    written = [
        {"name": name, "model": name, "engine": engine, "placement": msgspec.json.decode(kind)}
        for kind, name in kinds.items()
    ]
    plan = load_manifest(yaml.safe_dump({"deployments": written}))
    by_kind = {one.name: one.desired for one in plan.deployments}
    return {pod: by_kind[kind] for pod, kind in names.items()}


class ProductRun(NamedTuple):
    share: float
    """Share of the GPUs that is allocated in the end."""
    decision_ms: float
    """Time of the controller per ask: reconciling, placing, and claiming."""
    learned: str
    """The counts that the plane stores."""


def run(
    workers: Sequence[Worker],
    asks: Sequence[Ask],
    deployments: dict[str, DesiredDeployment],
    seed: int,
    stored: str = "",
) -> ProductRun:
    controller = Controller()
    remember(controller.places, stored)
    for worker in workers:
        gpus = tuple(msgspec.structs.replace(gpu, vendor="nvidia") for gpu in worker.gpus)
        controller.handle(WorkerSeen(msgspec.structs.replace(worker, gpus=gpus)), 0.0)
    capacity = sum(len(worker.gpus) for worker in workers)
    arriving = list(stream(asks, INFLATION * capacity, seed))
    wanted: dict[str, DesiredDeployment] = {}
    shares: dict[str, float] = {}
    start = time.process_time()
    for at in range(0, len(arriving), AT_ONCE):
        for number, ask in enumerate(arriving[at : at + AT_ONCE], start=at):
            name = f"p{number}"
            spec = deployments[ask.instance_id]
            assert spec.ask is not None
            own = msgspec.structs.replace(spec.ask, deployment=name)
            wanted[name] = msgspec.structs.replace(spec, name=name, model=name, ask=own)
            shares[f"{name}-1"] = share_of(ask)
        controller.handle(Applied(Desired(dict(wanted))), float(at))
        placed = controller.places.fleet.occupants
        wanted = {name: spec for name, spec in wanted.items() if f"{name}-1" in placed}
    spent = time.process_time() - start
    allocated = sum(shares[name] for name in controller.places.fleet.occupants)
    return ProductRun(allocated / capacity, spent / len(arriving) * 1000, controller.places.learned.as_json())
