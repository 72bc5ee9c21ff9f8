"""Applications on a real plane, with real replicas: deployed, changed, rolled back, deleted, adopted."""

import os
import signal
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from pointsman.config.revision import ManifestText
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.http.client import fetch
from pointsman.runtimes.machine.store import Store
from tests.runtimes.local.planes import Stage, manifest, run, running, simulated
from tests.runtimes.local.processes import is_alive
from tests.runtimes.local.test_plane_deaths import killed_plane

CODE = """\
import json, os
from pathlib import Path

class Model:
    def __init__(self, value):
        if value == "broken":
            raise ValueError("this value is broken")
        self.value = value

    def reconfigure(self, config):
        if config == "refused":
            raise ValueError("not with me")
        told = Path(__file__).parent / f"told-{os.getpid()}"
        told.write_text(json.dumps(config))

    def forward(self, x):
        return self.value * x

def total(a, b):
    return a + b
"""
QUICK = {"healthCheckPeriod": "100ms", "healthCheckTimeout": "2s", "gracefulShutdown": "5s", "startTimeout": "20s"}


def diamond(folder: Path, name: str = "diamond", nodes: Mapping[str, Mapping[str, Any]] | None = None) -> ManifestText:
    """Two models and a sum; `nodes`: what is otherwise with which."""
    (folder / "parts.py").write_text(CODE)
    usual: dict[str, dict[str, Any]] = {
        "m1": {"class": "parts.py:Model", "args": [1], **QUICK},
        "m2": {"class": "parts.py:Model", "args": [2], **QUICK},
        "total": {"function": "parts.py:total", **QUICK},
    }
    document = {
        "kind": "Application",
        "name": name,
        "nodes": [{"name": node, **said, **(nodes or {}).get(node, {})} for node, said in usual.items()],
        "calls": [
            {"id": "one", "node": "m1", "method": "forward", "args": [{"$input": [0]}]},
            {"id": "two", "node": "m2", "method": "forward", "args": [{"$input": [1]}]},
            {"id": "sum", "node": "total", "args": [{"$step": "one"}, {"$step": "two"}]},
        ],
        "output": {"$step": "sum"},
    }
    return ManifestText(yaml.safe_dump(document, sort_keys=False), str(folder), f"{name}.yaml")


READY = ("diamond.m1-1", "diamond.m2-1", "diamond.total-1")


def steps(changes: Any) -> list[tuple[str, str]]:
    return [(step.what, step.subject) for step in changes.steps]


async def settled(scene: Stage) -> None:
    """As many as are wanted are ready, and nothing else is there."""
    await scene.until(
        lambda: all(
            one["ready"] == one["desired"] == len(one["instances"]) for one in scene.plane.status()["deployments"]
        ),
        "everything ready",
    )


