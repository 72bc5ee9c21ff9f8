"""What a plane tells of the load that it has seen, for rehearsals."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.config.revision import ManifestText
from pointsman.errors import PointsmanError, UnknownName
from pointsman.runtimes.machine.store import Store
from tests.runtimes.local.planes import manifest, run, running, simulated
from tests.runtimes.local.test_applications import diamond
from tests.runtimes.local.test_autoscaling import module as module
from tests.runtimes.local.test_autoscaling import scaled

BIN_S = 600.0


def remember(state: Path, name: str, *counts: int) -> int:
    """As if a plane had seen so many requests in each bin until now; the number of the first bin."""
    first = int(time.time() // BIN_S) - len(counts)
    bins = [(first + place, count) for place, count in enumerate(counts) if count]
    measured = {"arrivals": {"bin_s": BIN_S, "bins": bins, "first": first}, "start_ups": [30.0, 50.0, 40.0]}
    store = Store(state)
    store.targets.save_scaling({name: json.dumps({"measured": measured})})
    store.close()
    return first


def test_the_history_and_what_a_rehearsal_needs_besides(state: Path) -> None:
    first = remember(state, "m", 600, 0, 1500)
    parameters = {"target": 3, "lookBack": "2s"}

    async def story() -> None:
        text = manifest(scaled(min=0, slots=4, parameters=parameters, costPerReplicaHour=2), simulated("fixed", 0))
        async with running(state, text) as scene:
            told: dict[str, Any] = scene.plane.scaling.load_history("m")
            rates = [(one["began"], one["per_second"]) for one in told["bins"]]
            assert rates[:3] == [(first * BIN_S, 1.0), ((first + 1) * BIN_S, 0.0), ((first + 2) * BIN_S, 2.5)]
            assert (told["deployment"], told["bin_s"], told["start_up_s"]) == ("m", BIN_S, 40.0)
            assert (told["policy"], told["parameters"]) == ("target-ongoing", parameters)
            assert (told["max_concurrency"], told["cost_per_replica_hour"]) == (4, 2)
            assert (told["limits"]["min_replicas"], told["limits"]["max_replicas"]) == (0, 3)
            assert told["request_s"] is None, "no request has come yet"
            assert scene.instances() == {}, "to look changes nothing"
            with pytest.raises(UnknownName, match='unknown deployment "n"'):
                scene.plane.scaling.load_history("n")
            with pytest.raises(PointsmanError, match='"fixed" has a fixed number of instances'):
                scene.plane.scaling.load_history("fixed")
            scene.request("r")
            await scene.until(lambda: scene.carrier.sent, "sent")
            scene.end("r")
            await scene.until(lambda: scene.plane.scaling.load_history("m")["request_s"], "how long requests take")

    run(story())


def test_the_policy_of_an_application_is_of_no_single_node(
    state: Path, tmp_path: Path, module: Callable[[str], str]
) -> None:
    name = module("def together(view):\n    return {}\n")
    document = diamond(tmp_path, nodes={"m2": {"scaling": {"policy": "panic", "max": 2}}})
    text = f"{document.text}\nscaling: {{policy: '{name}:together', min: 0, max: 2}}\n"

    async def story() -> None:
        async with running(state, manifest()) as scene:
            await scene.plane.documents.deploy(ManifestText(text, document.folder, document.file))
            together, alone = (scene.plane.scaling.load_history(f"diamond/{node}") for node in ("m1", "m2"))
            assert (together["policy"], together["parameters"]) == (f"{name}:together", None)
            assert (alone["policy"], alone["parameters"]) == ("panic", {})

    run(story())
