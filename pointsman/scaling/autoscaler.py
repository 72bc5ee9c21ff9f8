"""All scaled deployments and their policies: which policy is due, what it sees, and how its answer is applied.

Enters: the configuration, observations, and the answers of policies, each with the time. Leaves: calls for a runtime to
run, targets, and records. The one rule: a policy never runs in this module; a runtime runs the call, with a time limit.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.scaling.deployment import Load, ReplicaCounts, SavedDeployment, ScaledDeployment
from pointsman.scaling.guard import within
from pointsman.scaling.limits import ScalingPlan
from pointsman.scaling.policy import (
    ApplicationView,
    DeploymentView,
    StateTooLarge,
    TooSlow,
    by_node,
    copy_state,
    invoke_with_state,
    savable_state,
)
from pointsman.scaling.records import ScalingRecord


class DeploymentScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas a deployment has, as configured."""

    replicas: int = 1
    """The number of replicas if the deployment is not scaled."""
    plan: ScalingPlan | None = None
    """None if the deployment is not scaled."""
    follows: str = ""
    """The deployment whose number of replicas this one copies: the first shard of the node."""
    external: bool = False
    """Whether the deployment has no engine, but only servers that the plane does not start."""


class PolicyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A policy, and the deployments whose targets it decides."""

    name: str
    """The name of the deployment or application that has the policy."""
    plan: ScalingPlan
    nodes: Mapping[str, str]
    """Deployments, and the policy's names for them."""
    of_application: bool = False

    @property
    def key(self) -> str:
        """A unique key, because an application and a deployment may have the same name."""
        return f"application {self.name}" if self.of_application else self.name


class ScalingSetup(msgspec.Struct, frozen=True):
    """The configuration: all deployments, scaled or not, and all policies."""

    deployments: Mapping[str, DeploymentScaling] = {}
    policies: tuple[PolicyPlan, ...] = ()


class ActivePolicy:
    """A policy in force: its state, and when it is due."""

    def __init__(self, plan: PolicyPlan, state: MutableMapping[str, Any]) -> None:
        self.plan = plan
        self.state = state
        """State of an application's policy. The state of a deployment's policy is kept by the guard."""
        self.due_at: float | None = None
        """None if the policy is due at once."""
        self.running = False

    def is_due(self, now: float) -> bool:
        if self.running:
            return False
        # A clock that was set back must delay the call by at most its interval.
        return self.due_at is None or not 0 < self.due_at - now <= self.plan.plan.limits.interval_s

    def begin(self) -> None:
        """Begin a call; until `end` the policy is not due."""
        self.running, self.due_at = True, 0.0

    def end(self, now: float) -> None:
        """End a call: the policy is due again after its interval, or at once if it was woken in the meantime."""
        self.running = False
        if self.due_at is not None:
            self.due_at = now + self.plan.plan.limits.interval_s


class Invocation(msgspec.Struct, frozen=True, eq=False):
    """One call of a policy: run `call` anywhere, for at most `time_limit_s`."""

    policy: ActivePolicy
    views: Mapping[str, DeploymentView]
    """Views by deployment."""
    call: Callable[[], object]
    time_limit_s: float
    state: MutableMapping[str, Any]
    """State of an application's policy, which the call may change."""


class ScalingChange(msgspec.Struct, frozen=True):
    """The effect of a policy's answer or an operator's order."""

    records: tuple[ScalingRecord, ...] = ()
    retarget: bool = False
    """Whether a target has changed."""


