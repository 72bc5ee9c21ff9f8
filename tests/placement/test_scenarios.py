"""Fleets and manifests as data, each with the reason why its outcome is right: as `pointsman place` has it, and as the
controller has it on virtual time."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pointsman.cli.main import main
from pointsman.config import load_manifest
from pointsman.config.fleet import load_fleet
from pointsman.control import Desired
from pointsman.placement.asks import Place
from pointsman.runtimes.simulation.fleet import SimulatedFleet

HERE = Path(__file__).parent / "scenarios"
MODELS = Path(__file__).parents[2] / "examples" / "fleets" / "models"
TINY = Path(__file__).parents[1] / "models" / "tiny-pydoc-q8_0.gguf"
SCENARIOS = [one for file in sorted(HERE.glob("*.yaml")) for one in yaml.safe_load(file.read_text(encoding="utf-8"))]
NO_PLACE = "no-place"
COMMANDS = {"llama": "llama-server -m m.gguf --metrics --port {port}", "command": "serve --port {port}"}


def manifest_of(scenario: dict[str, Any]) -> str:
    """The manifest that its short deployments stand for."""
    deployments = []
    for one in scenario["deployments"]:
        placement = dict(one.get("placement", {}))
        files = TINY if one.get("model") == "tiny" else MODELS / one.get("model", "none")
        if "resources" in one:
            placement["resources"] = one["resources"]
        else:
            placement["modelFiles"] = str(files)
        engine: dict[str, Any] = {"type": "vllm", "parameters": {"model": "m", **one.get("parameters", {})}}
        if one["engine"] != "vllm":
            engine = {"type": "command", "parameters": {"command": one.get("command", COMMANDS[one["engine"]])}}
        replicas = one.get("replicas", 1)
        named = {"name": one["name"], "model": one["name"], "replicas": replicas}
        deployments.append({**named, "engine": engine, "placement": placement})
    return yaml.safe_dump({"deployments": deployments})


def where(gpus: list[tuple[str, int]], workers: list[str]) -> str:
    """a/0 a/1; without GPUs the worker."""
    return " ".join(f"{worker}/{gpu}" for worker, gpu in sorted(gpus)) or " ".join(workers)


def outcomes_of(place: Place) -> str:
    return where(list(place.gpus), list(place.workers))


def test_there_are_enough() -> None:
    assert len({one["name"] for one in SCENARIOS}) == len(SCENARIOS) >= 60
    assert all(one["reason"] for one in SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one["name"])
def test_as_placed_by_the_command(scenario: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, fleet = tmp_path / "m.yaml", tmp_path / "fleet.yaml"
    manifest.write_text(manifest_of(scenario), encoding="utf-8")
    fleet.write_text(yaml.safe_dump({"kind": "Fleet", "workers": scenario["workers"]}), encoding="utf-8")
    code = main(["place", str(manifest), "--fleet", str(fleet), "--json"])
    found = {one["instance"]: one for one in json.loads(capsys.readouterr().out)["instances"]}
    told = {}
    for name, one in found.items():
        claims = one["place"]["claims"] if one["placed"] else []
        gpus = [(claim["worker"], claim["gpu"]) for claim in claims if claim["gpu"] is not None]
        told[name] = where(gpus, [claim["worker"] for claim in claims]) if one["placed"] else NO_PLACE
    assert told == scenario["expect"], scenario["reason"]
    assert code == (NO_PLACE in told.values())
    for name, why in scenario.get("why", {}).items():
        assert why in json.dumps(found[name]["reason"]), scenario["reason"]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one["name"])
def test_as_placed_by_the_controller(scenario: dict[str, Any]) -> None:
    plan = load_manifest(manifest_of(scenario))
    fleet = SimulatedFleet(load_fleet(yaml.safe_dump({"kind": "Fleet", "workers": scenario["workers"]})).workers)
    fleet.apply(Desired({one.name: one.desired for one in plan.deployments}))
    fleet.run_until(10.0)
    found = {one.id: outcomes_of(one.place) if one.place else NO_PLACE for one in fleet.instances()}
    expected = {name: scenario["expect"].get(name, NO_PLACE) for name in found}
    assert found == expected, scenario["reason"]
