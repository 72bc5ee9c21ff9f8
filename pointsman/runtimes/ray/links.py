"""The nodes of the cluster, on the plane's side: one link each, which renews the lease and fetches reports.

Enters: Ray's list of nodes, and answers of their actors. Leaves: workers that are seen and lost, and reports. The
one rule: a node that does not answer is lost only when its lease is over, whichever plane has granted it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from pointsman.control.events import OutOfReach, WorkerLost, WorkerSeen
from pointsman.errors import PointsmanError
from pointsman.reasons import Reason
from pointsman.runtimes.gateways import is_gateway
from pointsman.runtimes.interface import BackgroundTasks, Tell
from pointsman.runtimes.machine.processes import InstanceEnded, InstanceStarted, WorkerReport
from pointsman.runtimes.machine.store import StoredProcess
from pointsman.runtimes.ray.cluster import STOP_GRACE_S, Late, NoAnswer, RayCluster, RayNode, called
from pointsman.runtimes.ray.keeper import BEAT_S, TAKEN_S, KeptState, PlaneRuns
from pointsman.runtimes.ray.leases import MARGIN_S, NodeLease
from pointsman.runtimes.ray.node import NodeAnswer, NodeOpened, OlderPlane
from pointsman.runtimes.tasks import FailedElsewhere
from pointsman.types import Gpu, Worker

ANSWER_S = 1.0
POLL_ANSWER_S = 0.8
"""A node that does not answer a poll in this time is silent. Without reports, a node answers after `POLL_S`."""
OPEN_S = 30.0
"""Time limit for the actor of a node to start."""
LOOK_S = 0.5
"""Interval of reading the nodes from Ray."""
RETRY_S = 0.2


class Authority:
    """The plane's right to rule the cluster: its epoch from the keeper, to which it sends heartbeats."""

    def __init__(self, cluster: RayCluster, plane: str, tasks: BackgroundTasks) -> None:
        """`plane`: a name of this plane for operators, such as host:pid."""
        self.epoch = 0
        self.gateway = ""
        """Where replicas on any node reach the gateway of this plane."""
        self.calls: str | None = None
        """The addresses at which gateways take calls from replicas, one per line; None until they are known."""
        self.secret = ""
        """The secret of gateways and replicas."""
        self.problem: Reason | None = None
        self.agents: dict[str, Any] = {}
        """The agents that the keeper keeps if this plane dies, by worker."""
        self.outruled = False
        """Whether another plane rules the cluster."""
        self._cluster, self._plane, self._tasks = cluster, plane, tasks
        self.keeper: Any = None
        self._heard_at = time.monotonic()
        self.retaken: Callable[[], None] = lambda: None
        """Called when the keeper has lost the state."""

    async def take(self) -> KeptState:
        """Take over the cluster. Raises `PlaneRuns` if another plane is alive."""
        self.keeper = await self._cluster.keeper()
        limit = time.monotonic() + 2 * TAKEN_S
        while True:
            try:
                kept: KeptState = await self.ask("take", self._plane)
                break
            except PlaneRuns:
                if time.monotonic() > limit:
                    raise
                await asyncio.sleep(RETRY_S)  # it may have been killed a moment ago
        self.epoch, self.secret, self._heard_at = kept.epoch, kept.secret, time.monotonic()
        return kept

    async def ask(self, method: str, *args: Any, limit_s: float = OPEN_S) -> Any:
        return await called(getattr(self.keeper, method), *args, limit_s=limit_s)

    async def beat(self) -> None:
        """Send heartbeats, forever."""
        while not self.outruled:
            try:
                await self.ask("beat", self.epoch, self._plane, self.agents, limit_s=ANSWER_S)
                self._heard_at, self.problem = time.monotonic(), None
            except PlaneRuns:
                await self._retake()
            except NoAnswer as error:
                self.problem = Reason("keeper-silent", {"error": str(error), "in_doubt": self.in_doubt})
            await asyncio.sleep(BEAT_S)
        await asyncio.Event().wait()

    async def _retake(self) -> None:
        """Take over again: the keeper has another epoch. It was restarted without storage, or another plane rules."""
        try:
            self.epoch = (await self.ask("take", self._plane, limit_s=ANSWER_S)).epoch
        except PlaneRuns as error:
            self.outruled, self.problem = True, Reason("plane-replaced", {"error": str(error)})
            return
        self.retaken()

    async def leave(self) -> None:
        """Report to the keeper that this plane has ended everything."""
        await self.ask("leave", self.epoch, limit_s=ANSWER_S)
        await self._cluster.end(self.keeper)

    async def until_released(self, worker: str) -> float:
        """Seconds until a worker can no longer live by leases of the keeper."""
        try:
            left: float = await self.ask("release", self.epoch, worker, limit_s=ANSWER_S)
            return left
        except PointsmanError:
            # The keeper may be cut off together with the node, and renew its lease until it gives up.
            return max(self._heard_at + self.longest_s - time.monotonic(), RETRY_S)

    @property
    def longest_s(self) -> float:
        """How long the processes of a plane may run after its last heartbeat."""
        settings = self._cluster.settings
        return settings.orphan_grace_s + 2 * settings.lease_s + STOP_GRACE_S + MARGIN_S

    @property
    def in_doubt(self) -> bool:
        """Whether another plane may rule the cluster, because the keeper had no heartbeat from this plane lately."""
        return time.monotonic() - self._heard_at >= TAKEN_S

    async def certain(self) -> None:
        """Wait until this plane certainly rules the cluster."""
        while self.outruled or self.in_doubt:
            await asyncio.sleep(RETRY_S)

    @property
    def may_grant(self) -> bool:
        """Whether the keeper has received heartbeats of this plane lately. If not, another plane may rule."""
        return time.monotonic() - self._heard_at < self._cluster.settings.orphan_grace_s