class Autoscaler:
    """The targets of all scaled deployments."""

    def __init__(self) -> None:
        self.deployments: dict[str, ScaledDeployment] = {}
        self.policies: dict[str, ActivePolicy] = {}
        self._setup = ScalingSetup()

    def configure(
        self,
        setup: ScalingSetup,
        saved: Mapping[str, str],
        records: Callable[[str], Iterable[str]] = lambda _: (),
        running: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Apply a configuration. Targets, and the state of policies that have not changed, stay.

        `saved`: what `state` returned before a restart. `records`: the saved records of a deployment. `running`:
        instances that run now, by deployment, at which new targets begin. Returns the deployments that are no longer
        scaled.
        """
        begin = _beginning(setup.deployments, self._setup, saved, running or {})
        self._setup = setup
        scaled = _scaled(setup)
        deciding = scaled | {name: policy.plan for policy in setup.policies for name in policy.nodes}
        gone = [name for name in self.deployments if name not in scaled]
        for name in gone:
            del self.deployments[name]
        for name, plan in scaled.items():
            if name not in self.deployments:
                known = _decoded(saved.get(name, "{}"), SavedDeployment) or SavedDeployment()
                if name in begin:
                    known = SavedDeployment()  # anything that was saved is from an earlier period
                made = ScaledDeployment(name, plan, deciding[name], known, _records(records(name)), begin.get(name))
                self.deployments[name] = made
            one = self.deployments[name]
            one.configure(plan, deciding[name])
            one.followers = tuple(other for other, each in setup.deployments.items() if each.follows == name)
        self.policies = {plan.key: _active(plan, self.policies.get(plan.key), saved) for plan in setup.policies}
        return gone

    def targets(
        self,
        setup: ScalingSetup | None = None,
        saved: Mapping[str, str] | None = None,
        running: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """Replicas of scaled deployments and their followers, within the limits of `setup` (default: the setup in
        force). With `saved` and `running`, deployments that `configure` would begin to scale are included."""
        deployments = (setup or self._setup).deployments
        begin = _beginning(deployments, self._setup, saved or {}, running or {})
        found = {}
        for name, one in deployments.items():
            leader = one.follows or name
            plan = deployments[leader].plan if leader in deployments else None
            if plan is None:
                continue
            known = self.deployments.get(leader)
            target = begin.get(leader) if known is None else known.target
            if target is not None:
                found[name] = within(target, plan.limits)[0]
        return found

    # Policies

    def wake(self, deployment: str) -> None:
        """Make the policy due now, because a request waits and no instance takes requests."""
        for policy in self.policies.values():
            if any(deployment in one.members for one in self.members(policy)):
                policy.due_at = None

    def due(self, now: float) -> list[ActivePolicy]:
        return [policy for policy in self.policies.values() if policy.is_due(now)]

    def next_due_s(self, now: float) -> float | None:
        """Seconds until a policy is due; None if no policy will be due."""
        waiting = [one for one in self.policies.values() if not one.running]
        return min((0.0 if one.is_due(now) else (one.due_at or now) - now for one in waiting), default=None)

    def members(self, policy: ActivePolicy) -> list[ScaledDeployment]:
        return [self.deployments[name] for name in policy.plan.nodes if name in self.deployments]

    def invoke(
        self, policy: ActivePolicy, loads: Mapping[str, Load], replicas: Mapping[str, ReplicaCounts], now: float
    ) -> Invocation | None:
        """Take in the observations of a policy's deployments, and prepare a call; None if it has no deployments."""
        members = self.members(policy)
        for one in members:
            one.observed.observe_replicas(replicas[one.name], now)
            one.observed.observe_load(loads[one.name], now)
        views = {one.name: one.view(loads[one.name], now) for one in members}
        if not views:
            return None
        plan = policy.plan
        made, limit_s = plan.plan.policy, plan.plan.limits.time_limit_s
        if not plan.of_application:
            [view] = views.values()
            return Invocation(policy, views, lambda: invoke_with_state(made, view), limit_s, {})
        nodes = {plan.nodes[name]: msgspec.structs.replace(view, name=plan.nodes[name]) for name, view in views.items()}
        seen = ApplicationView(name=plan.name, now=now, deployments=nodes, state=copy_state(policy.state))
        return Invocation(policy, views, lambda: invoke_with_state(made, seen), limit_s, seen.state)

    def answered(self, invocation: Invocation, answer: object, now: float) -> ScalingChange:
        """Apply what a call returned or raised; `TooSlow` if it did not return in time."""
        policy, views = invocation.policy, invocation.views
        if self.policies.get(policy.plan.key) is not policy:
            return ScalingChange()  # the policy was replaced while it ran
        answers = dict.fromkeys(views, answer)
        if policy.plan.of_application:
            if not isinstance(answer, TooSlow | StateTooLarge):
                policy.state = dict(invocation.state)
            nodes = policy.plan.nodes
            by_name = by_node(answer, [nodes[name] for name in views if name in nodes])
            answers = {name: by_name[nodes[name]] for name in views if name in nodes}
        members = [one for one in self.members(policy) if one.name in answers]
        before = [one.target for one in members]
        records = [one.decide(views[one.name], answers[one.name]) for one in members]
        records += [one.report_trouble(now) for one in members]
        retarget = [one.target for one in members] != before
        return ScalingChange(tuple(record for record in records if record is not None), retarget)

    # Operators

    def find(self, name: str) -> ScaledDeployment:
        """A scaled deployment by its name, or as APP/NODE. Raises if there is none, or if it is not scaled."""
        known = self._setup.deployments
        found = name if name in known else name.replace("/", ".", 1)
        if found not in known and f"{found}.0" in known:
            found = f"{found}.0"  # the first shard of a node
        if found not in known:
            raise UnknownName("deployment", name, known)
        found = known[found].follows or found
        if found not in self.deployments:
            if known[found].external:
                raise PointsmanError(f'"{found}" has no engine: its servers are started by others, and are not scaled')
            number, example = known[found].replicas, "scaling: {min: 1, max: 4}"
            raise PointsmanError(
                f'"{found}" has a fixed number of instances, which is {number}; give it a section such as {example}'
            )
        return self.deployments[found]

    def override(self, name: str, replicas: int | None, for_s: float | None, by: str, now: float) -> ScalingChange:
        """Set the target for `for_s`, regardless of the policy; with no number, follow the policy again."""
        one = self.find(name)
        limits, before, known = one.guard.limits, one.target, one.guard.override
        if replicas is None:
            self.wake(one.name)
            record = one.keep(one.guard.release(now))
            return ScalingChange(() if record is None else (record,))
        if not limits.min_replicas <= replicas <= limits.max_replicas:
            between = f"between {limits.min_replicas} and {limits.max_replicas} (scaling.min and max)"
            raise PointsmanError(f'"{one.name}" must have {between}, found {replicas}')
        ordered = one.guard.set_override(replicas, None if for_s is None else now + for_s, by, now)
        repeated = known is not None and (known.replicas, known.by) == (replicas, by)  # as external scalers do
        if not repeated:
            one.keep(ordered)
        return ScalingChange(() if repeated else (ordered,), one.target != before)

    def state(self, deployments: Iterable[str] | None = None) -> dict[str, str]:
        """The state that survives a restart, of these deployments, or (None) of all and of applications' policies."""
        names = self.deployments if deployments is None else deployments
        saved = {name: msgspec.json.encode(self.deployments[name].saved()).decode() for name in names}
        for key, policy in self.policies.items() if deployments is None else ():
            if policy.plan.of_application:
                saved[key] = msgspec.json.encode([policy.plan.plan.recipe, savable_state(policy.state)]).decode()
        return saved


def _scaled(setup: ScalingSetup) -> dict[str, ScalingPlan]:
    return {name: one.plan for name, one in setup.deployments.items() if one.plan is not None}


def _beginning(
    wanted: Iterable[str], before: ScalingSetup, saved: Mapping[str, str], running: Mapping[str, int]
) -> dict[str, int]:
    """The number of running replicas of each deployment whose scaling would begin now. Deployments that were never
    configured continue from the saved state."""
    return {
        name: running[name]
        for name in wanted
        if running.get(name) and (name in before.deployments or name not in saved)
    }


def _active(plan: PolicyPlan, known: ActivePolicy | None, saved: Mapping[str, str]) -> ActivePolicy:
    """The policy that runs already, if it is the same; else a new policy with the saved state."""
    if known is None or known.plan.plan.recipe != plan.plan.recipe:
        recipe, state = _decoded(saved.get(plan.key, ""), tuple[str, dict[str, Any]]) or ("", {})
        known = ActivePolicy(plan, state if plan.of_application and recipe == plan.plan.recipe else {})
    known.plan = plan
    return known


def _decoded(text: str, kind: Any) -> Any:
    """The saved data; None if it was saved by another version."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(text, type=kind)
    return None


def _records(saved: Iterable[str]) -> Iterable[ScalingRecord]:
    return [record for text in saved if (record := _decoded(text, ScalingRecord)) is not None]
