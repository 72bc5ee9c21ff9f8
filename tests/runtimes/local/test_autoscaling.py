"""Scaling on a plane with real processes. Decisions on virtual time: tests/control/test_scaling.py."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.routing.events import Arrived
from pointsman.types import RequestMetadata, Worker
from tests.runtimes.local.planes import Stage, manifest, run, running, simulated
from tests.runtimes.local.test_applications import diamond
from tests.runtimes.test_metric_sources import server

GIB = 2**30


def scaled(name: str = "m", slots: int = 2, gib: int = 0, **scaling: Any) -> str:
    """A deployment whose policy is called ten times a second."""
    section = {"max": 3, "interval": "100ms", "downDelay": "200ms", "idleTimeout": "200ms", **scaling}
    section.setdefault("parameters", {"target": 1, "lookBack": "200ms"})
    needs = f"    placement: {{resources: {{gpus: 0, memory: {gib}Gi}}}}\n" if gib else ""
    # Without replicas, so that min is what it begins with.
    return simulated(name, 0, slots).replace("    replicas: 0\n", "") + f"    scaling: {section}\n" + needs


def machine(gib: float) -> Callable[..., Worker]:
    return lambda *_, **__: Worker(name="here", cpus=8, memory_bytes=int(gib * GIB))


def wanted(scene: Stage, name: str = "m") -> int:
    number: int = scene.plane.scaling.status(name)["desired"]
    return number


def records(scene: Stage, name: str = "m") -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = scene.plane.scaling.status(name)["records"]
    return kept


def changes(scene: Stage, name: str = "m") -> list[tuple[int, int]]:
    return [(one["before"], one["after"]) for one in records(scene, name) if one["before"] != one["after"]]


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a module beside the manifest; returns its name."""
    made: list[str] = []

    def write(code: str) -> str:
        name = f"policies_{uuid4().hex}"  # modules are loaded once, so each has a name of its own
        (tmp_path / f"{name}.py").write_text(code)
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_more_requests_bring_more_instances(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(scaled(min=1))) as scene:
            await scene.until_ready("m-1")
            assert changes(scene) == []
            for number in range(6):
                scene.request(f"r{number}")
            await scene.until_ready("m-1", "m-2", "m-3")
            assert wanted(scene) == 3
            assert {one.request.request_id for one in scene.carrier.sent} == {f"r{n}" for n in range(6)}
            for number in range(6):
                scene.end(f"r{number}")
            await scene.until(lambda: len(scene.instances()) == 1, "one left")
            steps = changes(scene)
            assert steps[0][0] == 1
            assert max(after for _, after in steps) == 3
            assert steps[-1][1] == 1
            first = records(scene)[0]
            assert first["policy"] == "target-ongoing"
            assert "per replica" in first["why"]
            assert first["numbers"]["ongoing"] + first["numbers"]["queued"] > 0

    run(story())


def test_a_deployment_scales_from_zero_and_back(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(scaled(min=0, interval="1h"))) as scene:
            await scene.until(lambda: scene.plane.scaling.status("m")["wanted"] == 0, "the policy called once")
            assert scene.instances() == {}
            assert scene.plane.ready  # it is at 0, and starts on request
            scene.request("first")
            await scene.until(lambda: wanted(scene) == 1, "one wanted at once, not after an hour")
            await scene.until(lambda: len(scene.carrier.sent) == 1, "the request sent")
            assert changes(scene) == [(0, 1)]
            scene.end("first")

    async def rest() -> None:
        async with running(state, None) as scene:
            await scene.plane.documents.apply(manifest(scaled(min=0)))
            scene.request("second")
            await scene.until(lambda: len(scene.carrier.sent) == 1, "the request sent")
            scene.end("second")
            await scene.until(lambda: scene.instances() == {}, "no instance left")
            assert changes(scene)[-1] == (1, 0)

    run(story())
    run(rest())


