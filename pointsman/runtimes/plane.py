"""The plane on any runtime: documents in force, the control loop, and scaling.

Enters: documents, and operators' orders. Leaves: running instances, lanes of traffic, and a status. The one rule: the
controller decides, the runtime carries its commands out, and everything that happens is reported to the controller.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

from pointsman.config.application import applications_status
from pointsman.config.changes import Changes, Outlook
from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText, Revision
from pointsman.control import Controller, Desired
from pointsman.control import events as control
from pointsman.control.instances import running_counts
from pointsman.control.status import deployments_status, given_up, is_ready, nothing_can_start
from pointsman.errors import PointsmanError
from pointsman.reasons import Reason
from pointsman.runtimes.autoscaling import MakePolicyCalls, PlaneScaling, PolicyLoop
from pointsman.runtimes.control_loop import ControlLoop
from pointsman.runtimes.documents import Documents
from pointsman.runtimes.event_log import Asker, EventLog
from pointsman.runtimes.instances import EngineInstances
from pointsman.runtimes.interface import BackgroundTasks, Clock, Runtime, Timer
from pointsman.runtimes.serving import PlaneTraffic
from pointsman.runtimes.stores import DocumentStore
from pointsman.scaling.deployment import scaling_summary
from pointsman.scaling.records import ScalingRecord

LOOK_S = 1.0
"""Interval of checks of endpoints files, and of workers that lack room."""
OVERTIME_S = 5.0
"""The runtime ends instances that have not stopped this long after their time limits."""


class Plane:
    """Runs documents on a runtime."""

    def __init__(
        self,
        runtime: Runtime,
        traffic: PlaneTraffic,
        *,
        clock: Callable[[], float] = time.time,
        policies: MakePolicyCalls = PolicyLoop,
    ) -> None:
        """`clock` returns Unix time, for data that must survive a restart. `policies` calls scaling policies."""
        self.runtime = runtime
        self.listeners: list[Callable[[], None]] = []
        self.reconfigured: list[Callable[[PointsmanPlan], None]] = []
        self.traffic = traffic
        self.instances = EngineInstances(
            runtime,
            traffic.load,
            lambda event: self.control.tell(event),
            lambda name: self.control.deployment_of(name),
        )
        self.control = ControlLoop(
            runtime.clock, self.instances, traffic.instances, handled=self._handled, failed=runtime.tasks.failed
        )
        self.documents = Documents(self._store, self._preview, self._enforce)
        self.events = EventLog(clock)
        self.documents.noted = partial(_note_documents, self.events, self.documents)
        self.scaling = PlaneScaling(
            traffic,
            self.control.controller,
            self._apply,
            lambda *told: self.control.tell(control.PlaceNeeded(*told)),
            clock,
            runtime.gpus,
            policies,
            runtime.tasks,
        )
        self.scaling.listen(partial(_note_target, self.events))
        self._is_running = False
        self._stopping: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()
        """Set when no instance is left."""
        self._looking: Timer | None = None
        self._changes = 0
        """The controller's `changes` as of the last announcement."""
        self._kept: tuple[int, PointsmanPlan] | None = None
        """The changes and the plan at the time when data that is no longer needed was last removed."""
        self._announcements = Announcements(runtime.clock, self.listeners, runtime.tasks)
        self._began = runtime.clock.now()
        self.beginning = FirstDocuments(self.control.controller, self.documents)

    @property
    def ready(self) -> bool:
        names = [one.name for one in self.documents.plan_in_force.deployments]
        at_zero = {one.name for one in self.scaling.each() if one.target == 0}
        return is_ready(names, self.control.controller.instances(), at_zero)

    # For operators

    async def start(
        self, document: ManifestText | None = None, prepare: Callable[[PointsmanPlan], Awaitable[None]] | None = None
    ) -> None:
        """Run a manifest, or an application by itself; None stands for the manifest last in force. Deployed
        applications stay, and processes of an earlier plane are adopted."""
        runtime = self.runtime
        await runtime.open()
        try:
            revision = self.documents.open(runtime.documents, document)
            if revision is None:
                where = runtime.facts()["state_dir"]
                raise PointsmanError(f"nothing was ever applied in {where}; give a manifest to start with")
            plan = revision.plan()
            if prepare is not None:
                await prepare(plan)
            adopted = await runtime.adopt(partial(_tell, self.traffic, self.control), self.traffic.load)
        except BaseException:
            await runtime.close()
            raise
        self._is_running = True
        self.traffic.hooks.failing = lambda *told: self.control.tell_soon(control.RequestsFail(*told))
        self.traffic.hooks.standing_out = lambda found: self.control.tell_soon(
            control.StandsOut(found.instance_id, found.reason, contradicted=found.contradicted > 0)
        )
        self.traffic.hooks.stirred = lambda name: _stir(runtime, self.control, name)
        self.traffic.hooks.unavailability = lambda name, start_up_s: self.control.unavailability(
            name, start_up_s, self.scaling.prospects(name)
        )
        self.traffic.hooks.failed = runtime.tasks.failed
        self.scaling.open(runtime.targets)
        runtime.look_at_workers(plan)
        for event in adopted:
            if not self.traffic.told(event):
                self.instances.adopted(event, plan)
                self.control.tell(event)
        self.documents.put_in_force(revision)
        self.beginning.begin()
        self._looking = runtime.tasks.every("plane watch", LOOK_S, self._look)

    async def stop(self) -> None:
        if self._stopping is None and self._is_running:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        clock, limits = self.runtime.clock, self.instances.lifecycles()
        limit_s = max((one.drain_timeout_s + one.stop_grace_s for one in limits), default=0.0) + OVERTIME_S
        if self._looking is not None:
            self._looking.cancel()
        try:
            self.scaling.close()
            self._empty.clear()
            overtime = clock.call_at(clock.now() + limit_s, self._empty.set)  # the runtime ends instances that are left
            self.control.tell(control.PlaneStopping())
            await self._empty.wait()
            overtime.cancel()
            self.instances.user_configs.close()
        finally:  # even after an error, no process may be left
            await self.runtime.close()
            self.control.stop_timer()
            self._is_running = False

    def status(self) -> dict[str, Any]:
        now, instances = self.runtime.clock.now(), self.control.controller.instances()
        internal = {one.name for one in self.documents.plan_in_force.deployments if one.internal}
        scaled = {one.name: {"scaling": scaling_summary(one)} for one in self.scaling.each()}
        desired = self.control.controller.desired or Desired()
        deployments = deployments_status(desired, instances, self.traffic.status, internal, now)
        problems = [
            *given_up(instances),
            *self.documents.files.problems(),
            *self.instances.loaded_code.problems(),
            *self.instances.user_configs.problems(),
            *self.runtime.problems(),
            *self.documents.revision.broken.values(),
            *self.scaling.problems(),
            *self.runtime.tasks.problems(),
            *self.traffic.problems(),
        ]
        return {
            "ready": self.ready,
            **self.runtime.facts(),
            "generation": self.documents.generation,
            "uptime_s": round(now - self._began, 3),
            "deployments": [
                one | scaled.get(one["name"], {}) | self.instances.user_configs.status_of(one["name"])
                for one in deployments
            ],
            "applications": applications_status(self.documents.plan_in_force),
            "problems": [one.as_dict() for one in problems],
        }

    # The documents in force

    def _store(self) -> DocumentStore:
        if not self._is_running:
            raise PointsmanError("this plane is not running; start it first")
        if self._stopping is not None:
            raise PointsmanError("this plane is being stopped, and makes no more changes")
        return self.runtime.documents

    def _preview(self, plan: PointsmanPlan, desired: Desired, retry: Collection[str]) -> Outlook:
        controller, wanted = self.control.controller, self.scaling.desired(desired, plan)
        return Outlook(
            controller.preview(wanted, retry),
            running_counts(controller.instances()),
            {name: one.replicas + len(one.endpoints) for name, one in wanted.deployments.items()},
        )

    def _enforce(self, plan: PointsmanPlan, folder: str, retry: Collection[str]) -> None:
        self.instances.configure(plan, folder)
        for call in self.reconfigured:
            call(plan)
        self.traffic.configure(plan.deployments)
        self.scaling.configure(plan)
        self.runtime.look_at_workers(plan)
        self._apply(retry)

    def _apply(self, retry: Collection[str] = ()) -> None:
        """Send the controller the desired state, according to documents, endpoints files and scaling targets."""
        if self._is_running:
            desired = self.scaling.desired(self.documents.files.desired())
            self.control.tell(control.Applied(desired, frozenset(retry), self.traffic.warmth()))

    def _look(self) -> None:
        controller, plan = self.control.controller, self.documents.plan_in_force
        instances, seen = controller.instances(), (controller.changes, plan)
        if seen != self._kept:
            self._kept = seen
            self.instances.keep(instances, [one.name for one in plan.deployments])
        if any(one.unplaced for one in instances):
            self.runtime.look_at_workers(plan)  # there may be room by now
        self.traffic.look(one.id for one in instances)
        self.instances.user_configs.retry()
        if self.documents.files.look():
            self._apply()

    def _handled(self, event: control.ControllerEvent) -> None:
        for change in self.control.controller.phase_changes:
            self.events.note_phase(change)
        if not len(self.control.controller):
            self._empty.set()
        if self.control.controller.changes != self._changes:
            self._changes = self.control.controller.changes
            self.beginning.changed()
            self._announcements.announce()