def test_deploying_twice_changes_nothing(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            told: list[Any] = []
            scene.plane.reconfigured.append(told.append)
            app = diamond(tmp_path)
            planned = scene.plane.documents.plan(app)
            changes = await scene.plane.documents.deploy(app)
            assert changes == planned
            assert steps(changes)[:2] == [("open", "diamond"), ("open", "diamond.m1")]
            assert ("start", "diamond.m1-1") in steps(changes)
            assert [one.name for one in told[-1].applications] == ["diamond"]
            await scene.until_ready("m-1", *READY)
            pids = scene.pids()
            assert not await scene.plane.documents.deploy(app)
            respelled = ManifestText(f"# the same\n{app.text}", app.folder, "other.yaml")
            assert not await scene.plane.documents.deploy(respelled)
            assert not await scene.plane.documents.apply(manifest(simulated())), (
                "the manifest says nothing of applications"
            )
            assert scene.pids() == pids
            assert scene.plane.documents.application("diamond").startswith(
                "apiVersion: pointsman/v1alpha1\nkind: Application\n"
            )
            again = ManifestText(scene.plane.documents.application("diamond"), str(tmp_path))
            assert not await scene.plane.documents.deploy(again)
            assert scene.traffic.by_model.keys() == {"m"}, "clients do not see nodes as models"
            assert {"diamond.m1", "diamond.m2", "diamond.total"} < scene.traffic.lanes.keys()
            [told_of] = scene.plane.status()["applications"]
            assert (told_of["name"], told_of["path"]) == ("diamond", "/diamond")
            assert [node["deployments"] for node in told_of["nodes"]] == [
                ["diamond.m1"],
                ["diamond.m2"],
                ["diamond.total"],
            ]
            with pytest.raises(PointsmanError, match='no version of "diamond" before'):
                await scene.plane.documents.rollback("diamond")
        assert not any(map(is_alive, pids.values()))

    run(story())


def test_only_nodes_that_differ_are_replaced(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with running(state, diamond(tmp_path)) as scene:
            await settled(scene)
            first = scene.pids()
            assert first.keys() == set(READY)
            more = await scene.plane.documents.deploy(diamond(tmp_path, nodes={"m1": {"replicas": 2}}))
            assert steps(more) == [("start", "diamond.m1-2")]
            await settled(scene)
            assert first.items() <= scene.pids().items()
            rolled = await scene.plane.documents.deploy(
                diamond(tmp_path, nodes={"m1": {"replicas": 2}, "m2": {"args": [7]}})
            )
            assert steps(rolled) == [("replace", "diamond.m2-1"), ("start", "diamond.m2-2")]
            assert "engine.args [2] -> [7]" in str(rolled.steps[0].why)
            await settled(scene)
            assert {name: pid for name, pid in first.items() if name != "diamond.m2-1"}.items() <= scene.pids().items()
            assert "diamond.m2-2" in scene.ready()
            calls = yaml.safe_load(diamond(tmp_path).text)
            calls["output"] = [{"$step": "sum"}]
            other = ManifestText(yaml.safe_dump(calls), str(tmp_path))
            assert ("calls", "diamond") in steps(scene.plane.documents.plan(other))

    run(story())


def told_config(folder: Path, pid: int) -> Any:
    file = folder / f"told-{pid}"
    return msgspec.json.decode(file.read_bytes()) if file.exists() and file.stat().st_size else None


def test_user_config_changes_without_a_restart(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with running(state, diamond(tmp_path, nodes={"m1": {"userConfig": {"limit": 1}}})) as scene:
            await settled(scene)
            pid = scene.pids()["diamond.m1-1"]
            assert told_config(tmp_path, pid) == {"limit": 1}, "before it is ready"
            assert told_config(tmp_path, scene.pids()["diamond.m2-1"]) is None
            changes = await scene.plane.documents.deploy(
                diamond(tmp_path, nodes={"m1": {"userConfig": {"limit": 2}, "replicas": 2}})
            )
            assert steps(changes) == [("configure", "diamond.m1"), ("start", "diamond.m1-2")]
            await scene.until(lambda: told_config(tmp_path, pid) == {"limit": 2}, "it is told")
            await settled(scene)
            assert scene.pids()["diamond.m1-1"] == pid
            assert told_config(tmp_path, scene.pids()["diamond.m1-2"]) == {"limit": 2}
            await scene.plane.documents.deploy(
                diamond(tmp_path, nodes={"m1": {"userConfig": "refused", "replicas": 2}})
            )
            await scene.until(lambda: len(scene.plane.status()["problems"]) == 2, "both refuse")
            assert "not with me" in scene.plane.status()["problems"][0]["facts"]["error"]
            await scene.plane.documents.deploy(
                diamond(tmp_path, nodes={"m1": {"userConfig": {"limit": 3}, "replicas": 2}})
            )
            await scene.until(lambda: scene.plane.status()["problems"] == [], "they take this one")
            assert scene.pids()["diamond.m1-1"] == pid

    run(story())


def test_rollback_goes_to_earlier_versions(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            versions = [
                diamond(tmp_path, nodes={"m1": {"replicas": count}, "m2": {"replicas": 0}}) for count in (1, 2, 3)
            ]
            texts = []
            for version in versions:
                await scene.plane.documents.deploy(version)
                texts.append(scene.plane.documents.application("diamond"))
            assert ("stop", "diamond.m1-3") in steps(await scene.plane.documents.rollback("diamond"))
            assert scene.plane.documents.application("diamond") == texts[1]
            await scene.plane.documents.rollback("diamond")
            assert scene.plane.documents.application("diamond") == texts[0]
            with pytest.raises(PointsmanError, match="no version"):
                await scene.plane.documents.rollback("diamond")
            await scene.plane.documents.deploy(versions[2])
            await scene.plane.documents.rollback("diamond")
            assert scene.plane.documents.application("diamond") == texts[0]
            gone = await scene.plane.documents.delete("diamond")
            assert steps(gone)[0] == ("close", "diamond")
            assert scene.plane.documents.plan_in_force.applications == ()
            await scene.until_ready("m-1")
            for ask_for in (scene.plane.documents.rollback, scene.plane.documents.delete):
                with pytest.raises(UnknownName, match='unknown application "diamond"'):
                    await ask_for("diamond")

    run(story())


def test_a_broken_version_leaves_the_previous_one_serving(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with running(state, diamond(tmp_path)) as scene:
            await settled(scene)
            pids = scene.pids()
            broken = diamond(tmp_path, nodes={"m1": {"args": ["broken"]}})
            await scene.plane.documents.deploy(broken)
            await scene.until(lambda: scene.instances()["diamond.m1-2"]["halted"], "it is given up")
            told = scene.instances()["diamond.m1-2"]
            assert told["reason"].startswith("rollout stopped: exit code 1")
            assert "this value is broken" in told["reason"]
            assert told["reason"].endswith("the earlier version still serves; deploy again to retry")
            assert scene.ready() == set(READY)
            assert pids.items() <= scene.pids().items()
            again = await scene.plane.documents.deploy(broken)
            assert steps(again) == [("restart", "diamond.m1-2")]
            await scene.until(lambda: scene.instances()["diamond.m1-2"]["halted"], "it is given up again")
            await scene.plane.documents.rollback("diamond")
            await settled(scene)
            assert scene.pids() == pids

    run(story())


def test_names_and_models_must_fit_the_manifest(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        own = diamond(tmp_path, name="own", nodes={node: {"replicas": 0} for node in ("m1", "m2", "total")})
        (tmp_path / "own.yaml").write_text(own.text)
        base = manifest(simulated(), more="applications: [own.yaml]\n", folder=tmp_path)
        async with running(state, base) as scene:
            assert [one.name for one in scene.plane.documents.plan_in_force.applications] == ["own"]
            for ask_for in (scene.plane.documents.rollback, scene.plane.documents.delete):
                with pytest.raises(PointsmanError, match=r'"own" is part of the manifest test\.yaml; change it there'):
                    await ask_for("own")
            with pytest.raises(ConfigError, match=r'"own" is part of the manifest test\.yaml'):
                await scene.plane.documents.deploy(own)
            with pytest.raises(
                PointsmanError, match=r"test\.yaml is a manifest, not an application; use: pointsman apply"
            ):
                await scene.plane.documents.deploy(base)
            data = yaml.safe_load(diamond(tmp_path, nodes={"m1": {"replicas": 0}}).text)
            data["nodes"].append({"name": "llm", "model": "n"})
            absent = ManifestText(yaml.safe_dump(data), str(tmp_path))
            with pytest.raises(ConfigError, match='application "diamond", node "llm": there is no model "n"; known: m'):
                await scene.plane.documents.deploy(absent)
            data["nodes"][-1]["model"] = "m"
            await scene.plane.documents.deploy(ManifestText(yaml.safe_dump(data), str(tmp_path)))
            with pytest.raises(ConfigError, match='there is no model "m"'):
                await scene.plane.documents.apply(manifest(simulated("other")))
            with pytest.raises(ConfigError, match=r'two deployments are called "diamond\.m1"'):
                await scene.plane.documents.apply(manifest(simulated(), simulated("diamond.m1", replicas=0)))

    run(story())


def test_replicas_accept_calls_of_their_plane_only(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        app = diamond(tmp_path, nodes={"m2": {"replicas": 0}, "total": {"replicas": 0}})
        async with running(state, app) as scene:
            await scene.until_ready("diamond.m1-1")
            shm, secret = scene.runtime.replicas.memory.path, scene.runtime.replicas.secret
            assert stat.S_IMODE(shm.stat().st_mode) == 0o700
            assert stat.S_IMODE((state / "secret").stat().st_mode) == 0o600
            assert (state / "secret").read_text() == secret
            pid = scene.pids()["diamond.m1-1"]
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"POINTSMAN_SECRET={secret}".encode() in environment
            assert f"POINTSMAN_SOCKET={state / 'admin.sock'}".encode() in environment
            assert f"POINTSMAN_SHM={shm}".encode() in environment
            address = scene.runtime.address("diamond.m1-1")
            assert address is not None
            stranger = await fetch(address, "POST", "/configure", b"{}", timeout_s=5.0)
            assert stranger.status == 403
            (shm / "left").write_bytes(b"x")
        assert not shm.exists()
        shm.mkdir()
        (shm / "left by one that was killed").write_bytes(b"x")
        async with running(state, None) as scene:
            assert scene.runtime.replicas.secret == secret
            assert list(scene.runtime.replicas.memory.path.iterdir()) == []

    run(story())


def test_after_a_kill_the_next_plane_adopts_replicas(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        app = diamond(tmp_path, nodes={"m1": {"userConfig": {"limit": 1}}})
        pids = killed_plane(state, app, grace_s=30.0)
        assert pids.keys() == set(READY)
        async with running(state, None) as scene:
            await settled(scene)
            assert scene.pids() == pids
            assert scene.plane.documents.plan_in_force.applications[0].name == "diamond"
            await scene.plane.documents.deploy(diamond(tmp_path, nodes={"m1": {"userConfig": {"limit": 2}}}))
            await scene.until(lambda: told_config(tmp_path, pids["diamond.m1-1"]) == {"limit": 2}, "it is told")
            os.kill(pids["diamond.m2-1"], signal.SIGKILL)
            await scene.until(lambda: scene.pids().get("diamond.m2-1") not in (None, pids["diamond.m2-1"]), "another")
            await settled(scene)

    run(story())


def test_a_plane_starts_although_an_application_no_longer_loads(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        app = diamond(tmp_path, nodes={node: {"replicas": 0} for node in ("m1", "m2", "total")})
        broken = ManifestText(app.text.replace("kind: Application", "kind: Application\nunknown: 1"), app.folder)
        async with running(state, manifest(simulated())) as scene:
            await scene.plane.documents.deploy(app)
            await scene.plane.documents.deploy(
                diamond(tmp_path, "other", {node: {"replicas": 0} for node in ("m1", "m2", "total")})
            )
        store = Store(state)
        store._db.execute("update applications set text = ? where name = 'diamond'", (broken.text,))
        store.close()
        async with running(state, None) as scene:
            assert [one.name for one in scene.plane.documents.plan_in_force.applications] == ["other"]
            [problem] = scene.plane.status()["problems"]
            assert problem["code"] == "application-broken"
            assert problem["text"].startswith('application "diamond" is not in force, because it no longer loads')
            await scene.plane.documents.delete("diamond")
            assert scene.plane.status()["problems"] == []
        async with running(state, None) as scene:
            assert scene.plane.status()["problems"] == []

    run(story())