def test_a_target_survives_a_new_manifest_and_a_restart(state: Path) -> None:
    text = manifest(scaled(min=1, max=4))

    async def before() -> None:
        async with running(state, text) as scene:
            scene.plane.scaling.scale("m", 2, None, "Ada")
            await scene.until_ready("m-1", "m-2")
            assert not scene.plane.documents.plan(text)
            assert not await scene.plane.documents.apply(text)
            assert wanted(scene) == 2
            lower = await scene.plane.documents.apply(manifest(scaled(min=1, max=1)))
            assert [step.what for step in lower.steps] == ["scaling", "stop"]
            await scene.until_ready("m-1")
            await scene.plane.documents.apply(text)
            await scene.until(lambda: len(scene.ready()) == 2, "two again")

    async def after() -> None:
        async with running(state, None) as scene:
            assert wanted(scene) == 2
            await scene.until_ready("m-1", "m-2")
            assert scene.plane.scaling.status("m")["override"]["by"] == "Ada"
            assert any("Ada" in one["why"] for one in records(scene))

    run(before())
    run(after())


def test_an_override_holds_until_it_ends_or_is_released(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(scaled(min=1, max=3), simulated("fixed"))) as scene:
            scene.plane.scaling.scale("m", 3, 0.5, "Ada")
            assert wanted(scene) == 3
            await scene.until(lambda: wanted(scene) == 1, "the order over")
            assert any("ended: 3 ordered by Ada" in one["why"] for one in records(scene))
            scene.plane.scaling.scale("m", 2, None, "an operator")
            assert scene.plane.status()["deployments"][0]["scaling"]["override"]["replicas"] == 2
            scene.plane.scaling.scale("m", None, None, "an operator")
            await scene.until(lambda: wanted(scene) == 1, "the policy followed again")
            with pytest.raises(PointsmanError, match=r"between 1 and 3 \(scaling.min and max\), found 7"):
                scene.plane.scaling.scale("m", 7, None, "an operator")
            with pytest.raises(PointsmanError, match=r'"fixed" has a fixed number of instances, which is 1; give it'):
                scene.plane.scaling.scale("fixed", 2, None, "an operator")
            with pytest.raises(UnknownName, match='unknown deployment "n"'):
                scene.plane.scaling.status("n")

    run(story())


WRONG = """
import time
calls = []

class Counting:
    def desired_replicas(self, view):
        calls.append(view.name)
        return 1

def raises(view):
    raise RuntimeError("no idea")

def negative(view):
    return -3

def wordy(view):
    return "many"

def slow(view):
    calls.append(time.monotonic())
    time.sleep(1)
    return 2

def hangs(view):
    calls.append(1)
    time.sleep(3600)

def grows(view):
    view.state.setdefault("seen", []).extend(["more and more"] * 10_000)
    return 3
"""


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ("raises", "raised RuntimeError: no idea"),
        ("negative", "returned -3; it must be a whole number"),
        ("wordy", "returned 'many'; it must be a whole number"),
        ("slow", " 0.1 s (timeLimit)"),
        ("hangs", " 0.1 s (timeLimit)"),
        ("grows", "into view.state, which may have 64 KiB"),
    ],
)
def test_a_failing_policy_changes_nothing_and_is_reported(
    policy: str, problem: str, state: Path, tmp_path: Path, module: Callable[[str], str]
) -> None:
    name = module(WRONG)
    limit = "100ms" if "timeLimit" in problem else "10s"
    spec = scaled(policy=f"{name}:{policy}", parameters={}, min=0, initial=2, timeLimit=limit)

    async def story() -> None:
        async with running(state, manifest(spec, folder=tmp_path)) as scene:
            await scene.until_ready("m-1", "m-2")
            await scene.until(lambda: scene.plane.scaling.each()[0].errors > 5, "called again and again")
            [told] = scene.plane.status()["problems"]
            assert told["code"] == "scaling-policy-fails"
            assert problem in told["text"]
            assert told["text"].startswith(f'the scaling policy {name}:{policy} of "m" ')
            assert len(records(scene)) == 1  # it is told once
            assert scene.ready() == {"m-1", "m-2"}
            if policy == "hangs":
                assert len(sys.modules[name].calls) == 1  # and it has one thread, not one for each time
                await scene.plane.documents.apply(manifest(scaled()))
                gone = 'a call of hangs, which decides about "m" no more, does not return'
                await scene.until(
                    lambda: [gone in one["text"] for one in scene.plane.status()["problems"]] == [True], "told"
                )

    run(story())