def _tell(traffic: PlaneTraffic, loop: ControlLoop, event: control.ControllerEvent) -> None:
    if not traffic.told(event):
        loop.tell(event)


def _note_documents(events: EventLog, documents: Documents, changes: Changes, summary: str, asker: Asker) -> None:
    events.forget({one.name for one in documents.plan_in_force.deployments})
    if changes:
        events.note("", Reason("documents-changed", {"changes": summary, "generation": documents.generation}), asker)


def _note_target(events: EventLog, record: ScalingRecord) -> None:
    facts = {"before": record.before, "after": record.after, "policy": record.policy, "text": record.in_words()}
    events.note(record.deployment, Reason("target-changed", facts), Asker(record.by))


def _stir(runtime: Runtime, loop: ControlLoop, instance_id: str) -> None:
    """Handle a request to an idle instance. Its probes are reported later, because the sender is still running."""
    loop.tell_soon(control.GotRequest(instance_id))
    runtime.clock.call_soon(runtime.probes.stir, instance_id)


class FirstDocuments:
    """`Beginning` of the interface."""

    def __init__(self, controller: Controller, documents: Documents) -> None:
        self._controller = controller
        self._documents = documents
        self._first: Revision | None = None
        """The revision that the plane was started with; None when it no longer matters."""

    def begin(self) -> None:
        self._first = self._documents.revision

    def changed(self) -> None:
        """Note a change of instances."""
        if self._first is not None and any(one.in_service for one in self._controller.instances()):
            self._first = None

    def futile(self) -> list[Reason]:
        if self._first is None or self._first is not self._documents.revision:
            return []
        controller = self._controller
        return nothing_can_start(controller.desired or Desired(), controller.instances(), controller.places.taken)


class Announcements:
    """Calls listeners once, soon after any number of events."""

    def __init__(self, clock: Clock, listeners: Sequence[Callable[[], None]], tasks: BackgroundTasks) -> None:
        self._clock = clock
        self._listeners = listeners
        self._tasks = tasks
        self._is_due = False

    def announce(self) -> None:
        if self._listeners and not self._is_due:
            self._is_due = True
            self._clock.call_soon(self._call)

    def _call(self) -> None:
        self._is_due = False
        for listener in tuple(self._listeners):
            self._tasks.attempt("status listeners", listener)
