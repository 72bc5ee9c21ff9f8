"""The runtime of a Ray cluster: `Runtime` of the interface, with Ray nodes as workers and the state in the cluster."""

import asyncio
import os
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from pointsman.config.plan import PointsmanPlan
from pointsman.control import InstanceStatus, Phase
from pointsman.control.desired import Address
from pointsman.control.events import Adopted, ControllerEvent, Exited, LaunchFailed
from pointsman.engines import LaunchSpec
from pointsman.errors import NotStored, PointsmanError
from pointsman.reasons import Reason
from pointsman.runtimes.gateways import is_gateway
from pointsman.runtimes.interface import LoadTable, ProcessOrder, Tell, Timer, Unsaved
from pointsman.runtimes.machine.gpu_usage import GPU_IDLE_S, VENDORS
from pointsman.runtimes.machine.launches import Launches
from pointsman.runtimes.machine.processes import InstanceEnded, WorkerReport
from pointsman.runtimes.machine.state_directory import SOCKET, AdminSocket, Lock, check_state
from pointsman.runtimes.machine.store import SqliteDocuments, SqliteTargets, SqliteUsage, Store, StoredProcess
from pointsman.runtimes.probes import HttpProbes
from pointsman.runtimes.ray.cluster import NoAnswer, NotBooked, RayCluster
from pointsman.runtimes.ray.links import Authority, NodeLink, NodeLinks
from pointsman.runtimes.tasks import LoopClock, Tasks
from pointsman.types import Worker
from pointsman.wire import FilesOfNodes

LEFT = "cluster.sqlite"
"""The file that a plane leaves in its folder when it ends everything, for a cluster without any state."""
ADOPT_S = 15.0
"""Maximum time for which a starting plane waits for its nodes. A node that answers later joins at that time."""
SAVE_S = 5.0
PUSH_RETRY_S = 1.0
NO_WORKER = "no worker answers now"


class ClusterState:
    """The store of the plane in memory, and its image at the keeper."""

    def __init__(self, image: bytes, cluster: RayCluster, authority: Authority) -> None:
        self.store = Store(Path("the state of the cluster"), image)
        self.problem: Reason | None = None
        self._cluster, self._authority = cluster, authority
        self._number = 0
        """The number of the last image. The keeper ignores an image that is older than its present image."""
        self._is_pushing = False
        self._changed = asyncio.Event()
        self.store.behind.written = self._changed.set
        self.store.documents.push = self._push_now
        self._changed.set()
        authority.retaken = self._changed.set

    @property
    def unsaved(self) -> int:
        return int(self._changed.is_set() or self._is_pushing)

    async def push(self) -> None:
        """Send the image after each change, forever."""
        while True:
            await self._changed.wait()
            self._changed.clear()  # before the image is taken: later writes are sent after it
            self._is_pushing = True
            try:
                await self.push_once()
                self.problem = None
            except PointsmanError as error:
                self._changed.set()
                self.problem = Reason("state-not-stored", {"error": str(error)})
                await asyncio.sleep(PUSH_RETRY_S)
            finally:
                self._is_pushing = False

    async def push_once(self) -> None:
        authority, image = self._authority, self.store.image()
        await authority.ask("save", authority.epoch, self._next(), image, authority.gateway, limit_s=SAVE_S)

    def _push_now(self) -> None:
        try:
            self._cluster.save_now(self._authority.epoch, self._next(), self.store.image())
        except NotStored:
            self._changed.set()  # send the present state again, even though the image may have arrived late
            raise

    def _next(self) -> int:
        self._number += 1
        return self._number


class ClusterReplicas:
    """`ReplicaAccess` of the interface. Nodes give their replicas the address of the gateway and the shared memory."""

    def __init__(self, authority: Authority, secret: str) -> None:
        self._authority = authority
        self.secret = secret
        self.memory = FilesOfNodes(secret)

    def introduce(self, launch: LaunchSpec, user_config: bytes) -> LaunchSpec:
        environment = {"POINTSMAN_SECRET": self.secret, "POINTSMAN_USER_CONFIG": user_config.decode()}
        return msgspec.structs.replace(launch, env={**launch.env, **environment})

    def reach_at(self, gateways: Sequence[str]) -> None:
        self._authority.calls = "\n".join(gateways)