def test_two_deployments_share_room_for_one(state: Path) -> None:
    text = manifest(scaled("a", gib=3, min=0, idleTimeout="1h"), scaled("b", gib=3, min=0, idleTimeout="1h"))

    async def story() -> None:
        async with running(state, text, look_at_machine=machine(4)) as scene:
            scene.request("a1", "a")
            await scene.until(lambda: len(scene.carrier.sent) == 1, "a serves")
            scene.request("b1", "b")
            await scene.until(lambda: any(one["problem"] for one in records(scene, "b")), "b has no room, as a is busy")
            assert scene.ready() == {"a-1"}
            assert "1 of 1 has no place" in records(scene, "b")[-1]["problem"]
            scene.end("a1", "a")
            await scene.until(lambda: len(scene.carrier.sent) == 2, "b serves when a is idle")
            assert set(scene.instances()) == {"b-1"}
            assert changes(scene, "a") == [(0, 1), (1, 0)]
            assert "makes room for b" in records(scene, "a")[-1]["why"]
            assert "a, which is idle, makes room for it" in records(scene, "b")[-1]["why"]
            scene.request("a2", "a")
            await scene.until(lambda: wanted(scene, "a") == 1, "a wanted again")
            scene.end("b1", "b")
            await scene.until(lambda: len(scene.carrier.sent) == 3, "a serves again")
            assert set(scene.instances()) == {"a-1"}
            scene.end("a2", "a")

    run(story())


BY_LOAD = """
def by_load(view):
    load = view.metrics.get("load")
    return 1 if load is None else int(load.last)
"""


def test_a_policy_sees_prometheus_metrics(state: Path, tmp_path: Path, module: Callable[[str], str]) -> None:
    async def story() -> None:
        with server() as (url, _):
            queries = [
                {"name": "load", "url": f"{url}/prefix", "query": "up"},
                {"name": "bad", "url": url, "query": "up"},
            ]
            spec = scaled(policy=f"{module(BY_LOAD)}:by_load", parameters={}, metrics=queries)
            async with running(state, manifest(spec, folder=tmp_path)) as scene:
                await scene.until_ready("m-1", "m-2", "m-3")
                [problem] = scene.plane.status()["problems"]
                assert problem["text"].startswith(f'"m": metric "bad" cannot be read from {url}')

    run(story())


NOTES = """
def counts(view, step=1):
    view.state["asked"] = view.state.get("asked", 0) + step
    return min(view.state["asked"], 1)

def others(view):
    assert "asked" not in view.state
    return 1
"""


def test_policy_state_survives_a_restart(state: Path, tmp_path: Path, module: Callable[[str], str]) -> None:
    name, counted = module(NOTES), []

    def notes(scene: Stage) -> int:
        asked: int = scene.plane.scaling.each()[0].guard.policy_state.get("asked", 0)
        return asked

    async def before() -> None:
        text = manifest(scaled(policy=f"{name}:counts", parameters={}), folder=tmp_path)
        async with running(state, text) as scene:
            await scene.until(lambda: notes(scene) > 5, "asked some times")
        counted.append(notes(scene))

    async def after() -> None:
        async with running(state, None) as scene:
            assert notes(scene) == counted[0]
            await scene.until(lambda: notes(scene) > counted[0], "it counts on")
            await scene.plane.documents.apply(manifest(scaled(policy=f"{name}:others", parameters={}), folder=tmp_path))
            await scene.until(lambda: scene.plane.scaling.status("m")["wanted"] == 1, "the other one asked")
            assert notes(scene) == 0
            assert scene.plane.status()["problems"] == []

    run(before())
    run(after())


