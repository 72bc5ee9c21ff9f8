"""The Ray runtime on three nodes: places as the placer says; nodes and planes die, and requests are served.

One test with many steps, because a cluster takes long to start and each step needs what the one before has left.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

import pointsman as pm
from bench.chaos.clients import Verdict
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import LIFECYCLE, llama, manifest, simulated
from tests.live.ray_clusters import HOSTS, LONG_S, LiveCluster, family
from tests.live.test_recovery import free_port, has_served

pytest.importorskip("ray")
GPU = {"resources": {"gpus": 1, "gpuMemory": "6Gi"}}
PATIENT = {**LIFECYCLE, "probeTimeout": "2s"}
CLIENTS = 4
IN_TIME_S = 1.5
"""A keeper that is back by then renews leases before they end."""
TAKEN_OUT_S = 1.0
NOTICED_S = {"killed": 2.0, "frozen": 5.0}


@pytest.mark.ray
def test_three_nodes(tmp_path: Path) -> None:
    began = time.monotonic()
    with LiveCluster(tmp_path) as cluster:
        print(f"\na cluster of {len(HOSTS)} nodes in {time.monotonic() - began:.1f} s")
        plane = LivePlane(tmp_path, patience_s=LONG_S)
        plane.environment |= cluster.environment
        plane.flags = ["--runtime", "ray", "--address", cluster.address, "--storage", str(tmp_path / "storage")]
        many = simulated("m", 3, lifecycle=PATIENT)
        placed = simulated("placed", 3, lifecycle=PATIENT, placement=GPU)
        try:
            front = {"nodes": [HOSTS[0], HOSTS[2]], "listen": f"node:{free_port()}"}
            up_s = plane.up(manifest(many, placed, llama("tiny", 2), llama("small", 1), **front))
            print(f"all ready in {up_s:.1f} s")
            stranger, second = a_stranger(cluster), a_second_plane(plane, cluster)
            gateways_are_on_their_nodes(plane, cluster)
            instances_are_where_the_placer_said_and_ray_knows(plane, cluster)
            with gpus_of_other_jobs_are_not_taken(plane, cluster):
                requests_reach_every_instance(plane)
            models_are_scaled_and_upgraded(plane, cluster)
            deploy_pipelines(plane)
            pipelines_run_across_nodes(plane)
            secrets_are_on_no_command_line(plane, cluster)
            assert "a plane runs on this cluster already" in second.communicate(timeout=LONG_S)[0], (
                "while the first lives"
            )
            assert "Failed to connect" in stranger.communicate(timeout=LONG_S)[0], "without the token"
            a_plane_killed_under_load_is_adopted_on_another_node(plane, cluster, HOSTS[1])
            pipelines_run_across_nodes(plane)
            a_plane_killed_under_load_is_adopted_on_another_node(plane, cluster, HOSTS[0], with_keeper=True)
            a_partitioned_supervisor_ends_its_engines_before_others_start(plane, cluster)
            a_node_is_lost_under_load_without_losing_requests("killed", plane, cluster)
            two_are_placed(plane)  # the node that is left has two GPUs
            a_node_is_lost_under_load_without_losing_requests("frozen", plane, cluster)
        finally:
            plane.close()
        assert cluster.processes("pointsman.simulator") == {}
        assert cluster.processes("machine.supervisor") == {}
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


class Ends:
    """When processes end: the kernel tells, so that only the wait for a core makes it late."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.at: dict[str, float] = {}
        """By name, by the clock since the machine was booted."""
        for name, pid in pids.items():
            threading.Thread(target=self._watch, args=(name, os.pidfd_open(pid)), daemon=True).start()

    def _watch(self, name: str, process: int) -> None:
        select.select([process], [], [])
        self.at[name] = boot_clock()
        os.close(process)


def watch_replacement(plane: LivePlane, lost: dict[str, int], ends: Ends) -> None:
    """Wait until engines that are lost have ended, and others run in their place."""

    def is_done() -> bool:
        known = plane.instances()
        there = [known[name]["phase"] == "ready" and int(known[name]["process"] or 0) != lost[name] for name in lost]
        return len(ends.at) == len(lost) and all(there)

    plane.until(is_done, f"others in place of {lost}")


def assert_owned_once(plane: LivePlane, ends: Ends, lateness: "Lateness") -> None:
    after = plane.pids()
    for name, at in ends.at.items():
        assert began(after[name]) > at - 0.1 - lateness.longest_s, f"{name} was owned twice"


