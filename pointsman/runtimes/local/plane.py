"""The plane: does on this machine what the controller decides, and tells it what became of it.

Enters: manifests, applications, and what an operator asks. Leaves: processes, lanes of traffic, and the state of it
all. The one rule: the controller decides; here commands are carried out in their order, and whatever happens is told.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config.application import applications_status
from pointsman.config.changes import Changes, changes_between
from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import (
    EndpointsFiles,
    ManifestText,
    Revision,
    first_revision,
    load_document,
    load_revision,
)
from pointsman.control import Controller, Desired, InstanceStatus
from pointsman.control import events as control
from pointsman.control.status import Unavailable, deployments_status, is_ready, unavailability
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.placement.fleet import Snapshot
from pointsman.runtimes.local.autoscaling import PlaneScaling
from pointsman.runtimes.local.detection import detect
from pointsman.runtimes.local.detection.system import this_machine
from pointsman.runtimes.local.detection.usage import GpuDrivers
from pointsman.runtimes.local.executor import CommandExecutor, PlaneParts
from pointsman.runtimes.local.logs import log_file, tail
from pointsman.runtimes.local.metric_sources import GpuUsage
from pointsman.runtimes.local.processes import Processes
from pointsman.runtimes.local.shared import Shared
from pointsman.runtimes.local.store import Lock, Store
from pointsman.runtimes.traffic import Traffic
from pointsman.scaling.deployment import ScaledDeployment
from pointsman.scaling.status import scaling_summary
from pointsman.types import Worker

LOOK_S = 1.0
"""How often files of endpoints are looked at."""
OVERTIME_S = 5.0
"""What does not stop within its time limits and this is ended all the same."""


class Plane:
    """Runs a manifest and applications on this machine. One per state directory."""

    def __init__(
        self,
        state: Path,
        traffic: Traffic,
        *,
        orphan_grace_s: float = 5.0,
        scrape_interval_s: float = 0.5,
        look_at_machine: Callable[..., Worker] = detect,
        gpu_drivers: GpuDrivers | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = state.absolute()
        self.current = PointsmanPlan()
        """All that is in force: the manifest, and the applications beside it."""
        self.generation = 0
        """Of the manifest in force; grows with each that was applied."""
        self.listeners: list[Callable[[], None]] = []
        """Called when the status may have changed."""
        self.reconfigured: list[Callable[[PointsmanPlan], None]] = []
        """Called with every plan that is put in force, before lanes are opened or changed for it."""
        self._traffic = traffic
        self._orphan_grace_s = orphan_grace_s
        self._running: PlaneParts | None = None
        self._controller = Controller()
        self._revision = Revision()
        self._hands = CommandExecutor(
            traffic, self._tell, lambda: self._at_work, self._deployment_of, scrape_interval_s
        )
        self._gpu_usage = GpuUsage(gpu_drivers)
        self._scaling = PlaneScaling(
            traffic,
            self._controller,
            self._tell_wanted,
            lambda *told: self._tell(control.PlaceNeeded(*told)),
            clock,
            self._gpu_usage,
        )
        self._files = EndpointsFiles()
        self._looking: asyncio.TimerHandle | None = None
        self._untold: deque[control.ControllerEvent] = deque()
        self._telling = False
        self._news_due = False
        self._applying = asyncio.Lock()
        self._empty = asyncio.Event()
        """Nothing runs and nobody serves."""
        self._stopping: asyncio.Task[None] | None = None
        self._machine = this_machine()
        self._look_at_machine = look_at_machine
        self._blind = ""
        """Why it is not known what there is of this machine; empty: it is."""
        self._began = time.monotonic()

    @property
    def _at_work(self) -> PlaneParts:
        if self._running is None:
            raise PointsmanError("this plane is not running; start it first")
        return self._running

    @property
    def secret(self) -> str:
        """What replicas and gateway know each other by."""
        return self._at_work.shared.secret

    @property
    def shm(self) -> Path:
        """A folder of memory that replicas share."""
        return self._at_work.shared.shm

    # For operators

    async def start(self, manifest: ManifestText | None = None) -> None:
        """Run a manifest, or an application by itself; None: what was last in force here. Applications that were
        deployed stay, and what an earlier plane left running is adopted."""
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Lock(self.state)
        store: Store | None = None
        try:
            store = Store(self.state)
            self._remember(store)
            stored = store.manifest()
            wanted = first_revision(None if stored is None else stored[1], store.applications(), manifest)
            if wanted is None:
                raise PointsmanError(f"nothing was ever applied in {self.state}; give a manifest to start with")
            plan = wanted.plan()
            shared = Shared(self.state)
            processes = Processes(self.state, store, self._hear, orphan_grace_s=self._orphan_grace_s)
            adopted = await processes.open()
        except BaseException:
            if store is not None:
                store.close()
            lock.release()
            raise
        self._running = PlaneParts(asyncio.get_running_loop(), lock, store, processes, shared)
        if not adopted:
            shared.clear()
        self._traffic.failing = self._requests_fail
        self._traffic.absence = self._absence
        self._scaling.open(store)
        self._see_worker(plan, [event.pid for event in adopted])
        for event in adopted:
            self._hands.adopted(event, plan)
            self._tell(event)
        self._put_in_force(wanted)
        self._looking = self._running.loop.call_later(LOOK_S, self._look)

    def plan(self, manifest: ManifestText) -> Changes:
        """What applying a manifest, or deploying an application, would change. Raises `ConfigError` with everything
        that is wrong with it."""
        return self._changes(*self._revision.changed(manifest, load_document(manifest)))

    async def apply(self, manifest: ManifestText) -> Changes:
        """Put a manifest in force, or an application beside it. Raises `ConfigError` with all that is wrong with it;
        nothing has changed then."""
        async with self._applying:
            # In a thread, as it may import modules of the user's own, and requests go on meanwhile.
            plan = await asyncio.to_thread(load_document, manifest)
            return self._put_in_force(*self._revision.changed(manifest, plan))

    async def deploy(self, document: ManifestText) -> Changes:
        """Put an application in force beside the manifest, instead of the one that has had its name."""
        async with self._applying:
            plan = await asyncio.to_thread(load_document, document)
            if not plan.application_alone:
                raise PointsmanError(f"{document.file or 'this'} is a manifest; pointsman apply puts it in force")
            return self._put_in_force(*self._revision.changed(document, plan))

    async def rollback(self, name: str) -> Changes:
        """Put the version of an application in force that was before this one; once more: the one before that."""
        async with self._applying:
            self._revision.find(name)
            before = self._at_work.store.application_before(name)
            if before is None:
                raise PointsmanError(f'there is no version of "{name}" before the one in force')
            plan = await asyncio.to_thread(load_document, before)
            return self._put_in_force(*self._revision.changed(before, plan), rolled_back=name)

    async def delete(self, name: str) -> Changes:
        """Take an application out of force, and forget its versions."""
        async with self._applying:
            return self._put_in_force(self._revision.without_application(name))

    def application(self, name: str) -> str:
        """The document of an application in force, as we write it."""
        found = {one.name: one.text for one in self.current.applications}
        if name not in found:
            raise UnknownName("application", name, found)
        return found[name]

    @property
    def ready(self) -> bool:
        """Whether every deployment has an instance that takes requests."""
        return self._is_ready()

    def _is_ready(self) -> bool:
        names = [one.name for one in self.current.deployments]
        return is_ready(names, self._controller.instances(), self._scaling.resting())

    def status(self) -> dict[str, Any]:
        """What runs and how it is doing: plain data."""
        problems = [*self._files.problems(), *self._hands.problems(), *filter(None, [self._blind])]
        problems += [*self._revision.broken.values(), *self._scaling.problems()]
        if self._running is not None and self._running.processes.problem:
            problems.append(self._running.processes.problem)
        now, instances = time.monotonic(), self._controller.instances()
        return {
            "ready": self._is_ready(),
            "state_dir": str(self.state),
            "generation": self.generation,
            "uptime_s": round(now - self._began, 3),
            "worker": {**msgspec.to_builtins(self._machine), "labels": self.current.worker_labels()},
            "deployments": self._deployments_status(instances, now),
            "applications": applications_status(self.current),
            "problems": problems,
        }

    def _deployments_status(self, instances: Sequence[InstanceStatus], now: float) -> list[dict[str, Any]]:
        internal = {name for name, lane in self._traffic.lanes.items() if lane.plan.internal}
        scaled = {one.name: {"scaling": scaling_summary(one)} for one in self._scaling.each()}
        found = deployments_status(self._desired(), instances, self._traffic.status, internal, now)
        return [one | scaled.get(one["name"], {}) for one in found]

    def fleet(self) -> Snapshot:
        """The workers that are known, and what instances have of them."""
        return self._controller.places.snapshot()

    def logs(self, instance_id: str, lines: int = 100) -> str:
        """The last lines that an instance wrote."""
        file, known = log_file(self.state, instance_id), self._hands.directory.get(instance_id)
        if known is not None and known.endpoint is not None:
            raise PointsmanError(f'"{instance_id}" was started by somebody else, and so its log is elsewhere')
        if known is None and not file.exists():
            raise UnknownName("instance", instance_id, (one.id for one in self._controller.instances()))
        return tail(file, lines)

    async def drain(self, instance_id: str) -> None:
        """Take an instance out of service; another takes its place first."""
        known = [one.id for one in self._controller.instances()]
        if instance_id not in known:
            raise UnknownName("instance", instance_id, known)
        self._tell(control.DrainAsked(instance_id))

    async def scale(self, deployment: str, replicas: int | None, for_s: float | None = None, by: str = "") -> None:
        """So many instances of a deployment that is scaled, for so long; None: as its policy says."""
        self._scaling.scale(deployment, replicas, for_s, by or "an operator")

    def scaling(self, deployment: str) -> dict[str, Any]:
        """How many instances there are of a deployment, and why: plain data."""
        return self._scaling.status(deployment)

    def load_seen(self, deployment: str) -> dict[str, Any]:
        """What has come for a deployment that is scaled, to rehearse policies on."""
        return self._scaling.load_history(deployment)

    def scaled(self) -> list[ScaledDeployment]:
        """The deployments that are scaled."""
        return self._scaling.each()

    async def stop(self) -> None:
        """Drain everything, stop it, and leave no process behind."""
        if self._stopping is None and self._running is not None:
            self._stopping = self._running.loop.create_task(self._stop(self._running))
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    async def _stop(self, running: PlaneParts) -> None:
        limits = [plan.desired.lifecycle for plan in self._hands.plans.values()]
        patience_s = max((one.drain_timeout_s + one.stop_grace_s for one in limits), default=0.0) + OVERTIME_S
        if self._looking is not None:
            self._looking.cancel()
        self._scaling.close()
        self._empty.clear()
        self._tell(control.PlaneStopping())
        with suppress(TimeoutError):  # the supervisor ends the rest
            async with asyncio.timeout(patience_s):
                await self._empty.wait()
        self._hands.close()
        await running.processes.close()
        running.shared.remove()
        self._hands.stop_timer()
        self._running = None
        running.store.close()
        running.lock.release()

    # What is in force

    def _remember(self, store: Store) -> None:
        stored = store.manifest()
        if stored is not None:
            self.generation, manifest = stored
            self._revision = Revision(manifest)
            with suppress(ConfigError):  # it may name what is not there any more; it only says what differs
                self._revision = load_revision(manifest, store.applications(), was_in_force=True)
                self.current = self._revision.plan()

    def _changes(self, wanted: Revision, retry: Collection[str] = ()) -> Changes:
        plan, files = wanted.plan(), self._files.copy()
        files.configure(plan)
        before = None if self._revision.manifest is None else self.current
        desired = self._scaling.desired(files.desired(), plan)
        return changes_between(before, plan, self._controller.preview(desired, retry))

    def _put_in_force(self, wanted: Revision, retry: Collection[str] = (), rolled_back: str = "") -> Changes:
        store = self._at_work.store
        if self._stopping is not None:
            raise PointsmanError("this plane is being stopped, and changes nothing any more")
        plan, changes = wanted.plan(), self._changes(wanted, retry)
        self.generation = _save(store, self._revision, wanted, changes, rolled_back) or self.generation
        self._revision, self.current = wanted, plan
        self._hands.configure(plan.deployments)
        self._hands.folder = "" if wanted.manifest is None else wanted.manifest.folder
        self._files.configure(plan)
        self._hands.configuring.configure(plan.user_configs())
        for call in self.reconfigured:
            call(plan)
        self._traffic.configure(plan.deployments)
        self._scaling.configure(plan)
        self._see_worker(plan)
        self._tell(control.Applied(self._desired(), frozenset(retry), self._traffic.warmth()))
        return changes

    def _desired(self) -> Desired:
        """What should run now: as files and scaling policies say."""
        return self._scaling.desired(self._files.desired())

    def _see_worker(self, plan: PointsmanPlan, pids: Sequence[int] = ()) -> None:
        """Look at what there is of this machine, and what others use of it."""
        instances = self._controller.instances()
        ours = [*pids, *(one.pid for one in instances if one.pid is not None)]
        try:
            worker = self._look_at_machine(ours, labels=plan.worker_labels())
        except Exception as error:  # drivers are somebody else's; without places everything runs all the same
            self._blind = (
                f"this machine cannot be looked at, so instances get no places: {type(error).__name__}: {error}"
            )
            return
        self._blind = ""
        self._gpu_usage.see(worker)
        if worker.memory_bytes:  # else the system does not say, and instances are started without a place
            self._tell(control.WorkerSeen(worker))

    def _look(self) -> None:
        running = self._at_work
        self._looking = running.loop.call_later(LOOK_S, self._look)
        self._forget_the_gone()
        if any(one.unplaced for one in self._controller.instances()):
            self._see_worker(self.current)  # others may have left
        self._hands.configuring.look()
        if self._files.look():
            self._tell_wanted()

    def _tell_wanted(self) -> None:
        """Something else is wanted than before, although nothing was applied: it is noted what follows from that."""
        if self._running is not None:
            steps = self._controller.preview(self._desired())
            changes = changes_between(self.current, self.current, steps)
            self._running.store.note(self.generation, changes, time.time())
            self._tell(control.Applied(self._desired(), warmth=self._traffic.warmth()))

    def _forget_the_gone(self) -> None:
        there = self._controller.instances()
        self._hands.directory.keep({one.id for one in there})
        kept = {one.name for one in self.current.deployments} | {one.deployment for one in there}
        self._hands.forget(kept, {(one.deployment, one.recipe) for one in there})

    # Talking with the controller

    def _absence(self, deployment: str) -> Unavailable:
        mine = [one for one in self._controller.instances() if one.deployment == deployment]
        lane = self._traffic.lanes.get(deployment)  # None: its deployment is gone
        return unavailability(mine, None if lane is None else lane.start_up_s, time.monotonic())

    def _tell(self, event: control.ControllerEvent) -> None:
        """Tell the controller, and do what it says. What happens meanwhile is told after that."""
        self._untold.append(event)
        if self._telling:
            return
        self._telling = True
        try:
            while self._untold:
                for command in self._controller.handle(self._untold.popleft(), time.monotonic()):
                    self._hands.carry_out(command)
        finally:
            self._telling = False
        if not len(self._controller):
            self._empty.set()
        self._announce()

    def _hear(self, event: control.ControllerEvent) -> None:
        """News of a process. What it was asked before it ended is not answered any more."""
        if isinstance(event, control.Exited):
            self._hands.prober.forget(event.instance_id)
        self._tell(event)

    def _requests_fail(self, instance_id: str, why: str) -> None:
        if self._running is not None:  # soon, not now: whoever says this is in the middle of something
            self._running.loop.call_soon(self._tell, control.RequestsFail(instance_id, why))

    def _deployment_of(self, instance_id: str) -> str:
        return next(one.deployment for one in self._controller.instances() if one.id == instance_id)

    def _announce(self) -> None:
        if self.listeners and not self._news_due:
            self._news_due = True
            asyncio.get_running_loop().call_soon(self._tell_listeners)

    def _tell_listeners(self) -> None:
        self._news_due = False
        for listener in list(self.listeners):
            listener()


def _save(store: Store, before: Revision, after: Revision, changes: Changes, rolled_back: str = "") -> int | None:
    """Store a revision. The generation of its manifest, None if that has not changed."""
    now, generation = time.time(), None
    known, manifest = before.manifest, after.manifest
    if manifest is not None and (known is None or (manifest.text, manifest.folder) != (known.text, known.folder)):
        generation = store.save_manifest(manifest, changes, now)
        changes = Changes()  # they are recorded once
    stored = store.applications()
    for name, one in after.deployed.items():
        if name == rolled_back:
            store.roll_back_application(name, changes, now)
        elif name not in stored or not one.is_same(before.deployed.get(name), stored[name]):
            store.save_application(name, one.document, changes, now)
    for name in stored:
        if name not in after.deployed and name not in after.broken:
            store.delete_application(name, changes, now)
    return generation