TOGETHER = """
def together(view):
    ongoing = sum(one.ongoing + one.queued for one in view.deployments.values())
    view.state["asked"] = view.state.get("asked", 0) + 1
    assert view.name == "diamond"
    assert 7.0 in view.deployments["m1"].ongoing_windows
    return {"m1": 2, "m2": 2 if view.deployments["m1"].target == 2 else 1}


together.windows = (7.0,)
"""


def test_a_module_that_no_longer_loads_does_not_stop_the_plane(
    state: Path, tmp_path: Path, module: Callable[[str], str]
) -> None:
    name = module("def two(view):\n    return 2\n")
    text = manifest(scaled(policy=f"{name}:two", parameters={}, min=0, initial=1), folder=tmp_path)

    async def before() -> None:
        async with running(state, text) as scene:
            await scene.until_ready("m-1", "m-2")

    async def after() -> None:
        async with running(state, None) as scene:
            await scene.until_ready("m-1", "m-2")
            await scene.until(lambda: scene.plane.status()["problems"], "what is wrong told")
            [told] = scene.plane.status()["problems"]
            assert told["text"].startswith(
                f'the scaling policy {name}:two of "m" raised PointsmanError: module "{name}" cannot'
            )
            assert "SyntaxError" in told["text"]
            assert told["text"].endswith("repair it, and restart the plane; the target stays 2")
            with pytest.raises(ConfigError, match="cannot be imported: SyntaxError"):
                await scene.plane.documents.apply(text)  # the operator who applies it can repair it

    run(before())
    (tmp_path / f"{name}.py").write_text("def two(view:\n")
    del sys.modules[name]
    run(after())


def test_the_policy_of_an_application_sees_all_its_nodes(
    state: Path, tmp_path: Path, module: Callable[[str], str]
) -> None:
    name = module(TOGETHER)
    document = diamond(tmp_path, nodes={"total": {"replicas": 2, "scaling": {"min": 2, "max": 2}}})
    scaling = f'{{policy: "{name}:together", max: 3, interval: 100ms}}'
    text = f"{document.text.rstrip()}\nscaling: {scaling}\n" if document.text.lstrip()[0] != "{" else document.text

    async def story() -> None:
        async with running(state, manifest()) as scene:
            await scene.plane.documents.deploy(type(document)(text, document.folder, document.file))
            await scene.until(lambda: len(scene.ready()) == 6, "two of each")
            assert wanted(scene, "diamond/m1") == wanted(scene, "diamond.m2") == 2
            assert scene.plane.scaling.status("diamond/m1")["policy"] == f"{name}:together"
            assert wanted(scene, "diamond/total") == 2
            assert "scaling:" in scene.plane.documents.application("diamond")

    run(story())


def test_all_shards_follow_the_first(state: Path, tmp_path: Path) -> None:
    grows = {
        "min": 0,
        "max": 2,
        "interval": "100ms",
        "idleTimeout": "200ms",
        "downDelay": "0s",
        "parameters": {"target": 1, "lookBack": "200ms"},
    }
    document = diamond(tmp_path, nodes={"m1": {"shards": 2, "scaling": grows}})

    async def story() -> None:
        async with running(state, manifest()) as scene:
            await scene.plane.documents.deploy(document)
            await scene.until_ready("diamond.m2-1", "diamond.total-1")
            for name in ("one", "two"):
                for rank in (1, 0):  # a call goes to all shards
                    lane = scene.traffic.lanes[f"diamond.m1.{rank}"]
                    lane.tell(Arrived((RequestMetadata(f"{name}.{rank}", model_name=f"diamond.m1.{rank}"),)))
            await scene.until(lambda: len(scene.carrier.sent) == 4, "every shard was started")
            await scene.until(lambda: len(scene.ready()) == 6, "two of each")
            assert wanted(scene, "diamond/m1") == wanted(scene, "diamond.m1.1") == 2
            assert scene.plane.scaling.status("diamond/m1")["ready"] == 2
            for sent in scene.carrier.sent:
                scene.end(sent.request.request_id, sent.request.model_name)
            await scene.until_ready("diamond.m2-1", "diamond.total-1")

    run(story())
