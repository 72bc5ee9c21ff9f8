"""The Ray runtime on three nodes: places as the placer says; nodes and planes die, and requests are served.

One test with many steps, because a cluster takes long to start and each step needs what the one before has left.
"""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

import pointsman as pm
from bench.chaos.clients import Verdict
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import LIFECYCLE, llama, manifest, simulated
from tests.live.ray_clusters import HOSTS, LiveCluster, family
from tests.live.test_recovery import free_port, has_served

pytest.importorskip("ray")
GPU = {"resources": {"gpus": 1, "gpuMemory": "6Gi"}}
PATIENT = {**LIFECYCLE, "probeTimeout": "2s"}
CLIENTS = 4


@pytest.mark.ray
def test_three_nodes(tmp_path: Path) -> None:
    began = time.monotonic()
    with LiveCluster(tmp_path) as cluster:
        print(f"\na cluster of {len(HOSTS)} nodes in {time.monotonic() - began:.1f} s")
        plane = LivePlane(tmp_path)
        plane.environment |= cluster.environment
        plane.flags = ["--runtime", "ray", "--address", cluster.address, "--storage", str(tmp_path / "storage")]
        many = simulated("m", 3, lifecycle=PATIENT)
        placed = simulated("placed", 3, lifecycle=PATIENT, placement=GPU)
        try:
            up_s = plane.up(manifest(many, placed, llama("tiny", 2), listen=f"127.0.0.1:{free_port()}"))
            print(f"all ready in {up_s:.1f} s")
            instances_are_where_the_placer_said_and_ray_knows(plane, cluster)
            gpus_of_other_jobs_are_not_taken(plane, cluster)
            a_second_plane_is_refused(plane, cluster)
            deploy_pipelines(plane)
            pipelines_run_across_nodes(plane)
            a_killed_plane_adopts_everything(plane)
            pipelines_run_across_nodes(plane)
            a_partitioned_supervisor_ends_its_engines_before_others_start(plane, cluster)
            a_node_is_lost_under_load_without_losing_requests("killed", plane, cluster)
            a_node_is_lost_under_load_without_losing_requests("frozen", plane, cluster)
        finally:
            plane.close()
        assert cluster.processes("pointsman.simulator") == {}
        assert cluster.processes("supervisor.py") == {}
        assert cluster.bookings() == {}
        assert cluster.close() == {}, "processes that outlived the cluster"
    print(f"in all {time.monotonic() - began:.0f} s")


def host_of(plane: LivePlane, name: str) -> str:
    return str(urlsplit(plane.instances()[name]["url"]).hostname)


def engines_on(plane: LivePlane, host: str) -> dict[str, int]:
    there = {name: one for name, one in plane.instances().items() if urlsplit(one["url"]).hostname == host}
    return {name: int(one["process"]) for name, one in there.items() if one["process"] is not None}


def began(pid: int) -> float:
    """When a process was started, by the clock since the machine was booted."""
    ticks = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def boot_clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def watch_replacement(plane: LivePlane, lost: dict[str, int]) -> tuple[dict[str, float], float]:
    """Wait until engines that are lost have ended and others run in their place. When each ended, at the latest; and
    how long that took."""
    ended: dict[str, float] = {}
    since = boot_clock()

    def is_done() -> bool:
        for name, pid in lost.items():
            if name not in ended and not is_running(pid):
                ended[name] = boot_clock()
        known = plane.instances()
        there = [known[name]["phase"] == "ready" and int(known[name]["process"] or 0) != lost[name] for name in lost]
        return len(ended) == len(lost) and all(there)

    plane.until(is_done, f"others in place of {lost}")
    return ended, boot_clock() - since