class NodeLink:
    """One worker, while Ray has a node of its name or its lease is not over."""

    def __init__(
        self,
        name: str,
        cluster: RayCluster,
        authority: Authority,
        report: Callable[[WorkerReport], None],
        tell: Tell,
        known: tuple[StoredProcess, ...],
    ) -> None:
        """`known`: the processes that an earlier plane has left on the node, according to the store."""
        self.name = name
        self.node: RayNode | None = None
        """The node; None while Ray does not have it."""
        self.last_node: RayNode | None = None
        self.problem: Reason | None = None
        self.worker: Worker | None = None
        """The worker as it was last seen; None if it is gone."""
        self.wanted_gpus: tuple[Gpu, ...] = ()
        """GPUs whose use is measured."""
        self.busy: Mapping[int, float] = {}
        """The share of these GPUs in use, by index, if drivers report it."""
        self.running = known
        """The processes that this plane found there."""
        self.instances = {one.id for one in known}
        """The processes that run on the node, or will soon be started there."""
        self.opened = asyncio.Event()
        """Set when the node has answered for the first time."""
        self.silent_since: float | None = None
        self.ended = False
        self.see: Callable[[Worker], Worker] = lambda worker: worker
        """Adds the labels and the price of the manifest to a worker."""
        self.heard_again: Callable[[], None] = lambda: None
        self.task_failed: Callable[[str, FailedElsewhere], None] = lambda *_: None
        """Called with each failure of a background task of the node."""
        self._failures: dict[str, int] = {}
        """How often each background task has failed, as reported so far."""
        self._cluster, self._authority, self._report, self._tell = cluster, authority, report, tell
        self._lease = NodeLease(cluster.settings.lease_s, STOP_GRACE_S)
        if known:  # leases of an earlier plane may apply
            self._lease.over_at = time.monotonic() + authority.longest_s
        self._agent: Any = None
        self.adopts = True
        """Whether this plane has just started. If so, it owns all processes on the node, else only those it knows."""
        self._after = 0
        self._stops: dict[str, bool] = {}
        """Signals that may not have arrived, by instance: True for SIGKILL."""

    async def run(self) -> None:
        """Serve the node until it is lost."""
        while not self.ended and not self._authority.outruled:
            try:
                if self._agent is None:
                    await self._open()
                await self._poll()
                continue
            except OlderPlane as error:
                self._authority.outruled = True
                self._authority.problem = Reason("plane-outdated", {"error": str(error)})
                break
            except PointsmanError as error:
                self._fell_silent(error)
            if await self._is_over():
                self._lose()
            await asyncio.sleep(RETRY_S)

    async def _open(self) -> None:
        node = self.node
        if node is None:
            raise NoAnswer("Ray no longer has it")
        agent, epoch = self._cluster.agent(node), self._authority.epoch
        keep = None if self.adopts else tuple(self.instances)
        limit_s = OPEN_S if self.worker is None else ANSWER_S
        gateway, secret = self._authority.gateway, self._authority.secret
        opened: NodeOpened = await called(agent.open, epoch, self.running, keep, gateway, secret, limit_s=limit_s)
        self._lease = NodeLease(self._cluster.settings.lease_s, STOP_GRACE_S)  # older planes are refused there now
        for _ in range(2):  # the second renewal grants the lease, before anything is started
            stamp, lease_s = self._lease.echo(), self._lease.lease_s
            answer: NodeAnswer = await called(agent.poll, epoch, stamp, lease_s, None, limit_s=ANSWER_S)
            self._lease.heard(answer.stamp, time.monotonic())
        self._agent, self._after, self.last_node = agent, 0, node
        told = self._failures
        counts = {name: count for name, (count, _) in opened.failures.items()}
        # Failures from before this plane connected are not reported again. Failures while the node was silent are.
        self._failures = (
            {name: min(told.get(name, 0), counts[name]) for name in counts} if self.opened.is_set() else counts
        )
        self._authority.agents[self.name] = agent
        there = {one.id: one for one in opened.running}
        if self.adopts:
            self.running, self.instances = opened.running, set(there)
        self.seen(opened.worker)
        for gone in sorted(self.instances - there.keys()):
            self._report(InstanceEnded(id=gone, why=f"it no longer ran when {self.name} answered again"))
        for one in [one for one in opened.running if one.pid is not None and not self.adopts]:
            self._report(InstanceStarted(one.id, one.pid or 0, one.born))  # the report may have been lost
        for instance_id, kill in list(self._stops.items()):
            await self.stop(instance_id, kill=kill)
        self.opened.set()

    async def _poll(self) -> None:
        stamp = self._lease.echo() if self._authority.may_grant else None
        epoch, lease_s = self._authority.epoch, self._lease.lease_s
        asked = epoch, stamp, lease_s, self._after, self.wanted_gpus, self._authority.calls
        answer: NodeAnswer = await called(self._agent.poll, *asked, limit_s=POLL_ANSWER_S)
        self._lease.heard(answer.stamp, time.monotonic())
        self.busy = answer.busy
        if self.silent_since is not None:
            self.silent_since = None
            self.heard_again()
        for number, report in answer.reports:
            self._after = max(self._after, number)
            self._report(report)
        for name, (count, why) in answer.failures.items():
            for _ in range(count - self._failures.get(name, 0)):
                self.task_failed(f"{name} of {self.name}", FailedElsewhere(why))
            self._failures[name] = count
        self.problem = answer.problem and Reason("on-worker", {"worker": self.name, "why": answer.problem})
        if not self.problem and self.worker is not None and self.last_node is not None:
            self.problem = self.last_node.problem(self.worker)

    def _fell_silent(self, error: PointsmanError) -> None:
        if not isinstance(error, Late):
            self._agent = None  # the actor is gone: find or create another
        self.busy = {}
        if self.silent_since is None:
            self.silent_since = time.monotonic()
            for instance_id in sorted(self.instances):  # no new requests are sent there, before the node is lost
                self._tell(OutOfReach(instance_id, f"its worker {self.name} does not answer"))
        silent_s = time.monotonic() - self.silent_since
        self.problem = Reason(
            "worker-silent", {"worker": self.name, "silent_s": silent_s, "error": str(error), "left_s": None}
        )

    async def _is_over(self) -> bool:
        """Whether nothing runs on the node any more. A node that is only slow answers again before that."""
        if self._lease.until_over(time.monotonic()):
            return False
        self._authority.agents.pop(self.name, None)
        left_s = await self._authority.until_released(self.name)
        if left_s and self.problem is not None:
            self.problem = self.problem.having(left_s=left_s)
        return not left_s

    def _lose(self) -> None:
        self._agent, self.adopts = None, False
        self._stops.clear()
        # Gateways do not end with the lease. If Ray has the node, their fate is known when it answers again.
        kept = {one for one in self.instances if is_gateway(one)} if self.node is not None else set()
        gone, self.instances = sorted(self.instances - kept), kept
        if self.worker is not None:
            self.worker = None
            self._tell(WorkerLost(self.name, str(self.problem)))
        for instance_id in gone:
            self._report(InstanceEnded(id=instance_id, why=f"its worker {self.name} was lost"))
        self.ended = self.node is None

    def seen(self, worker: Worker) -> None:
        """Take in the present state of the node."""
        self.worker = worker
        if self.last_node is not None:
            self._tell(WorkerSeen(self.see(self.last_node.worker(worker))))

    # Calls of the node

    @property
    def is_up(self) -> bool:
        """Whether the node answers."""
        return self.worker is not None and self.silent_since is None

    async def ask(self, method: str, *args: Any) -> Any:
        """Call the actor, with the epoch. Raises `NoAnswer`, or what the method raised."""
        if self._agent is None:
            raise NoAnswer(f"worker {self.name} does not answer")
        return await called(getattr(self._agent, method), self._authority.epoch, *args, limit_s=OPEN_S)

    async def stop(self, instance_id: str, *, kill: bool) -> None:
        self._stops[instance_id] = kill
        try:
            await self.ask("stop", instance_id, kill)
        except NoAnswer:
            return  # the call is repeated when the node answers again
        self._stops.pop(instance_id, None)

    async def close(self) -> None:
        """End everything on the node, and its actor. If it does not answer, that happens when its lease is over."""
        self.ended, agent = True, self._agent
        try:
            await self.ask("close")
            await self._cluster.end(agent)
        except PointsmanError:
            await asyncio.sleep(self._lease.until_over(time.monotonic()))


