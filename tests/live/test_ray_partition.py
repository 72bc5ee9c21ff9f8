"""Two machines as the kernel has them, each with a network of its own; the link between them stops passing packets.

Neither side is told: connections stay open and fall silent, as when a switch fails.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from pointsman.runtimes.ray.cluster import GPU_MEMORY_LABEL, HEALTH_CHECKS, PRIORITY
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import LIFECYCLE, manifest, simulated
from tests.live.ray_clusters import LONG_S, MARK, with_mark
from tests.live.test_ray import Ends, Lateness, began, boot_clock

pytest.importorskip("ray")
HERE, THERE = "10.78.0.1", "10.78.0.2"
GCS = f"{HERE}:6379"
GPU = {"resources": {"gpus": 1, "gpuMemory": "6Gi"}}
PATIENT = {**LIFECYCLE, "probeTimeout": "2s"}
REACHES = "import socket, sys; socket.create_connection((sys.argv[1], 6379), 1)"


class Network:
    """Two network namespaces of the kernel, and a pair of devices between them. They end with their processes."""

    def __init__(self) -> None:
        self._holders = [self._hold("--user", "--map-root-user", "--net")]
        self._holders.append(self._hold("--net", within=HERE))
        self.run(HERE, "ip", "link", "add", "wire", "type", "veth", "peer", "wire", "netns", str(self._holders[1].pid))
        for host in (HERE, THERE):
            self.run(host, "ip", "link", "set", "lo", "up")
            self.run(host, "ip", "address", "add", f"{host}/24", "dev", "wire")
            self.run(host, "ip", "link", "set", "wire", "up")

    def _hold(self, *kinds: str, within: str = "") -> "subprocess.Popen[str]":
        command = ["unshare", *kinds, "sh", "-c", "echo ready; exec cat"]
        command = self.at(within, *command) if within else command
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        return holder

    def at(self, host: str, *command: str) -> list[str]:
        """A command that runs on one of the machines."""
        holder = self._holders[(HERE, THERE).index(host)]
        return ["nsenter", "--target", str(holder.pid), "--user", "--preserve-credentials", "--net", *command]

    def run(self, host: str, *command: str) -> None:
        subprocess.run(self.at(host, *command), check=True, capture_output=True)

    def cut(self) -> None:
        """Drop every packet in both directions."""
        for host in (HERE, THERE):
            self.run(host, "tc", "qdisc", "add", "dev", "wire", "root", "pfifo", "limit", "0")

    def heal(self) -> None:
        for host in (HERE, THERE):
            self.run(host, "tc", "qdisc", "del", "dev", "wire", "root")

    def passes(self) -> bool:
        """Whether a new connection arrives."""
        command = self.at(THERE, sys.executable, "-c", REACHES, HERE)
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def close(self) -> None:
        for holder in reversed(self._holders):
            holder.communicate()


def why_not() -> str:
    """What this machine lacks; empty if nothing."""
    missing = [name for name in ("ip", "nsenter", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)} here"
    tried = "ip link add wire type veth peer other && tc qdisc add dev wire root pfifo limit 0"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", tried],
        check=False,
        capture_output=True,
        text=True,
    )
    return f"networks cannot be made here: {done.stderr.strip()}" if done.returncode else ""


class TwoMachines:
    """A Ray cluster as `ray start` makes it: a head here, a node there."""

    def __init__(self, folder: Path) -> None:
        self._mark, self.network = uuid4().hex, Network()
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        patience = {"RAY_raylet_start_wait_time_s": "180", "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment = {**HEALTH_CHECKS, **PRIORITY, **patience, **token, "HOME": str(folder), MARK: self._mark}
        self._log = folder / "ray.log"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, host: str) -> None:
        head = ["--head", "--port", "6379", "--include-dashboard", "false", "--temp-dir", f"/tmp/pp-{self._mark[:8]}"]
        joins = ["--address", GCS]
        labels, store = ["--labels", f"{GPU_MEMORY_LABEL}=8Gi"], ["--object-store-memory", str(80 * 2**20)]
        command = [str(Path(sys.executable).with_name("ray")), "start", *(head if host == HERE else joins)]
        command += ["--node-ip-address", host, "--num-cpus", "4", "--num-gpus", "2", *labels, *store, "--block"]
        with self._log.open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    self.network.at(host, *command),
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def processes(self, word: str = "") -> dict[int, str]:
        return with_mark(self._mark, word)

    def close(self) -> dict[int, str]:
        """End it. What our processes were that it has left."""
        for one in reversed(self._started):
            one.terminate()
        for one in self._started:
            with suppress(subprocess.TimeoutExpired):
                one.wait(LONG_S)
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in self._started:
            one.wait()
        self.network.close()
        shutil.rmtree(f"/tmp/pp-{self._mark[:8]}", ignore_errors=True)
        return {pid: command for pid, command in left.items() if "pointsman" in command}


@contextmanager
def two_machines(folder: Path) -> Iterator[TwoMachines]:
    made = TwoMachines(folder)
    try:
        made.start(HERE)
        made.start(THERE)
        yield made
    except BaseException:
        print(made._log.read_text(encoding="utf-8", errors="replace")[-4000:])
        raise
    finally:
        left = made.close()
    assert left == {}, "processes that outlived the cluster"


def by_host(plane: LivePlane) -> dict[str, dict[str, int]]:
    """Process ids of what runs, by host and instance."""
    found: dict[str, dict[str, int]] = {HERE: {}, THERE: {}}
    for name, one in plane.instances().items():
        if one["process"] is not None and one["url"]:
            found[str(urlsplit(one["url"]).hostname)][name] = int(one["process"])
    return found


def nodes_seen(plane: LivePlane) -> dict[str, bool]:
    """Which workers answer."""
    return {one["name"]: one["answers"] for one in plane.status()["workers"]} if plane.is_reachable() else {}


def answers(plane: LivePlane, machines: TwoMachines) -> bool:
    """Whether the pipeline answers at the gateway."""
    asks = "from urllib.request import *; import sys; print(urlopen(Request(sys.argv[1], b'[1, 2, 3]')).read())"
    command = machines.network.at(HERE, sys.executable, "-c", asks, f"{plane.url}/diamond")
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout == "b'8'\n"


def is_back(plane: LivePlane, machines: TwoMachines, raylets: dict[int, str]) -> bool:
    """Whether the node has what may run there only. A raylet that Ray has dropped ends: then start another."""
    if raylets and not raylets.keys() & machines.processes().keys():
        raylets.clear()
        machines.start(THERE)
    return "stays-1" in plane.pids()


def cut_off_and_back(plane: LivePlane, machines: TwoMachines) -> None:
    network, lost = machines.network, by_host(plane)[THERE]
    moved = lost.keys() - {"stays-1"}
    assert moved != lost.keys()
    assert any(name.startswith("diamond") for name in moved), "a part of the pipeline is there"
    plane.until(lambda: answers(plane, machines), "the pipeline answers")
    ends, since = Ends(lost), boot_clock()
    network.cut()
    assert not network.passes()
    with Lateness() as lateness:
        plane.until(lambda: len(ends.at) == len(lost), "what runs there ends by itself")
        plane.until(lambda: moved <= plane.pids().keys() and plane.instances()["stays-1"]["process"] is None, "others")
        now = {name: began(pid) for name, pid in by_host(plane)[HERE].items() if name in moved}
        assert now.keys() == moved, "they are here"
        plane.until(lambda: answers(plane, machines), "the pipeline answers without the node")
        raylets = machines.processes(f"--node_ip_address={THERE}")
        assert raylets
        network.heal()
        plane.until(network.passes, "packets arrive again")
        plane.until(lambda: is_back(plane, machines, raylets), "what may run there only")
    now["stays-1"] = began(plane.pids()["stays-1"])
    print(f"\nseconds after the link was cut; threads of this test were woken up to {lateness.longest_s:.2f} s late")
    for name, ended in sorted(ends.at.items()):
        print(f"{name}: ended {ended - since:.2f}, the next one began {now[name] - since:.2f}")
        assert now[name] > ended - 0.1 - lateness.longest_s, f"{name} was owned twice"
    assert plane.instances()["stays-1"]["place"].startswith(THERE), "the same GPU, after its last owner"
    plane.until(lambda: answers(plane, machines), "the pipeline answers")


@pytest.mark.ray
def test_what_a_node_owns_is_owned_once_when_the_network_is_cut(tmp_path: Path) -> None:
    if why := why_not():
        pytest.skip(why)
    with two_machines(tmp_path) as machines:
        plane = LivePlane(tmp_path, patience_s=LONG_S)
        plane.program = machines.network.at(HERE, *plane.program)
        plane.environment |= machines.environment
        plane.flags = ["--runtime", "ray", "--address", GCS, "--storage", str(tmp_path / "storage"), "--host", HERE]
        moves = simulated("moves", 2, lifecycle=PATIENT, placement=GPU)
        stays = simulated("stays", 1, lifecycle=PATIENT, placement={**GPU, "workers": [THERE]})
        try:
            plane.until(machines.network.passes, "the head listens")
            plane.up(manifest(simulated("m", 2, lifecycle=PATIENT), moves, stays), wait=False)
            plane.until(lambda: nodes_seen(plane) == {HERE: True, THERE: True}, "both nodes answer")
            text = pm.build(nodes.diamond(), name="diamond", folder=tmp_path).to_yaml()
            plane.admin.post("applications", body={"text": text, "folder": str(tmp_path)})
            plane.until(plane.is_settled, "all instances ready")
            cut_off_and_back(plane, machines)
        finally:
            plane.close()