def is_running(pid: int) -> bool:
    """Whether a process lives, and is not frozen."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X", b"T")
    except OSError:
        return False


def instances_are_where_the_placer_said_and_ray_knows(plane: LivePlane, cluster: LiveCluster) -> None:
    plane.until(lambda: all(one["answers"] for one in plane.status()["workers"]), "an answer of each node")
    instances, booked = plane.instances(), cluster.bookings()
    assert {one["name"]: one["gpus"] for one in plane.status()["workers"]} == dict.fromkeys(HOSTS, 2)
    placed = [name for name in instances if name.startswith("placed-")]
    assert set(booked) == {*placed, *(name for name in instances if name.startswith("tiny-"))}
    for name in placed:
        [(host, bundle)] = booked[name]
        assert str(instances[name]["place"]).startswith(f"{host}: gpu")
        assert host_of(plane, name) == host
        assert bundle["GPU"] == 0.75, "6 of 8 GiB"
    assert {host_of(plane, f"m-{number}") for number in (1, 2, 3)} == set(HOSTS), "spread over the nodes"
    assert "started as process" in plane.pointsman("logs", "placed-1").stdout


def gpus_of_other_jobs_are_not_taken(plane: LivePlane, cluster: LiveCluster) -> None:
    first = (plane.folder / "manifest.yaml").read_text()
    document = json.loads(first)
    document["deployments"].append(simulated("late", 1, placement={**GPU, "workers": [HOSTS[0]]}))
    assert cluster.ask("use", HOSTS[0])[0] >= 1
    assert plane.pointsman("apply", plane.write(json.dumps(document)), "--no-wait").returncode == 0
    plane.until(lambda: "Ray does not have" in str(plane.instances()["late-1"]["reason"]), "the reason")
    assert plane.instances()["late-1"]["restarts"] == 0, "it is not its fault"
    cluster.ask("free")
    plane.until(plane.is_settled, "late-1, once the other job is gone")
    assert plane.pointsman("apply", plane.write(first), "--no-wait", "--yes").returncode == 0
    plane.until(lambda: "late-1" not in plane.instances() and "late-1" not in cluster.bookings(), "late-1 is gone")


def deploy_pipelines(plane: LivePlane) -> None:
    roots = {
        "diamond": nodes.diamond(),
        "delegates": nodes.Delegates.bind(nodes.Arrays.bind()),
        "calls": nodes.Caller.bind(pm.model("tiny")),
    }
    for name, root in roots.items():
        text = pm.build(root, name=name, folder=plane.folder).to_yaml()
        plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
    plane.until(plane.is_settled, "replicas are ready")
    replicas = [name for name in plane.instances() if name.startswith(("diamond", "delegates"))]
    assert len({host_of(plane, name) for name in replicas}) > 1, "on several nodes"


def pipelines_run_across_nodes(plane: LivePlane) -> None:
    with httpx.Client(base_url=plane.url, timeout=30) as client:
        assert client.post("/diamond", json=[1, 2, 3]).json() == 8
        assert client.post("/delegates", json=1_000_000).json() == 499999500000.0 + 1.0, "8 MB, to and fro"
        plain, streamed = client.post("/calls", json="def ").json()
        assert plain == streamed != ""
    [gateway] = {file.read_text() for file in plane.folder.glob(".local/state/pointsman/nodes/*/*/gateway")}
    with httpx.Client(base_url=f"http://{gateway}") as stranger:
        assert stranger.post("/pipelines/call", content=b"x").status_code == 403, "without the secret"
        assert stranger.post("/diamond", json=[1, 2, 3]).status_code == 403
        assert stranger.post("/v1/completions", json={"model": "m", "prompt": "x"}).status_code == 403
        assert stranger.get("/admin/v1/status").status_code in (403, 404)


def a_second_plane_is_refused(plane: LivePlane, cluster: LiveCluster) -> None:
    other = LivePlane(plane.folder / "other")
    other.folder.mkdir()
    other.environment |= cluster.environment
    file = other.write(manifest(simulated("x", 1)))
    refused = other.pointsman("up", file, "--runtime", "ray", "--address", cluster.address)
    assert refused.returncode == 1
    assert "a plane runs on this cluster already" in refused.stderr, refused.stderr


def a_killed_plane_adopts_everything(plane: LivePlane) -> None:
    before, epoch = plane.pids(), plane.status()["ray"]["epoch"]
    assert len(before) == len(plane.instances())
    with Load(plane.url, ["m", "placed"], clients=CLIENTS) as load:
        plane.until(lambda: load.verdicts()["served"] > 20, "load")
        plane.kill()
        killed_at = time.monotonic()
        up_s = plane.up()
        plane.until(lambda: has_served(load, killed_at), "served again")
    print(f"\nkill -9 of the plane: all ready after {up_s:.1f} s; requests: {dict(load.verdicts())}")
    assert plane.pids() == before, "nothing was restarted"
    assert plane.status()["ray"]["epoch"] > epoch
    assert load.unexpected(Verdict.LOST, Verdict.UNREACHABLE) == [], "only what was in flight is lost"
    assert all(one.began <= killed_at for one in load.samples if one.verdict is Verdict.LOST)


def a_partitioned_supervisor_ends_its_engines_before_others_start(plane: LivePlane, cluster: LiveCluster) -> None:
    host = HOSTS[0]
    lost = engines_on(plane, host)
    assert lost
    agents = [pid for pid in family(cluster.raylet(host)) if "NodeAgent" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(agents) == 1
    os.kill(agents[0], signal.SIGSTOP)
    try:
        ended, took_s = watch_replacement(plane, lost)
    finally:
        os.kill(agents[0], signal.SIGCONT)
    for name, at in ended.items():
        assert began(plane.pids()[name]) > at - 0.1, f"{name} was owned twice"
    print(f"\na node that does not hear the plane: engines ended, others ready after {took_s:.1f} s")
    plane.until(lambda: all(one["answers"] for one in plane.status()["workers"]), "the node is back")


def a_node_is_lost_under_load_without_losing_requests(how: str, plane: LivePlane, cluster: LiveCluster) -> None:
    host = HOSTS[2] if how == "killed" else HOSTS[1]
    lost = engines_on(plane, host)
    assert lost
    raylet = cluster.raylet(host)
    everything = family(raylet)
    with Load(plane.url, ["m", "placed"], clients=CLIENTS) as load:
        plane.until(lambda: load.verdicts()["served"] > 20, "load")
        if how == "killed":
            os.kill(raylet, signal.SIGKILL)
        else:
            for pid in (*everything, *(one for top in supervisors(cluster, host) for one in family(top))):
                os.kill(pid, signal.SIGSTOP)
        ended, took_s = watch_replacement(plane, lost)
        after = load.verdicts()["served"]
        plane.until(lambda: load.verdicts()["served"] > after + 20, "load goes on")
    print(f"\na node was {how}: others in place of {sorted(lost)} after {took_s:.1f} s; {dict(load.verdicts())}")
    if how == "killed":
        assert all(began(plane.pids()[name]) > at - 0.1 for name, at in ended.items()), "owned twice"
    assert load.unexpected(Verdict.INTERRUPTED) == [], "only streams that had begun are interrupted"
    if how == "frozen":
        for pid in (*supervisors(cluster, host), *everything, *lost.values()):
            with suppress(ProcessLookupError):  # a thawed supervisor ends its engines at once
                os.kill(pid, signal.SIGCONT)
        plane.until(lambda: not any(map(is_running, lost.values())), "engines of the thawed node end")


def supervisors(cluster: LiveCluster, host: str) -> list[int]:
    return list(cluster.processes(f"/{host}/supervisor.sock"))