class Lateness:
    """How long threads of this machine wait for a core: a second of a quiet machine becomes several."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        at = time.monotonic()
        while not self._ended.wait(0.02):
            now = time.monotonic()
            self.longest_s, at = max(self.longest_s, now - at - 0.02), now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


class Noticed(NamedTuple):
    """Seconds until a node that dies is noticed."""

    taken_out: float
    """Until none of its instances gets new requests."""
    by_ray: float


def watch_notice(plane: LivePlane, cluster: LiveCluster, host: str, lost: Collection[str], since: float) -> Noticed:
    taken_out: list[float] = []
    by_ray: list[float] = []

    def is_noticed() -> bool:
        if not taken_out and not any(plane.instances()[name]["phase"] == "ready" for name in lost):
            taken_out.append(time.monotonic() - since)
        if not by_ray and host not in cluster.ask("alive"):
            by_ray.append(time.monotonic() - since)
        return bool(taken_out and by_ray)

    plane.until(is_noticed, f"the loss of {host} is noticed")
    return Noticed(taken_out[0], by_ray[0])


def instances_are_where_the_placer_said_and_ray_knows(plane: LivePlane, cluster: LiveCluster) -> None:
    plane.until(lambda: all(one["answers"] for one in plane.status()["workers"]), "an answer of each node")
    instances, booked = plane.instances(), cluster.bookings()
    assert {one["name"]: one["gpus"] for one in plane.status()["workers"]} == dict.fromkeys(HOSTS, 2)
    placed = [name for name in instances if name.startswith("placed-")]
    assert set(booked) == {*placed, "tiny-1", "tiny-2", "small-1"}
    for name in placed:
        [(host, bundle)] = booked[name]
        assert str(instances[name]["place"]).startswith(f"{host}: gpu")
        assert host_of(plane, name) == host
        assert bundle["GPU"] == 0.75, "6 of 8 GiB"
    assert {host_of(plane, f"m-{number}") for number in (1, 2, 3)} == set(HOSTS), "spread over the nodes"
    assert "started as process" in plane.pointsman("logs", "placed-1").stdout


def requests_reach_every_instance(plane: LivePlane) -> None:
    with httpx.Client(base_url=plane.url, timeout=30) as client, ThreadPoolExecutor(8) as pool:
        for one in plane.status()["deployments"]:
            if any(instance["phase"] == "ready" for instance in one["instances"]):
                every_instance_serves(plane, client, pool, one["name"])


def every_instance_serves(plane: LivePlane, client: httpx.Client, pool: ThreadPoolExecutor, model: str) -> None:
    left = set(plane.pids(model))

    def serve(number: int) -> None:
        body = {"model": model, "prompt": f"{number} times def ", "max_tokens": 8}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        left.discard(answer.headers["x-pointsman-instance"])

    plane.until(lambda: list(pool.map(serve, range(8))) and not left, f"requests on each instance of {model}")


def models_are_scaled_and_upgraded(plane: LivePlane, cluster: LiveCluster) -> None:
    document, before = json.loads((plane.folder / "manifest.yaml").read_text()), plane.pids()
    for one in document["deployments"]:
        if one["name"] == "tiny":
            one["replicas"] = 3
        elif one["name"] == "small":
            one["engine"]["parameters"]["contextTokens"] = 128
    assert plane.pointsman("apply", plane.write(json.dumps(document)), "--no-wait", "--yes").returncode == 0
    plane.until(lambda: plane.is_settled() and "tiny-3" in plane.pids(), "a third of tiny")
    plane.until(lambda: before["small-1"] not in plane.pids().values() and len(plane.pids("small")) == 1, "small again")
    after, changed = plane.pids(), {"small-1"}
    assert {name: after[name] for name in before.keys() - changed} == {
        name: pid for name, pid in before.items() if name not in changed
    }
    booked = {name for name in plane.instances() if not name.startswith("m-")}
    plane.until(lambda: set(cluster.bookings()) == booked, f"Ray has booked {booked}")


def a_stranger(cluster: LiveCluster) -> "subprocess.Popen[str]":
    """A program without the token of the cluster. It tries to connect for some time."""
    program = f"import ray; ray.init({cluster.address!r}, _node_ip_address={HOSTS[0]!r})"
    return started([sys.executable, "-c", program], cluster, RAY_AUTH_TOKEN="guessed" * 9)


def started(
    command: list[str], cluster: LiveCluster, folder: Path | None = None, **env: str
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **cluster.environment, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def two_are_placed(plane: LivePlane) -> None:
    document = json.loads((plane.folder / "manifest.yaml").read_text())
    for one in document["deployments"]:
        if one["name"] == "placed":
            one["replicas"] = 2
    assert plane.pointsman("apply", plane.write(json.dumps(document)), "--no-wait", "--yes").returncode == 0
    plane.until(lambda: plane.is_settled() and len(plane.instances("placed")) == 2, "one is stopped")


def secrets_are_on_no_command_line(plane: LivePlane, cluster: LiveCluster) -> None:
    commands = {**cluster.processes(), **plane.processes()}
    secrets = {cluster.environment["RAY_AUTH_TOKEN"]}
    for pid in commands:
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            secrets |= {one.partition("=")[2] for one in variables if one.startswith("POINTSMAN_SECRET=")}
    assert len(secrets) == 2, "of Ray, and of the plane"
    assert min(map(len, secrets)) > 30
    assert not [command for command in commands.values() if any(one in command for one in secrets)]
    for socket in plane.folder.glob(".local/state/pointsman/nodes/*/*/supervisor.sock"):
        assert socket.parent.stat().st_mode & 0o077 == 0, "only its user talks to a supervisor"


@contextmanager
def gpus_of_other_jobs_are_not_taken(plane: LivePlane, cluster: LiveCluster) -> Iterator[None]:
    """Meanwhile something else may be done: Ray has 5 s to book."""
    first = (plane.folder / "manifest.yaml").read_text()
    document = json.loads(first)
    document["deployments"].append(simulated("late", 1, placement={**GPU, "workers": [HOSTS[0]]}))
    assert cluster.ask("use", HOSTS[0])[0] >= 1
    assert plane.pointsman("apply", plane.write(json.dumps(document)), "--no-wait").returncode == 0
    yield
    plane.until(lambda: "Ray does not have" in str(plane.instances()["late-1"]["reason"]), "the reason")
    assert plane.instances()["late-1"]["restarts"] == 0, "it is not its fault"
    cluster.ask("free")
    plane.until(plane.is_settled, "late-1, once the other job is gone")
    assert plane.pointsman("apply", plane.write(first), "--no-wait", "--yes").returncode == 0
    plane.until(lambda: "late-1" not in plane.instances() and "late-1" not in cluster.bookings(), "late-1 is gone")


def with_input(method: Any) -> Any:
    with pm.InputNode() as given:
        return method.bind(given)


def deploy_pipelines(plane: LivePlane) -> None:
    roots = {
        "diamond": nodes.diamond(),
        "delegates": nodes.Delegates.bind(nodes.Arrays.bind()),
        "calls": nodes.Caller.bind(pm.model("tiny")),
        "words": with_input(nodes.Streamer.bind().words),
        "late": with_input(nodes.Slow.bind().sleep),
    }
    for name, root in roots.items():
        text = pm.build(root, name=name, folder=plane.folder).to_yaml()
        plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
    plane.until(plane.is_settled, "replicas are ready")
    replicas = [name for name in plane.instances() if name.startswith(("diamond", "delegates"))]
    assert len({host_of(plane, name) for name in replicas}) > 1, "on several nodes"


def pipelines_run_across_nodes(plane: LivePlane) -> None:
    with httpx.Client(base_url=plane.url, timeout=30) as client:
        plane.until(lambda: client.post("/calls", json="def ").status_code == 200, "the gateway knows the last of them")
        assert client.post("/diamond", json=[1, 2, 3]).json() == 8
        assert client.post("/delegates", json=1_000_000).json() == 499999500000.0 + 1.0, "8 MB, to and fro"
        plain, streamed = client.post("/calls", json="def ").json()
        assert plain == streamed != ""
        assert client.post("/words", json="a b c").text == "a b c "
        late = client.post("/late", json=30, headers={"x-pointsman-deadline-ms": "150"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        plane.until(
            lambda: plane.instances("late.slow")["late.slow-1"]["in_flight"] == 0, "the late call was cancelled"
        )
    [gateway] = {file.read_text() for file in plane.folder.glob(".local/state/pointsman/nodes/*/*/gateway")}

    def known() -> set[str]:
        return {file.read_text() for file in plane.folder.glob(".local/state/pointsman/nodes/*/*/gateways")}

    plane.until(lambda: [len(one.split()) for one in known()] == [2], "every node knows both gateways")
    [gateways] = known()
    for address in (gateway, *gateways.split()):
        with httpx.Client(base_url=f"http://{address}") as stranger:
            assert stranger.post("/pipelines/call", content=b"x").status_code == 403, "without the secret"
            assert stranger.post("/diamond", json=[1, 2, 3]).status_code == 403
            assert stranger.post("/v1/completions", json={"model": "m", "prompt": "x"}).status_code == 403
            assert stranger.get("/admin/v1/status").status_code in (403, 404)


def a_second_plane(plane: LivePlane, cluster: LiveCluster) -> "subprocess.Popen[str]":
    """It waits some time for the first one to be gone."""
    folder = plane.folder / "other"
    folder.mkdir()
    (folder / "manifest.yaml").write_text(manifest(simulated("x", 1)))
    command = [*plane.program, "up", "manifest.yaml", "--runtime", "ray", "--address", cluster.address]
    return started([*command, "--state", "state"], cluster, folder)


def gateways_are_on_their_nodes(plane: LivePlane, cluster: LiveCluster) -> None:
    plane.until(lambda: all(one["connected"] and one["url"] for one in plane.status()["gateways"]), "two gateways")
    for one in plane.status()["gateways"]:
        assert urlsplit(one["url"]).hostname == one["worker"], "each listens at the address of its node"
        assert one["pid"] in {pid for top in supervisors(cluster, one["worker"]) for pid in family(top)}
        command = Path(f"/proc/{one['pid']}/cmdline").read_text()
        assert "gateway.process" in command
        assert "secret" not in command.lower()


def a_plane_killed_under_load_is_adopted_on_another_node(
    plane: LivePlane, cluster: LiveCluster, host: str, *, with_keeper: bool = False
) -> None:
    """`with_keeper`: the keeper is killed too, and reads its checkpoint."""
    before, status = plane.pids(), plane.status()
    assert len(before) == len(plane.instances())
    pids, url = {one["name"]: one["pid"] for one in status["gateways"]}, plane.url
    with Load(plane.url, ["m", "placed"], clients=CLIENTS) as load, Lateness() as lateness:
        plane.until(lambda: load.verdicts()["served"] > 20, "load")
        plane.kill()
        killed_at = time.monotonic()
        keeper_s = kill_the_keeper(plane, cluster) if with_keeper else 0.0
        plane.until(lambda: has_served(load, killed_at + 1.0), "served without a plane")
        handled = [httpx.post(f"{url}/delegates", json=1000, timeout=30).status_code for _ in range(6)]
        plane.flags = [*plane.flags[:6], "--host", host]
        plane.move(plane.folder / f"state-of-{host}")  # another node has nothing of its own
        up_s = plane.up()
        plane.until(lambda: all(one["connected"] for one in plane.status()["gateways"]), "gateways adopted")
        adopted_s = time.monotonic() - killed_at
        after = load.verdicts()["served"]
        plane.until(lambda: load.verdicts()["served"] > after + 20, "load goes on")
    print(
        f"\nkill -9 of the plane{f' and the keeper, back after {keeper_s:.1f} s' * with_keeper}: all ready {up_s:.1f} s"
        f" after a start on {host}, adopted {adopted_s:.1f} s after the kill; at the gateways: {dict(load.verdicts())}"
    )
    now = plane.status()
    assert now["ray"]["epoch"] > status["ray"]["epoch"]
    assert now["generation"] == status["generation"]
    last = load.samples[-1].request.request_id
    assert plane.admin.get("requests", last)["state"] == "served"
    assert {one["name"]: one["pid"] for one in now["gateways"]} == pids, "no gateway was restarted"
    if max(keeper_s, lateness.longest_s) > IN_TIME_S:
        return  # the leases of engines may have ended meanwhile, and they are new
    assert load.unexpected() == [], "no request fails at the gateways"
    assert handled == [200] * 6, "nor a call through a handle"
    assert plane.pids() == before, "no instance was restarted"


def kill_the_keeper(plane: LivePlane, cluster: LiveCluster) -> float:
    """Seconds until Ray has started it again."""
    [keeper] = cluster.processes("ray::Keeper")
    os.kill(keeper, signal.SIGKILL)
    began = time.monotonic()
    plane.until(lambda: cluster.processes("ray::Keeper").keys() - {keeper}, "another keeper")
    return time.monotonic() - began


def a_partitioned_supervisor_ends_its_engines_before_others_start(plane: LivePlane, cluster: LiveCluster) -> None:
    host = HOSTS[0]
    lost = engines_on(plane, host)
    assert lost
    agents = [pid for pid in family(cluster.raylet(host)) if "NodeAgent" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(agents) == 1
    ends, since = Ends(lost), time.monotonic()
    os.kill(agents[0], signal.SIGSTOP)
    try:
        with Lateness() as lateness:
            watch_replacement(plane, lost, ends)
    finally:
        os.kill(agents[0], signal.SIGCONT)
    assert_owned_once(plane, ends, lateness)
    print(f"\na node that does not hear the plane: others ready after {time.monotonic() - since:.1f} s")
    plane.until(lambda: all(one["answers"] for one in plane.status()["workers"]), "the node is back")


def a_node_is_lost_under_load_without_losing_requests(how: str, plane: LivePlane, cluster: LiveCluster) -> None:
    host = HOSTS[2] if how == "killed" else HOSTS[1]
    lost = engines_on(plane, host)
    assert lost
    raylet = cluster.raylet(host)
    everything = family(raylet)
    with Load(plane.url, ["m", "placed"], clients=CLIENTS) as load:
        plane.until(lambda: load.verdicts()["served"] > 20, "load")
        ends, since = Ends(lost), time.monotonic()
        if how == "killed":
            os.kill(raylet, signal.SIGKILL)
        else:
            for pid in (*everything, *(one for top in supervisors(cluster, host) for one in family(top))):
                os.kill(pid, signal.SIGSTOP)
        with Lateness() as lateness:
            noticed = watch_notice(plane, cluster, host, lost, since)
            out_at = time.monotonic()
            watch_replacement(plane, lost, ends)
        after = load.verdicts()["served"]
        plane.until(lambda: load.verdicts()["served"] > after + 20, "load goes on")
    print(
        f"\na node was {how}: its instances were taken out after {noticed.taken_out:.2f} s, Ray dropped it after "
        f"{noticed.by_ray:.2f} s, others in place of {sorted(lost)} ready after {time.monotonic() - since:.1f} s; "
        f"{dict(load.verdicts())}; threads of this test were woken up to {lateness.longest_s:.2f} s late"
    )
    assert load.unexpected(Verdict.INTERRUPTED) == [], "only streams that had begun are interrupted"
    assert_owned_once(plane, ends, lateness)
    new_at = min(began(plane.pids()[name]) for name in lost) - boot_clock() + time.monotonic()
    late = [one for one in load.samples if one.instance in lost and out_at + 0.2 < one.began and one.ended < new_at]
    assert late == [], "nothing is sent to instances that were taken out"
    slack_s = 1.0 + 5 * lateness.longest_s
    assert noticed.taken_out < TAKEN_OUT_S + slack_s
    assert noticed.by_ray < NOTICED_S[how] + slack_s
    if how == "frozen":
        for pid in everything:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def supervisors(cluster: LiveCluster, host: str) -> list[int]:
    return list(cluster.processes(f"/{host}/supervisor.sock"))


def listening(pids: Collection[int]) -> set[str]:
    """Addresses at which processes listen for TCP, as in /proc: hexadecimal."""
    inodes: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            inodes |= {str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {one[1].partition(":")[0] for one in lines if one[3] == "0A" and f"socket:[{one[9]}]" in inodes}


@pytest.mark.ray
def test_one_word_starts_a_cluster_of_its_own_on_loopback(tmp_path: Path) -> None:
    plane = LivePlane(tmp_path, patience_s=LONG_S)
    plane.environment |= {"HOME": str(tmp_path)}
    try:
        plane.up(json.dumps({**json.loads(manifest(simulated("m", 1))), "runtime": "ray"}))
        requests_reach_every_instance(plane)
        niceness = {os.getpriority(os.PRIO_PROCESS, pid) for pid in plane.pids().values()}
        assert niceness == {os.getpriority(os.PRIO_PROCESS, 0)}, "engines have the priority of the plane"
        found = listening(plane.processes())
        assert any("raylet" in command for command in plane.processes().values())
        assert found
        assert found <= {"0100007F", "0000000000000000FFFF00000100007F"}, "127.0.0.1 only"
        assert plane.stop() == 0
    finally:
        plane.close()