class NodeLinks:
    """All links, and the nodes that Ray reports."""

    def __init__(
        self,
        cluster: RayCluster,
        authority: Authority,
        report: Callable[[WorkerReport], None],
        tell: Tell,
        tasks: BackgroundTasks,
    ) -> None:
        self.links: dict[str, NodeLink] = {}
        self.adopt = True
        """Whether everything that runs on a new node is this plane's, because the plane has just started."""
        self.problem: Reason | None = None
        self.see: Callable[[Worker], Worker] = lambda worker: worker
        self.heard_again: Callable[[], None] = lambda: None
        """Called when a node that was silent has answered."""
        self._cluster, self._authority, self._report, self._tell, self._tasks = cluster, authority, report, tell, tasks
        self._running: dict[str, Any] = {}

    def of(self, instance_id: str) -> NodeLink | None:
        """The link to the worker on which an instance runs or will run; None if there is no such worker."""
        return next((one for one in self.links.values() if instance_id in one.instances), None)

    def is_out_of_reach(self, instance_id: str) -> bool:
        """Whether the node of an instance is silent. The instance may still answer, until the lease ends."""
        link = self.of(instance_id)
        return link is not None and link.silent_since is not None

    def up(self) -> list[NodeLink]:
        """The workers that answer."""
        return [one for one in self.links.values() if one.is_up]

    async def measure(self) -> None:
        """Read the state of every node again."""
        for link in self.up():
            try:
                link.seen(await link.ask("look"))
            except PointsmanError:
                continue  # its link notices that

    async def watch(self) -> None:
        """Read the nodes from Ray, forever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        try:
            found = await self._cluster.nodes()
        except NoAnswer as error:
            self.problem = Reason("ray-nodes-unknown", {"error": str(error)})
            return
        names = [one.name for one in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        self.problem = Reason("ray-nodes-alike", {"name": twice[0]}) if twice else None
        there = {one.name: one for one in reversed(found)}
        for name, link in list(self.links.items()):
            link.node = there.get(name)
            if link.ended:
                self._drop(name)
        for name, node in there.items():
            if name not in self.links:
                self.add(name).node = node

    def add(self, name: str, known: tuple[StoredProcess, ...] = ()) -> NodeLink:
        link = NodeLink(name, self._cluster, self._authority, self._report, self._tell, known)
        link.adopts = self.adopt
        link.see = lambda worker: self.see(worker)
        link.heard_again = lambda: self.heard_again()
        link.task_failed = self._tasks.failed
        self.links[name] = link
        self._running[name] = self._tasks.complete("node links", link.run)
        return link

    def _drop(self, name: str) -> None:
        self._authority.agents.pop(name, None)
        self.links.pop(name, None)
        self._running.pop(name).cancel()

    async def close(self) -> None:
        running, self._running = self._running, {}
        for one in running.values():
            one.cancel()
        if self._authority.outruled:
            return  # the processes belong to another plane
        await asyncio.gather(*(link.close() for link in self.links.values()))
