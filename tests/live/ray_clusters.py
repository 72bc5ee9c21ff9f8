"""A Ray cluster on this machine, in a process of its own: every node has an address and engines of its own."""

import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from pointsman.runtimes.ray.cluster import GPU_MEMORY_LABEL, HEALTH_CHECKS, PRIORITY

MARK = "POINTSMAN_RAY"
LONG_S = 180.0
"""Far longer than any step takes, on a machine with other things to do too."""
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
PROGRAM = """
import json, sys
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

hosts, label = json.loads(sys.argv[1]), sys.argv[2]
same = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 80 * 2**20, "labels": {label: "8Gi"}}
cluster = Cluster(True, head_node_args={"node_ip_address": hosts[0], "include_dashboard": False, **same})
nodes = {hosts[0]: cluster.head_node}
nodes |= {host: cluster.add_node(wait=False, node_ip_address=host, **same) for host in hosts[1:]}
cluster.wait_for_nodes()
ray.init(cluster.address, _node_ip_address=hosts[0], namespace="look", log_to_driver=False, configure_logging=False)
for line in sys.stdin:
    ask = line.split()
    if ask[0] == "nodes":
        pids = {host: node.all_processes["raylet"][0].process.pid for host, node in nodes.items()}
        said = {"address": cluster.address, "raylets": pids}
    elif ask[0] == "alive":
        said = [one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]]
    elif ask[0] == "use":
        used = [placement_group([{"GPU": 1, f"node:{ask[1]}": 0.001}])]
        while used[-1].wait(1):
            used.append(placement_group([{"GPU": 1, f"node:{ask[1]}": 0.001}]))
        remove_placement_group(used.pop())
        said = [len(used)]
    elif ask[0] == "free":
        for one in used:
            remove_placement_group(one)
        said = []
    else:
        hosts_by_id = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes()}
        said = {
            one["name"]: [[hosts_by_id[one["bundles_to_node_id"][at]], bundle] for at, bundle in one["bundles"].items()]
            for one in placement_group_table().values()
            if one["state"] == "CREATED" and one["name"]
        }
    print(json.dumps(said), flush=True)
ray.shutdown()
cluster.shutdown()
"""


class LiveCluster:
    """Three nodes with two GPUs each that do not exist. Ray asks everybody for a token."""

    def __init__(self, folder: Path, hosts: Sequence[str] = HOSTS) -> None:
        """`folder`: the home of its user, where the state of its nodes is. `hosts`: of its nodes."""
        self._lock = os.open(Path(tempfile.gettempdir()) / "pointsman-ray-cluster.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # one cluster at a time: a node needs its address for itself
        self._mark = uuid4().hex
        patience = {"RAY_raylet_start_wait_time_s": "180"}  # tests run beside others
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**HEALTH_CHECKS, **PRIORITY, **patience, **token, "HOME": str(folder), MARK: self._mark}
        self._log = folder / "cluster.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(hosts), GPU_MEMORY_LABEL],
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            self.address: str = self.ask("nodes")["address"]
        except BaseException:
            self.close()  # the next cluster waits for the lock
            raise

    def ask(self, *words: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(LONG_S, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(" ".join(words).encode() + b"\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith((b"{", b"[", b'"')):  # Ray prints, too
                    return json.loads(line)
        finally:
            late.cancel()
        log = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise AssertionError(f"the cluster has ended, or did not answer {words[0]!r} within {LONG_S:g} s:\n{log}")

    def raylet(self, host: str) -> int:
        pid: int = self.ask("nodes")["raylets"][host]
        return pid

    def bookings(self) -> dict[str, list[tuple[str, dict[str, float]]]]:
        """By instance: hosts, and what Ray has booked there."""
        booked: dict[str, list[tuple[str, dict[str, float]]]] = self.ask("bookings")
        return {name.removeprefix("pointsman-"): bundles for name, bundles in booked.items()}

    def processes(self, word: str = "") -> dict[int, str]:
        """Command lines of live processes of the cluster that have a word in them, by pid."""
        return with_mark(self._mark, word)

    def close(self) -> dict[int, str]:
        """End it. What our processes were that it has left."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return {}
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LONG_S)
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._lock)
        return {pid: command for pid, command in left.items() if "pointsman" in command}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def with_mark(mark: str, word: str = "") -> dict[int, str]:
    """Command lines of live processes with this mark that have a word in them, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if state not in (b"Z", b"X") and word in command:
                    found[int(folder.name)] = command
    return found


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
