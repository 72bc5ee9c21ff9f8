"""All deployments that are scaled: every interval they are looked at, and their policies asked."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from pointsman.config.plan import DeploymentPlan, PointsmanPlan
from pointsman.control import Controller, Desired, Phase
from pointsman.control.desired import Address
from pointsman.errors import PointsmanError, UnknownName
from pointsman.runtimes.local.scaling.deciders import ScalingDecider, deciders_of, who_decides
from pointsman.runtimes.local.scaling.gathering import Gatherer
from pointsman.runtimes.local.scaling.gpu_usage import GpuUsage
from pointsman.runtimes.local.scaling.remembering import ScalingStore
from pointsman.runtimes.local.scaling.room import RoomMaker
from pointsman.runtimes.local.scaling.scaled import Scaled
from pointsman.runtimes.local.scaling.telling import in_full, load_seen
from pointsman.runtimes.local.store import Store
from pointsman.runtimes.traffic import Lane, Traffic
from pointsman.scaling.limits import ScalingPlan
from pointsman.scaling.policy import policy_name
from pointsman.scaling.records import ScalingRecord

SAVE_S = 30.0
"""What was measured is saved so often; what was decided, at once."""


class Scaling:
    """All deployments that are scaled."""

    def __init__(
        self,
        traffic: Traffic,
        controller: Controller,
        retarget: Callable[[], None],
        evict: Callable[[str, str], None],
        clock: Callable[[], float] = time.time,
        gpu_usage: GpuUsage | None = None,
    ) -> None:
        """`retarget`: called when targets have changed, to tell the controller. `evict`: (instance, why) is called
        when somebody else needs its place."""
        self._traffic = traffic
        self._controller = controller
        self._retarget = retarget
        self._clock = clock
        self._gpu_usage = gpu_usage or GpuUsage()
        self._memory = ScalingStore()
        self._saved_at = 0.0
        self._scaled: dict[str, Scaled] = {}
        self._deciders: dict[str, ScalingDecider] = {}
        """By their keys."""
        self._left_behind: list[ScalingDecider] = []
        """Not asked any more; a call of theirs may go on all the same."""
        self._gatherers: dict[str, Gatherer] = {}
        self._plan = PointsmanPlan()
        self._room = RoomMaker(traffic, controller, self._scaled, evict)

    # What is in force

    def open(self, store: Store) -> None:
        """Go on where an earlier plane stopped."""
        self._memory.store = store
        self._traffic.wanted = self.wake

    def close(self) -> None:
        """Decide nothing any more."""
        self._save_all()
        self._memory.store = None
        for decider in self._deciders.values():
            if decider.task is not None:
                decider.task.cancel()
        self._deciders.clear()
        for gatherer in self._gatherers.values():
            gatherer.close()
        self._gpu_usage.close()

    def configure(self, plan: PointsmanPlan) -> None:
        """This is in force from now on, and its lanes are open. Targets that live go on living."""
        self._plan = plan
        wanted = {one.name: one for one in plan.deployments if one.scaling is not None}
        for name in [name for name in self._scaled if name not in wanted]:
            del self._scaled[name]
            self._gatherers.pop(name).close()
            self._memory.forget(name)
        states = self._memory.states()
        deciding = who_decides(plan)
        for name, one in wanted.items():
            assert one.scaling is not None
            if name not in self._scaled:
                saved, records = self._memory.state_of(name, states), self._memory.records_of(name)
                self._scaled[name] = Scaled(name, one.scaling, deciding[name], saved, records)
            self._scaled[name].configure(one.scaling, deciding[name])
            self._scaled[name].followers = tuple(each.name for each in plan.deployments if each.follows == name)
            self._listen(name)
            self._gather(one, one.scaling)
        self._ask_those_of(plan, states)

    def desired(self, wanted: Desired, plan: PointsmanPlan | None = None) -> Desired:
        """The same with the targets that live, as far as `plan` leaves room for them; None: what is in force."""
        told, targets, deployments = dict(wanted.deployments), dict[str, int](), (plan or self._plan).deployments
        for one in deployments:
            known = self._scaled.get(one.name)
            if one.scaling is None or known is None:
                continue
            limits = one.scaling.limits
            targets[one.name] = min(max(known.target, limits.min_replicas), limits.max_replicas)
        for one in deployments:
            leader = one.follows or one.name
            if leader in targets and one.name in told:
                told[one.name] = msgspec.structs.replace(told[one.name], replicas=targets[leader])
        return Desired(told)

    def _listen(self, name: str) -> None:
        one, clock = self._scaled[name], self._clock
        self._traffic.lanes[name].dispatcher.listen(lambda record: one.ended(record, clock()))

    def _gather(self, plan: DeploymentPlan, scaling: ScalingPlan) -> None:
        """Its policy sees numbers of somebody's own, if there are any."""
        name = plan.name
        if name not in self._gatherers:
            self._gatherers[name] = Gatherer(
                lambda: self._replicas(name), lambda metric, value: self._metric(name, metric, value)
            )
        gatherer = self._gatherers[name]
        gatherer.queries, gatherer.interval_s = scaling.metrics, scaling.limits.interval_s
        if plan.is_replica or scaling.metrics:
            gatherer.start()

    def _replicas(self, name: str) -> list[Address]:
        if not self._traffic.lanes[name].plan.is_replica:
            return []
        members = self._scaled[name].members
        ready = [one for one in self._controller.instances() if one.deployment in members and one.phase is Phase.READY]
        return [Address(one.host, one.port, one.tls) for one in ready]

    def _metric(self, name: str, metric: str, value: float) -> None:
        if name in self._scaled:
            self._scaled[name].metric(metric, value, self._clock())

    def _ask_those_of(self, plan: PointsmanPlan, states: Mapping[str, str]) -> None:
        """Policies that have not changed go on with what they know."""
        wanted = {one.key: one for one in deciders_of(plan)}
        for key in [
            key for key, one in self._deciders.items() if key not in wanted or one.recipe != wanted[key].recipe
        ]:
            gone = self._deciders.pop(key)
            if gone.task is not None:
                gone.task.cancel()
            self._left_behind.append(gone)
        for key, made in wanted.items():
            known = self._deciders.get(key)
            if known is None:
                if made.of_application:
                    made.notes = self._memory.notes_of(made, states)
                known = self._deciders[key] = made
                known.task = asyncio.get_running_loop().create_task(self._follow(known))
            known.nodes = made.nodes
            known.interval_s, known.time_limit_s = made.interval_s, made.time_limit_s

    # Every interval

    def wake(self, deployment: str) -> None:
        """A request waits, and no instance takes any: its policy is asked now, and not at its next turn."""
        for decider in self._deciders.values():
            if any(deployment in self._scaled[name].members for name in decider.nodes if name in self._scaled):
                decider.woken.set()

    async def _follow(self, decider: ScalingDecider) -> None:
        while True:
            try:
                await self._once(decider)
            except Exception as error:  # of ours: the next turn may go better
                failed = {"message": f"pointsman: scaling {decider.name} failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(failed)
            with suppress(TimeoutError):
                async with asyncio.timeout(decider.interval_s):
                    await decider.woken.wait()
            decider.woken.clear()

    async def _once(self, decider: ScalingDecider) -> None:
        looked_at = {name for one in self._members(decider) for name in one.members}
        await self._gpu_usage.read(looked_at, self._controller.instances())
        now, instances = self._clock(), self._controller.instances()
        members = self._members(decider)
        for one in members:
            one.look(self._lane(one), instances, now, self._gpu_usage.of(one.members, instances))
        views = {one.name: one.view(self._lane(one), now) for one in members}
        if not views:
            return
        answers = await decider.ask(views)
        if self._deciders.get(decider.key) is not decider:
            return  # another manifest came while it thought
        before = {one.name: one.target for one in members}
        records = [one.decide(views[one.name], answers[one.name]) for one in members if one.name in self._scaled]
        self._tell([*records, *(one.tell_trouble(now) for one in members)])
        if any(one.target != before[one.name] for one in members):
            self._retarget()
        self._find_places(members, now)
        if now - self._saved_at >= SAVE_S:
            self._save_all()

    def _members(self, decider: ScalingDecider) -> list[Scaled]:
        return [self._scaled[name] for name in decider.nodes if name in self._scaled]

    def _find_places(self, members: Iterable[Scaled], now: float) -> None:
        for one in members:
            seen = self._room.look(one, now)
            self._tell(seen.records)
            if seen.somebody_rests:
                self._retarget()

    # What operators ask

    def find(self, name: str) -> Scaled:
        """By the name of its deployment, or as APP/NODE. Raises if there is none, or if it is not scaled."""
        known = {one.name: one for one in self._plan.deployments}
        found = name if name in known else name.replace("/", ".", 1)
        if found not in known and f"{found}.0" in known:
            found = f"{found}.0"  # of a node with shards, which are told apart by their numbers
        if found not in known:
            raise UnknownName("deployment", name, known)
        found = known[found].follows or found
        if found not in self._scaled:
            number, example = known[found].desired.replicas, "scaling: {min: 1, max: 4}"
            raise PointsmanError(
                f'"{found}" has a fixed number of instances, which is {number}; give it a section such as {example}'
            )
        return self._scaled[found]

    def scale(self, name: str, replicas: int | None, for_s: float | None, by: str) -> None:
        """So many, for so long, whatever the policy says; None: as it says."""
        one, now = self.find(name), self._clock()
        limits, before = one.guard.limits, one.target
        if replicas is None:
            self._tell([one.keep(one.guard.release(now))])
            self.wake(one.name)
            return
        if not limits.min_replicas <= replicas <= limits.max_replicas:
            between = f"between {limits.min_replicas} and {limits.max_replicas} (scaling.min and max)"
            raise PointsmanError(f'"{one.name}" must have {between}, found {replicas}')
        known = one.guard.ordered
        record = one.guard.override(replicas, None if for_s is None else now + for_s, by, now)
        if known is None or (known.replicas, known.by) != (replicas, by):  # scalers say the same again and again
            self._tell([one.keep(record)])
        if one.target != before:
            self._retarget()

    def told(self, name: str) -> dict[str, Any]:
        """How many there are of a deployment, and why: plain data."""
        one, now = self.find(name), self._clock()
        one.see(self._controller.instances(), now)
        return in_full(one, self._lane(one), now)

    def load_seen(self, name: str) -> dict[str, Any]:
        """What has come for a deployment so far, to rehearse policies on: plain data."""
        one, now = self.find(name), self._clock()
        return load_seen(one, self._lane(one), now)

    def each(self) -> list[Scaled]:
        """All of them."""
        return list(self._scaled.values())

    def resting(self) -> set[str]:
        """Deployments that are to have no instance now."""
        return {one.name for one in self._scaled.values() if one.target == 0}

    def problems(self) -> list[str]:
        """What is wrong with which policy, and which number cannot be read, in words."""
        unread = [f'"{name}": {why}' for name, one in self._gatherers.items() for why in one.problems()]
        self._left_behind = [one for one in self._left_behind if one.is_thinking]
        unread += [
            f'a call of {policy_name(one.policy)}, which decides about "{one.name}" no more, does not return; '
            "it takes a core or a thread until the plane is started again"
            for one in self._left_behind
        ]
        return unread + [
            f'the scaling policy {one.policy_name} of "{one.name}" {one.guard.problem}; the target stays {one.target}'
            for one in self._scaled.values()
            if one.guard.problem
        ]

    def _lane(self, one: Scaled) -> Lane:
        return self._traffic.lanes[one.name]

    # Remembering

    def _tell(self, records: Iterable[ScalingRecord | None]) -> None:
        """Remember records, and what they are about."""
        told = [record for record in records if record is not None]
        if told:
            self._memory.keep(told)
            names = {record.deployment for record in told}
            self._memory.save([one for one in self._scaled.values() if one.name in names])

    def _save_all(self) -> None:
        self._saved_at = self._clock()
        self._memory.save(self._scaled.values(), self._deciders.values())
