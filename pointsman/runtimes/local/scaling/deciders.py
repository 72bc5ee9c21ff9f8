"""Who is asked how many there should be: the policy of one deployment, or that of an application for all its nodes."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.config.plan import ApplicationPlan, PointsmanPlan
from pointsman.runtimes.local.scaling.thinking import PolicyRunner
from pointsman.scaling.limits import ScalingPlan
from pointsman.scaling.policy import TooMuch, TooSlow, ask_with_notes, by_node, copied
from pointsman.scaling.view import ApplicationView, DeploymentView


class ScalingDecider:
    """A policy and the deployments that it decides about. It is asked every `interval_s`, and whenever it is woken."""

    def __init__(
        self, name: str, policy: Any, recipe: str, nodes: Mapping[str, str], notes: dict[str, Any] | None = None
    ) -> None:
        self.name = name
        """Of its deployment or application; see `key`."""
        self.policy = policy
        self.recipe = recipe
        """What the policy was made from."""
        self.nodes = dict(nodes)
        """Deployments -> the names that the policy has for them."""
        self.interval_s = 1.0
        self.time_limit_s = 0.5
        self.notes = notes
        """Of an application's policy: its own; None: it is of one deployment, whose guard has them."""
        self.woken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._runner = PolicyRunner(name)

    @property
    def key(self) -> str:
        """Tells it from all others: an application may be called as a deployment is."""
        return f"application {self.name}" if self.of_application else self.name

    @property
    def is_thinking(self) -> bool:
        """Whether its policy has not answered yet; one that hangs never will."""
        return self._runner.is_thinking

    @property
    def of_application(self) -> bool:
        """Whether it sees several deployments at once."""
        return self.notes is not None

    async def ask(self, views: Mapping[str, DeploymentView]) -> dict[str, object]:
        """What the policy says of each deployment: a number, a wish, or what went wrong."""
        if not self.of_application:
            [(deployment, view)] = views.items()
            return {deployment: await self._runner.ask(lambda: ask_with_notes(self.policy, view), self.time_limit_s)}
        by_name = {self.nodes[deployment]: view for deployment, view in views.items()}
        seen = ApplicationView(
            name=self.name,
            now=next(iter(views.values())).now,
            deployments={name: msgspec.structs.replace(view, name=name) for name, view in by_name.items()},
            state=copied(self.notes or {}),
        )
        answer = await self._runner.ask(lambda: ask_with_notes(self.policy, seen), self.time_limit_s)
        if not isinstance(answer, TooSlow | TooMuch):
            self.notes = dict(seen.state)
        found = by_node(answer, by_name)
        return {deployment: found[self.nodes[deployment]] for deployment in views}


def deciders_of(plan: PointsmanPlan) -> list[ScalingDecider]:
    """Who is asked in a plan: each deployment's own policy, and those of applications."""
    made = []
    for one in plan.deployments:
        if one.scaling is not None and one.scaling.policy is not None:
            decider = ScalingDecider(one.name, one.scaling.policy, one.scaling.recipe, {one.name: one.name})
            decider.interval_s = one.scaling.limits.interval_s
            decider.time_limit_s = one.scaling.limits.time_limit_s
            made.append(decider)
    for application in plan.applications:
        if application.scaling is not None:
            common, nodes = application.scaling, _asked_together(application)
            decider = ScalingDecider(application.name, common.policy, common.recipe, nodes, {})
            decider.interval_s, decider.time_limit_s = common.limits.interval_s, common.limits.time_limit_s
            made.append(decider)
    return made


def _asked_together(application: ApplicationPlan) -> dict[str, str]:
    """Deployments of an application that its policy decides about -> their nodes."""
    return {
        one.name: _node_of(one.name, application)
        for one in application.deployments
        if one.scaling is not None and one.scaling.policy is None
    }


def _node_of(deployment: str, application: ApplicationPlan) -> str:
    """What the author calls it: of a node with shards, the first of them is the one that is decided about."""
    node = deployment.removeprefix(f"{application.name}.")
    return node.removesuffix(".0") if any(one.follows == deployment for one in application.deployments) else node


def who_decides(plan: PointsmanPlan) -> dict[str, ScalingPlan]:
    """By deployment: its own section, or that of its application, if that has the policy that is asked."""
    deciding = {one.name: one.scaling for one in plan.deployments if one.scaling is not None}
    for application in plan.applications:
        if application.scaling is not None:
            deciding |= dict.fromkeys(_asked_together(application), application.scaling)
    return deciding
