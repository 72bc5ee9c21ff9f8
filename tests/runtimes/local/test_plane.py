"""The plane with real processes: simulated engines, and a few of llama.cpp."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from pointsman.config.revision import ManifestText
from pointsman.control import DesiredEndpoint
from pointsman.engines import Samples
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.http.client import fetch
from pointsman.http.pool import descriptors_left
from pointsman.reasons import Reason
from pointsman.routing.events import Arrived, Ended
from pointsman.runtimes import probes
from pointsman.runtimes.machine.logs import log_file, tail
from pointsman.runtimes.machine.processes import Ports
from pointsman.runtimes.machine.store import Store
from pointsman.types import Gpu, RequestMetadata, Worker
from tests.runtimes.local.planes import LIFECYCLE, manifest, run, running, simulated, stage
from tests.runtimes.local.processes import eventually, group, is_alive
from tests.shortages import no_descriptors

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tests" / "models" / "tiny-pydoc-q8_0.gguf"


def stored_manifest(state: Path) -> ManifestText:
    store = Store(state)
    stored = store.documents.manifest()
    store.close()
    assert stored is not None
    return stored[1]


def test_instances_come_up_are_measured_and_leave_nothing_behind(state: Path) -> None:
    async def story() -> None:
        news: list[bool] = []
        async with running(state, manifest(simulated(replicas=2, slots=3))) as scene:
            scene.plane.listeners.append(lambda: news.append(scene.plane.ready))
            assert not scene.plane.ready
            await scene.until_ready("m-1", "m-2")
            assert scene.plane.ready
            await scene.until(lambda: news[-1:] == [True], "news")
            pids = scene.pids()
            await scene.until(
                lambda: all(one["metrics_age_s"] is not None for one in scene.instances().values()), "metrics"
            )
            [deployment] = scene.plane.status()["deployments"]
            assert (deployment["desired"], deployment["ready"], deployment["model"]) == (2, 2, "m")
            first, second = deployment["instances"]
            assert first["url"] != second["url"]
            assert first["max_concurrency"] == 3
            assert "started as process" in await scene.plane.instances.logs("m-1")
            with pytest.raises(UnknownName, match=r'unknown instance "m-9"'):
                await scene.plane.instances.logs("m-9")
            with pytest.raises(UnknownName, match=r'unknown instance "../lock"'):
                await scene.plane.instances.logs("../lock")
        assert not any(map(is_alive, pids.values()))
        assert [path.name for path in state.glob("*.sock")] == []

    run(story())


def test_instances_run_although_a_driver_fails(state: Path) -> None:
    def broken(*_: object, **__: object) -> Worker:
        raise RuntimeError("driver and library versions differ")

    async def story() -> None:
        async with running(state, manifest(simulated(replicas=1)), look_at_machine=broken) as scene:
            await scene.until_ready("m-1")
            [problem] = scene.plane.status()["problems"]
            assert problem["code"] == "machine-not-detected"
            assert problem["text"].endswith("instances get no places: RuntimeError: driver and library versions differ")

    run(story())


def test_an_idle_instance_is_measured_less_often_and_at_once_with_a_request(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "IDLE_SCRAPE_S", 1000.0)

    async def story() -> None:
        async with running(state, manifest(simulated(replicas=1))) as scene:
            await scene.until_ready("m-1")

            def age() -> float:
                return scene.instances()["m-1"]["metrics_age_s"] or 0.0

            await scene.until(lambda: age() > 1.0, "old metrics")
            assert scene.instances()["m-1"]["phase"] == "ready"
            assert scene.plane.status()["problems"] == []
            request = RequestMetadata("r", "hello", model_name="m", arrival_time=time.monotonic())
            scene.traffic.lanes["m"].tell(Arrived((request,)))
            await scene.until(lambda: age() < 0.5, "new metrics")
            scene.traffic.lanes["m"].tell(Ended("r", 1))

    run(story())


def test_what_happened_to_instances_and_documents_is_an_event(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated(replicas=1))) as scene:
            await scene.until_ready("m-1")
            os.kill(scene.pids()["m-1"], signal.SIGKILL)
            phases = scene.plane.events.phases
            await scene.until(lambda: phases["m", "ready", ""] == 2, "ready again")
            await scene.plane.documents.apply(manifest(simulated(replicas=0)))
            await scene.until(lambda: not scene.instances(), "no instance")
            events = scene.plane.events.since(0, 100)
        assert [(one["code"], one["facts"].get("phase")) for one in events] == [
            ("phase-changed", "starting"),
            ("documents-changed", None),
            ("phase-changed", "ready"),
            ("phase-changed", "backing off"),
            ("phase-changed", "starting"),
            ("phase-changed", "ready"),
            ("phase-changed", "draining"),
            ("documents-changed", None),
            ("phase-changed", "stopping"),
            ("phase-changed", ""),
        ]
        assert events[3]["text"] == "m-1: ready -> backing off: killed by SIGKILL"
        assert phases["m", "backing off", "exited"] == 1

    run(story())


def test_gpus_that_cannot_be_looked_at_for_want_of_descriptors_are_not_gone(state: Path) -> None:
    looked: list[float] = []

    def look(*_: object, **__: object) -> Worker:
        looked.append(0.0)
        gpus = (Gpu(index=0, memory_bytes=2**34, model="H100"),) if descriptors_left() else ()
        return Worker(name="here", cpus=2, memory_bytes=2**34, gpus=gpus)

    async def story() -> None:
        async with running(state, manifest(simulated(replicas=1)), look_at_machine=look) as scene:
            await scene.until_ready("m-1")
            before = len(looked)
            with no_descriptors():
                scene.plane.runtime.look_at_workers(scene.plane.documents.plan_in_force)
            assert len(looked) == before
            [worker] = scene.plane.control.fleet().workers
            assert len(worker.gpus) == 1
            assert any("ulimit -n" in one["text"] for one in scene.plane.status()["problems"])
            scene.plane.runtime.look_at_workers(scene.plane.documents.plan_in_force)
            assert scene.plane.status()["problems"] == []

    run(story())


def test_real_engines_are_ready_only_after_a_completion(state: Path) -> None:
    text = f"""
  - name: tiny
    model: tiny
    replicas: 2
    engine: {{type: llama.cpp, parameters: {{model: "{MODEL}", slots: 2, contextTokens: 512}}}}
{LIFECYCLE}"""

    async def story() -> None:
        async with running(state, manifest(text)) as scene:
            await scene.until_ready("tiny-1", "tiny-2")
            for instance in scene.instances().values():  # only the plane has asked them for anything
                address = DesiredEndpoint(name="", url=instance["url"]).address
                numbers = Samples((await fetch(address, "GET", "/metrics", timeout_s=5.0)).body)
                assert (numbers.value("llamacpp:tokens_predicted_total") or 0) >= 1
            await scene.until(lambda: scene.instances()["tiny-1"]["running"] is not None, "its own numbers")
            os.kill(scene.pids()["tiny-1"], signal.SIGKILL)
            await scene.until(lambda: scene.instances()["tiny-1"]["restarts"] == 1, "a restart")
            await scene.until_ready("tiny-1", "tiny-2")

    run(story())


def test_a_server_that_answers_without_working_is_never_in_service(state: Path) -> None:
    """Its health check says that all is well, and each completion fails."""
    broken = simulated().replace("maxNumSeqs: 8", "faults: [{fault: status}]")

    async def story() -> None:
        async with running(state, manifest(broken)) as scene:
            await scene.until(lambda: "500" in scene.instances()["m-1"]["reason"], "a reason")
            assert scene.instances()["m-1"]["phase"] == "starting"
            assert not scene.plane.ready
            assert len(scene.traffic.lanes["m"].dispatcher.fleet) == 0

    run(story())


def test_a_crash_is_followed_by_a_restart_with_its_reason(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated(replicas=2))) as scene:
            await scene.until_ready("m-1", "m-2")
            before = scene.pids()
            os.kill(before["m-1"], signal.SIGKILL)
            await scene.until(lambda: scene.instances()["m-1"]["restarts"] == 1, "a restart")
            assert scene.instances()["m-1"]["reason"] == "killed by SIGKILL"
            await scene.until_ready("m-1", "m-2")
            after = scene.pids()
            assert after["m-1"] != before["m-1"]
            assert after["m-2"] == before["m-2"]

    run(story())


def test_the_last_line_of_a_process_explains_its_exit(state: Path) -> None:
    command = """
  - name: {name}
    model: {name}
    engine: {{type: command, parameters: {{command: {command}}}}}
{lifecycle}"""
    bad = ["sh", "-c", "echo first; echo no weights in {port} >&2; exit 7"]
    crashing = command.format(name="bad", command=bad, lifecycle=LIFECYCLE)
    absent = command.format(name="absent", command=["/nowhere/engine", "{port}"], lifecycle=LIFECYCLE)

    async def story() -> None:
        async with running(state, manifest(crashing, absent)) as scene:
            await scene.until(lambda: scene.instances()["bad-1"]["restarts"] > 1, "restarts")
            assert scene.instances()["bad-1"]["reason"].startswith("exit code 7: no weights in ")
            await scene.until(lambda: scene.instances()["absent-1"]["final"], "it is not tried again")
            reason = scene.instances()["absent-1"]["reason"]
            assert reason.startswith("/nowhere/engine cannot be run (No such file or directory); install it")
            assert scene.instances()["absent-1"]["restarts"] == 0

    run(story())


def test_a_folder_that_is_not_on_this_machine_is_a_problem(state: Path, tmp_path: Path) -> None:
    """As when a manifest is applied from another machine: what needs no folder runs."""
    gone = tmp_path / "gone"
    relative = "\n  - name: c\n    model: c\n    engine: {type: command, parameters: {command: [./server, '{port}']}}\n"

    async def story() -> None:
        async with running(state, manifest(simulated(), relative, folder=gone)) as scene:
            await scene.until(lambda: scene.ready() == {"m-1"} and scene.instances()["c-1"]["final"], "both were tried")
            problems = [one["text"] for one in scene.plane.status()["problems"] if one["code"] == "no-folder"]
            assert [one.startswith(f"there is no folder {gone}") for one in problems] == [True]
            assert f"run in {state}: relative paths resolve there" in problems[0]
            assert f"searched from {state}, as there is no {gone}" in scene.instances()["c-1"]["reason"]
        async with running(state, manifest(simulated(), folder=tmp_path)) as scene:
            await scene.until_ready("m-1")
            assert scene.plane.status()["problems"] == []

    run(story())


def test_a_port_taken_by_another_program_costs_one_restart(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Ports.take

    async def story() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            offered = [other.getsockname()[1]]
            monkeypatch.setattr(Ports, "take", lambda *args: offered.pop() if offered else take(*args))
            async with running(state, manifest(simulated())) as scene:
                await scene.until_ready("m-1")
                assert scene.instances()["m-1"]["restarts"] == 1
                assert "exit code 1: " in scene.instances()["m-1"]["reason"]

    run(story())


def test_an_instance_that_hangs_is_restarted(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            await scene.until_ready("m-1")
            hung = scene.pids()["m-1"]
            os.kill(hung, signal.SIGSTOP)  # it accepts connections, and never answers
            await scene.until(lambda: not is_alive(hung), "its end")
            await scene.until_ready("m-1")
            assert "did not answer 2 probes in a row" in scene.instances()["m-1"]["reason"]
            assert scene.pids()["m-1"] != hung

    run(story())


def test_failing_requests_take_an_instance_out_until_it_works_again(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            await scene.until_ready("m-1")
            phases: list[str] = []
            scene.plane.listeners.append(lambda: phases.append(scene.instances()["m-1"]["phase"]))
            for _ in range(3):
                scene.traffic.lanes["m"].failed("m-1", Reason("reset by peer"))
            await scene.until(lambda: "unhealthy" in phases, "doubt")
            await scene.until_ready("m-1")

    run(story())


def test_metrics_that_cannot_be_read_grow_old_and_are_reported(state: Path) -> None:
    blind = simulated().replace("maxNumSeqs: 8", 'faults: [{fault: status, "on": metrics}]')

    async def story() -> None:
        async with running(state, manifest(blind)) as scene:
            await scene.until_ready("m-1")
            await scene.until(lambda: scene.plane.status()["problems"], "a problem")
            [problem] = scene.plane.status()["problems"]
            assert problem["text"].startswith("the metrics of m-1 could not be read")
            assert "GET /metrics was answered with 500" in problem["facts"]["why"]
            assert scene.instances()["m-1"]["metrics_age_s"] is None
            scene.request("r")
            assert scene.instances()["m-1"]["in_flight"] == 1
            scene.end("r")

    run(story())


def test_a_process_that_ignores_sigterm_is_killed_with_its_group(state: Path) -> None:
    deaf = f"""
  - name: deaf
    model: deaf
    engine: {{type: command, parameters: {{command: [sh, -c, "trap '' TERM; echo {{port}}; sleep 600 & wait; wait"]}}}}
{LIFECYCLE.replace("stopGrace: 2s", "stopGrace: 200ms")}"""

    async def story() -> None:
        async with running(state, manifest(deaf)) as scene:
            await scene.until(lambda: len(group(scene.pids().get("deaf-1", 0))) == 2, "both of them")
            await scene.until(lambda: len(tail(log_file(state, "deaf-1"), 9).splitlines()) > 1, "its first word")
            family = group(scene.pids()["deaf-1"])
        assert not any(map(is_alive, family))
        assert "signal 9" in await scene.plane.instances.logs("deaf-1")

    run(story())


# Changes


def test_applying_changes_only_what_differs(state: Path) -> None:
    one = manifest(simulated("a"), simulated("b"))
    two = manifest(simulated("a", replicas=2), simulated("c"), more="gateway: {listen: '127.0.0.1:0'}\n")

    async def story() -> None:
        async with running(state, one) as scene:
            await scene.until_ready("a-1", "b-1")
            pids = scene.pids()
            assert not await scene.plane.documents.apply(one)
            assert scene.plane.documents.generation == 1
            planned = scene.plane.documents.plan(two)
            assert scene.plane.documents.plan(one).steps == ()  # planning has changed nothing
            made = await scene.plane.documents.apply(two)
            assert made == planned
            assert [(step.what, step.subject) for step in made.steps] == [
                ("close", "b"), ("open", "c"), ("stop", "b-1"), ("start", "a-2"), ("start", "c-1"),
                ("gateway", "gateway.listen"),
            ]  # fmt: skip
            assert str(made.steps[-1].why) == "127.0.0.1:8080 -> 127.0.0.1:0; takes effect after a restart"
            await scene.until_ready("a-1", "a-2", "c-1")
            await scene.until(lambda: "b-1" not in scene.instances(), "the end of b-1")
            assert scene.pids()["a-1"] == pids["a-1"]
            assert not is_alive(pids["b-1"])
            assert scene.plane.documents.generation == 2
        assert stored_manifest(state) == two

    run(story())


def test_a_bad_manifest_changes_nothing_and_reports_all_problems(state: Path) -> None:
    good = manifest(simulated())
    bad = ManifestText(good.text.replace("replicas: 1", "replicas: many").replace("simulated", "simulatd"), "/", "x")

    async def story() -> None:
        async with running(state, good) as scene:
            await scene.until_ready("m-1")
            pids = scene.pids()
            for attempt in (scene.plane.documents.apply(bad), asyncio.to_thread(scene.plane.documents.plan, bad)):
                with pytest.raises(ConfigError) as found:
                    await attempt
                assert len(found.value.problems) == 2
            assert scene.pids() == pids
            assert scene.plane.documents.generation == 1
            assert not scene.plane.documents.plan(good)

    run(story())


def test_a_bad_manifest_at_the_start_leaves_the_directory_free(state: Path) -> None:
    async def story() -> None:
        scene = stage(state)
        with pytest.raises(PointsmanError, match="nothing was ever applied"):
            await scene.plane.start()
        with pytest.raises(ConfigError):
            await scene.plane.start(ManifestText("deployments: 7", "/"))
        async with running(state, manifest(simulated())) as other:
            await other.until_ready("m-1")

    run(story())


def test_a_plane_that_does_not_run_changes_nothing(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            plane = scene.plane
            await scene.until_ready("m-1")
            stopping = asyncio.gather(plane.stop(), plane.stop())
            await asyncio.sleep(0)
            with pytest.raises(PointsmanError, match="being stopped"):
                await plane.documents.apply(manifest(simulated("other")))
            await stopping
        with pytest.raises(PointsmanError, match="not running"):
            await plane.documents.apply(manifest(simulated("other")))
        assert stored_manifest(state) == manifest(simulated())

    run(story())


def test_requests_in_flight_end_before_their_instance_is_stopped(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated("a"), simulated("b"))) as scene:
            await scene.until_ready("a-1", "b-1")
            pid = scene.pids()["b-1"]
            scene.request("r", "b")
            assert scene.carrier.sent[0].decision.target_instance_id == "b-1"
            await scene.plane.documents.apply(manifest(simulated("a")))
            await scene.until(lambda: scene.instances()["b-1"]["phase"] == "draining", "draining")
            await asyncio.sleep(0.2)
            assert is_alive(pid)
            scene.end("r", "b")
            await eventually(lambda: not is_alive(pid))

    run(story())


def test_a_drained_instance_is_replaced_first(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            await scene.until_ready("m-1")
            scene.plane.control.drain("m-1")
            await scene.until_ready("m-2")
            with pytest.raises(UnknownName):
                scene.plane.control.drain("unknown")

    run(story())


# External servers


def test_endpoints_of_a_watched_file_come_and_go(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    watching = f"""
  - name: outside
    model: m
    endpointsFile: {file}
{LIFECYCLE}"""

    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            await scene.until_ready("m-1")
            url = scene.instances()["m-1"]["url"]
            async with running(tmp_path / "other", manifest(watching)) as other:
                assert other.plane.status()["problems"]  # it is not there yet
                file.write_text(f"- {{url: '{url}', name: here, engine: simulated}}\n")
                await other.until_ready("here")
                assert other.plane.status()["problems"] == []
                await other.until(lambda: other.instances()["here"]["metrics_age_s"] is not None, "its metrics")
                assert other.pids() == {}
                with pytest.raises(PointsmanError, match="that this plane did not start"):
                    await other.plane.instances.logs("here")
                file.write_text("- {url: nonsense}\n")
                await other.until(lambda: other.plane.status()["problems"], "a problem")
                assert "expected http://host:port" in other.plane.status()["problems"][0]["text"]
                assert other.ready() == {"here"}
                file.write_text("[]\n")
                await other.until(lambda: other.instances() == {}, "no instances")
                assert other.plane.status()["problems"] == []
            assert scene.ready() == {"m-1"}

    run(story())