class ClusterListener(AdminSocket):
    """`AdminListener` of the interface: a socket for operators on this machine, and an address for replicas on any."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._bound: socket.socket | None = None
        self._replicas: asyncio.AbstractServer | None = None

    def bind(self, host: str, before: str) -> str:
        """Take an address that other nodes reach: the address of the previous plane, if that ran on this node."""
        ports = [int(before.rpartition(":")[2])] if before.startswith(f"{host}:") else []
        for port in (*ports, 0):
            bound = socket.socket()
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind((host, port))
                break
            except OSError:
                bound.close()
                if not port:
                    raise
        self._bound = bound
        return f"{host}:{bound.getsockname()[1]}"

    async def listen(self, connect: Callable[[], Any], connect_replica: Callable[[], Any]) -> None:
        await super().listen(connect, connect_replica)
        loop = asyncio.get_running_loop()
        assert self._bound is not None, "bound when the runtime was opened"
        self._replicas = await loop.create_server(connect_replica, sock=self._bound)

    def close(self) -> None:
        super().close()
        if self._replicas is not None:
            self._replicas.close()
        elif self._bound is not None:
            self._bound.close()


class NodeGpus:
    """`GpuMeter` of the interface: nodes measure while a scaling policy needs it, and answer with their polls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.links: Mapping[str, NodeLink] = {}
        """Links by worker."""
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        """When the policy of each deployment last asked for the usage."""

    async def read(self, deployments: Collection[str], instances: Sequence[InstanceStatus]) -> None:
        """As long as this is called, nodes measure with each poll. The next call of a policy has the values."""
        now = self._clock()
        self._asked_at |= dict.fromkeys(deployments, now)
        self._asked_at = {name: at for name, at in self._asked_at.items() if now - at < GPU_IDLE_S}
        wanted = {gpu for one in instances if one.deployment in self._asked_at for gpu in _gpus_of(one)}
        for name, link in self.links.items():
            there = () if link.worker is None or link.last_node is None else link.last_node.worker(link.worker).gpus
            link.wanted_gpus = tuple(gpu for gpu in there if gpu.vendor in VENDORS and (name, gpu.index) in wanted)

    def of(self, deployments: Collection[str], instances: Iterable[InstanceStatus]) -> float | None:
        each = [self._busy(one) for one in instances if one.deployment in deployments]
        shares = [fmean(some) for some in each if some]
        return fmean(shares) if shares else None

    def _busy(self, instance: InstanceStatus) -> list[float]:
        known = [(self.links[worker].busy, index) for worker, index in _gpus_of(instance) if worker in self.links]
        return [busy[index] for busy, index in known if index in busy]

    def close(self) -> None:
        for link in self.links.values():
            link.wanted_gpus = ()


def _gpus_of(instance: InstanceStatus) -> list[tuple[str, int]]:
    """(worker, index) of an instance's GPUs; empty while it starts, because loading a model is not load."""
    if instance.place is None or instance.phase is not Phase.READY:
        return []
    return list(instance.place.gpus)


class NodeStarts:
    """Carries orders out on nodes: books a place with Ray, chooses a port, and starts the process."""

    def __init__(self, launches: Launches, cluster: RayCluster, authority: Authority, tell: Tell, tasks: Tasks) -> None:
        self.nodes: NodeLinks
        """Set before anything is started."""
        self._launches, self._cluster, self._authority = launches, cluster, authority
        self._tell, self._tasks = tell, tasks
        self._under_way: dict[str, Timer] = {}
        """Orders that are not known to a node yet."""

    def launch(self, order: ProcessOrder) -> None:
        name = order.instance_id
        link = self._link_for(order)
        if link is None:
            known = ", ".join(sorted(one.name for one in self.nodes.up()))
            why = f"the worker {order.worker} does not answer; those that do: {known}" if order.worker else NO_WORKER
            self._tell(LaunchFailed(name, why, "workers"))
            return
        link.instances.add(name)
        self._under_way[name] = self._tasks.complete("launches", lambda: self._launch(order, link))

    async def _launch(self, order: ProcessOrder, link: NodeLink) -> None:
        name = order.instance_id
        await self._authority.certain()
        if name not in link.instances:
            del self._under_way[name]
            return  # the worker of the instance was lost, which was reported
        try:
            if order.place is not None:
                nodes = {one.name: one.last_node for one in self.nodes.links.values() if one.last_node is not None}
                await self._cluster.bookings.book(name, order.place, nodes)
            assert link.last_node is not None, "it has answered"
            port = await link.ask("reserve", name)
            start = self._launches.prepare(order, link.last_node.host, port, link.name)
            if start is not None and is_gateway(name):
                start = msgspec.structs.replace(start, outlives_s=self._cluster.settings.orphan_grace_s)
            if start is not None:
                del self._under_way[name]
                await link.ask("start", start, sys.executable)
                return
        except NotBooked as error:
            self._tell(LaunchFailed(name, str(error), "booking"))
        except NoAnswer as error:
            if name not in self._under_way:
                return  # the process may have been started: the link will report that
            self._launches.failed(name, error)
        except Exception as error:
            self._launches.failed(name, error)
        self._under_way.pop(name, None)
        link.instances.discard(name)
        self._unbook(name)

    def _link_for(self, order: ProcessOrder) -> NodeLink | None:
        """The worker for an instance. Without a place, the worker with the fewest instances."""
        up = self.nodes.up()
        worker = order.worker if order.place is None else order.place.home
        if worker:
            return next((one for one in up if one.name == worker), None)
        return min(up, key=lambda one: (len(one.instances), one.name), default=None)

    def stop(self, instance_id: str, *, kill: bool = False) -> None:
        link = self.nodes.of(instance_id)
        if self._authority.outruled:
            self._launches.take_in(InstanceEnded(id=instance_id, why="another plane has taken it over"))
        elif link is None:
            self.reported(InstanceEnded(id=instance_id, why="it has no process"))
        elif instance_id not in self._under_way:  # otherwise the controller repeats it once the process runs
            self._tasks.complete("signals", lambda: self._stop(link, instance_id, kill))

    async def _stop(self, link: NodeLink, instance_id: str, kill: bool) -> None:
        await self._authority.certain()
        await link.stop(instance_id, kill=kill)

    def reported(self, report: WorkerReport) -> None:
        """Handle a report of a node."""
        if isinstance(report, InstanceEnded):
            link = self.nodes.of(report.id)
            if link is not None:
                link.instances.discard(report.id)
            self._unbook(report.id)
        self._launches.take_in(report)

    def cancel(self) -> None:
        for one in self._under_way.values():
            one.cancel()

    def _unbook(self, instance_id: str) -> None:
        if not self._authority.outruled:
            self._tasks.complete("bookings", lambda: self._cluster.bookings.free(instance_id))


class RayRuntime:
    """`Runtime` of the interface. One per namespace of a cluster."""

    documents: SqliteDocuments
    targets: SqliteTargets
    usage: SqliteUsage
    replicas: ClusterReplicas
    probes: HttpProbes
    _lock: Lock
    _state: ClusterState
    _launches: Launches
    _nodes: NodeLinks
    _starts: NodeStarts

    def __init__(
        self,
        folder: Path | None,
        cluster: RayCluster,
        *,
        scrape_interval_s: float = 0.5,
        tasks: Tasks | None = None,
    ) -> None:
        """`folder` is for the admin socket of this plane. `cluster` is not connected yet."""
        loop = asyncio.get_running_loop()
        self.clock = LoopClock(loop)
        self.tasks = tasks or Tasks(loop)
        self.gpus = NodeGpus(self.clock.now)
        self._folder = Path(tempfile.mkdtemp(prefix="pointsman-")) if folder is None else folder.absolute()
        self.admin = ClusterListener(self._folder / SOCKET)
        self.cluster = cluster
        self.authority = Authority(self.cluster, f"{socket.gethostname()}, pid {os.getpid()}", self.tasks)
        self._scrape_interval_s = scrape_interval_s
        self._tell: Tell | None = None
        """None before processes are adopted."""
        self._background: list[Timer] = []
        self._plan = PointsmanPlan()

    async def open(self) -> None:
        check_state(self._folder)
        self._lock = Lock(self._folder)
        try:
            await self.cluster.connect()
            kept = await self.authority.take()
            self.authority.gateway = self.admin.bind(self.cluster.host, kept.gateway)
            self._state = ClusterState(kept.image or _left_behind(self._folder / LEFT), self.cluster, self.authority)
        except BaseException:
            await self.cluster.disconnect()
            self._lock.release()
            raise
        store = self._state.store
        self.documents, self.targets, self.usage = store.documents, store.targets, store.usage
        self.replicas = ClusterReplicas(self.authority, kept.secret)
        self._background = [
            self.tasks.keep("cluster state", self._state.push),
            self.tasks.keep("plane beats", self.authority.beat),
        ]

    async def adopt(self, tell: Tell, load: LoadTable) -> Sequence[Adopted]:
        def told(event: ControllerEvent) -> None:
            if isinstance(event, Exited):
                self.probes.forget(event.instance_id)
            tell(event)

        self.probes = HttpProbes(tell, load, self.clock, self.tasks, self._scrape_interval_s)
        self._launches = Launches(self._state.store.processes, told, self.tasks)
        self._starts = NodeStarts(self._launches, self.cluster, self.authority, told, self.tasks)
        self._nodes = self._starts.nodes = NodeLinks(
            self.cluster, self.authority, self._starts.reported, told, self.tasks
        )
        self.gpus.links = self._nodes.links
        self.probes.is_out_of_reach = self._nodes.is_out_of_reach
        self._nodes.heard_again = self.probes.back_in_reach
        self._nodes.see = lambda worker: _as_in_manifest(worker, self._plan)
        left: defaultdict[str, list[StoredProcess]] = defaultdict(list)
        for one in self._launches.stored:
            left[one.worker].append(one)
        self._tell = tell
        for name, processes in left.items():
            self._nodes.add(name, tuple(processes))
        await self._nodes.look()
        links = list(self._nodes.links.values())
        answers = [asyncio.ensure_future(link.opened.wait()) for link in links if link.node is not None]
        if answers:
            _, late = await asyncio.wait(answers, timeout=ADOPT_S)
            for answer in late:
                answer.cancel()
        self._nodes.adopt = False
        for link in links:
            link.adopts = False
        await self.cluster.bookings.keep({one for link in links for one in link.instances})
        adopted = self._launches.adopt(one for link in links for one in link.running)
        self._background.append(self.tasks.keep("cluster nodes", self._nodes.watch))
        return adopted

    def launch(self, order: ProcessOrder) -> None:
        self._starts.launch(order)

    def stop(self, instance_id: str, *, kill: bool = False) -> None:
        self._starts.stop(instance_id, kill=kill)

    def address(self, instance_id: str) -> Address | None:
        return self._launches.address(instance_id)

    async def logs(self, instance_id: str, lines: int) -> str | None:
        link = self._nodes.of(instance_id)
        for one in [link] if link is not None else self._nodes.up():
            text: str | None = await one.ask("logs", instance_id, lines)
            if text is not None:
                return text
        return None

    def look_at_workers(self, plan: PointsmanPlan) -> None:
        self._plan = plan
        for link in self._nodes.up():
            if link.worker is not None:
                link.seen(link.worker)
        self.tasks.complete("worker measurements", self._nodes.measure)

    def problems(self) -> list[Reason]:
        if self._tell is None:
            return []
        links = [one.problem for one in self._nodes.links.values()]
        settings = self.cluster.settings
        storage = Reason("no-ray-storage") if settings.address and not settings.storage else None
        own = [self._nodes.problem, self.authority.problem, self._state.problem, self._state.store.problem, storage]
        return [*self.probes.problems(), *self._launches.problems(), *filter(None, [*links, *own])]

    def unsaved(self) -> Unsaved:
        behind = self._state.store.behind
        return Unsaved(len(behind) + self._state.unsaved, behind.failures)

    def facts(self) -> dict[str, Any]:
        known = [] if self._tell is None else sorted(self._nodes.links.values(), key=lambda link: link.name)
        names = {"address": self.cluster.address, "namespace": self.cluster.settings.namespace}
        return {
            "state_dir": str(self._folder),
            "pid": os.getpid(),
            "ray": {**names, "epoch": self.authority.epoch},
            "workers": [_facts(link) for link in known],
        }

    async def close(self) -> None:
        for one in self._background:
            one.cancel()
        if self._tell is not None:
            self._tell = None
            self._starts.cancel()
            self.probes.close()
            await self._nodes.close()
            if not self.authority.outruled:
                await self.cluster.bookings.keep(())
            self._launches.adopt(())
        try:
            _leave_behind(self._folder / LEFT, self._state.store.image())
            if not self.authority.outruled:
                await self._state.push_once()
                await self.authority.leave()
        except (OSError, PointsmanError) as error:
            self.tasks.failed("cluster state", error)
        self._state.store.close()
        await self.cluster.disconnect()
        self._lock.release()


def _as_in_manifest(worker: Worker, plan: PointsmanPlan) -> Worker:
    """A worker with the labels and the price from the manifest."""
    for spec in plan.workers:
        if spec.name == worker.name:
            labels, price = {**worker.labels, **spec.labels}, spec.price_per_gpu_hour
            return msgspec.structs.replace(worker, labels=labels, price_per_gpu_hour=price)
    return worker


def _left_behind(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _leave_behind(file: Path, image: bytes) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(image)


def _facts(link: NodeLink) -> dict[str, Any]:
    instances = [one for one in link.instances if not is_gateway(one)]
    facts = {"name": link.name, "answers": link.is_up, "instances": len(instances)}
    if link.worker is None or link.last_node is None:
        return facts
    worker = link.last_node.worker(link.worker)
    size = {"cpus": worker.cpus, "memory_bytes": worker.memory_bytes, "gpus": len(worker.gpus)}
    use = [
        {"index": one.index, "memory_bytes": one.memory_bytes, "used_bytes": one.used_bytes}
        | ({"busy": link.busy[one.index]} if one.index in link.busy else {})
        for one in worker.gpus
    ]
    return {**facts, "host": link.last_node.host, **size, "labels": dict(worker.labels), "gpu_use": use}
