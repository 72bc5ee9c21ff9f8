"""The `scaling` of a deployment, a node or an application: the name of a policy, and limits that apply to any policy.

Enters: a section. Leaves: a plan with the policy built, or problems. The one rule: a policy inside another, such as
max-of, is written like the outer one: {policy, parameters}.
"""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from pointsman.config.building import built
from pointsman.config.code import code_in
from pointsman.config.plan import PickerPlan
from pointsman.config.problems import FieldPath, Names, Problems
from pointsman.config.registry import scaling_policies
from pointsman.config.schema import ScalingSpec
from pointsman.config.validation import INVALID, Section, Validator, usable
from pointsman.errors import PointsmanError
from pointsman.parameters import is_url, quoted, unmarked
from pointsman.pipeline.graph import Node
from pointsman.scaling.limits import MetricQuery, ScalingLimits, ScalingPlan
from pointsman.scaling.policies.budget import Budget
from pointsman.scaling.policies.combined import Combined
from pointsman.scaling.policies.scheduled import Scheduled
from pointsman.scaling.policy import DeploymentView, PolicyFunction, ScalingPolicy, Wish

FIRST_WAIT_S = 300.0
"""How long requests wait for a first instance by default, if `min` is 0."""
MIN_INTERVAL_S = 0.1
MIN_HOURS_PER_MONTH = 28 * 24
POLICY_FIELDS = frozenset({"policy", "parameters"})
"""A node that sets one of these fields has its own policy."""


def scaling(
    spec: ScalingSpec | None, problems: Problems, path: FieldPath, *, replicas: int | None, own_policy: bool = True
) -> ScalingPlan | None:
    """The plan for a section; None if there is no section, or after reporting what is wrong.

    `replicas` is the value of the field beside the section. If it is set, it is the initial number of instances.
    `own_policy` says that the section has its own policy. Otherwise the policy of its application decides.
    """
    if spec is None or spec is INVALID:
        return None
    _check_bounds(spec, replicas, problems, path)
    if spec.interval_s is not INVALID and spec.interval_s < MIN_INTERVAL_S:
        why = "measuring and calling the policy take up to a millisecond each time"
        problems.add((*path, "interval"), f"must be at least 100ms, found {spec.interval_s * 1000:g}ms: {why}")
    queries = _queries(spec, problems, path)
    made = None
    if own_policy and spec.policy == "":
        problems.add((*path, "policy"), "must not be empty")
    elif own_policy and spec.policy and spec.parameters is not INVALID:
        made = policy(spec.policy, spec.parameters, problems, path)
    readable = INVALID not in (spec.min_replicas, spec.max_replicas, spec.cost_per_replica_hour)
    if made is not None and made is not INVALID and readable:
        _check_policy(made, spec, problems, path)
    if len(problems):
        return None
    limits = {name: getattr(spec, name) for name in ScalingLimits.__struct_fields__}
    if spec.initial_replicas is None:
        limits["initial_replicas"] = replicas
    parts = [spec.policy, spec.parameters, spec.metrics] if own_policy else []
    if own_policy and (code := code_in({"policy": spec.policy, "parameters": spec.parameters})):
        parts.append(code)
    recipe = msgspec.json.encode(parts, order="sorted")
    return ScalingPlan(
        policy=made,
        policy_name=spec.policy if own_policy else "",
        limits=ScalingLimits(**limits),
        recipe=recipe.decode(),
        metrics=queries,
        cost_per_replica_hour=spec.cost_per_replica_hour,
    )


def first_wait_s(plan: ScalingPlan | None, picker: PickerPlan | None) -> float | None:
    """How long requests wait while there is no instance; None if the queue decides. Most queues wait a minute. If `min`
    is 0, that is too short, because many models take longer to start."""
    if plan is None:
        return None
    has_flow_control = picker is not None and picker.flow_control is not None
    default_s = FIRST_WAIT_S if plan.limits.min_replicas == 0 and not has_flow_control else None
    return default_s if plan.limits.wait_s is None else plan.limits.wait_s


def _check_bounds(spec: ScalingSpec, replicas: int | None, problems: Problems, path: FieldPath) -> None:
    least, most = spec.min_replicas, spec.max_replicas
    if least is INVALID or most is INVALID:
        return
    if most < least:
        problems.add((*path, "max"), f"must be at least min, which is {least}, found {most}")
        return
    if replicas is not None and spec.initial_replicas is not None:
        problems.add((*path, "initial"), "replicas sets the same number; keep one of them")
    begins = {(*path, "initial"): spec.initial_replicas, (*path[:-1], "replicas"): replicas}
    for where, number in begins.items():
        if number is not None and number is not INVALID and not least <= number <= most:
            problems.add(where, f"must be between min and max of its scaling, {least} and {most}, found {number}")


def _queries(spec: ScalingSpec, problems: Problems, path: FieldPath) -> tuple[MetricQuery, ...]:
    names = Names("metric", problems)
    made = []
    for index, one in usable(spec.metrics):
        here = (*path, "metrics", index)
        names.take(one.name, here)
        if one.query == "":
            problems.add((*here, "query"), "must not be empty")
        if one.url is not INVALID and not is_url(one.url):
            problems.add((*here, "url"), f"expected http://host:port of a Prometheus, found {quoted(one.url)}")
        made.append(MetricQuery(one.name or "", one.url or "", one.query or ""))
    return tuple(made)


class InnerPolicy(Section, frozen=True):
    policy: str
    parameters: dict[str, Any] = {}  # noqa: RUF012 (each struct gets its own)


class PolicyValidator(Validator):
    """A validator that also builds policies that are parameters of other policies."""

    def value(self, data: Any, annotation: Any, path: FieldPath) -> Any:
        if data is not None and _is_policy(annotation):
            spec = super().value(data, InnerPolicy, path)
            if spec is INVALID or not spec.policy or spec.parameters is INVALID:
                return INVALID
            return policy(spec.policy, spec.parameters, self.problems, path)
        return super().value(data, annotation, path)


def _is_policy(annotation: Any) -> bool:
    """Whether a parameter is a single policy, and not a list of policies."""
    kind, _ = unmarked(annotation)
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return ScalingPolicy in members or PolicyFunction in members


def policy(name: str, parameters: Mapping[str, Any], problems: Problems, path: FieldPath) -> Any:
    """The policy with this name; INVALID after reporting what is wrong. If the document was in force before but the
    user's module no longer loads, the result is an `Unloadable`: the last target holds, and serving continues."""
    apart = problems.apart()
    kind = scaling_policies().find(name, apart, (*path, "policy"))
    made = INVALID if kind is None else built(kind, parameters, path, PolicyValidator(apart))
    if len(apart) and problems.was_in_force and ":" in name:
        return Unloadable("; ".join(problem.message for problem in apart))
    problems.take(apart)
    return made


class Unloadable:
    """Replaces a user's policy that no longer loads."""

    def __init__(self, why: str) -> None:
        self._why = why

    def desired_replicas(self, view: DeploymentView) -> Wish:
        raise PointsmanError(f"{self._why}; repair it, and restart the plane")


def _check_policy(policy: Any, spec: ScalingSpec, problems: Problems, path: FieldPath) -> None:
    """Check that a policy fits the bounds and the costs in its section."""
    most = spec.max_replicas
    for one, where in _with_inner(policy, (*path, "parameters")):
        if isinstance(one, Budget):
            _check_budget(one, spec, problems, path, where)
        if isinstance(one, Scheduled):
            for entry, _ in one.entries:
                if entry.replicas > most:
                    message = f'"{entry.cron}" wants {entry.replicas}, and there are never more than {most} (max)'
                    problems.warn(where, message)


def _with_inner(policy: Any, path: FieldPath) -> Iterator[tuple[Any, FieldPath]]:
    """A policy and all policies inside it, each with the path of its parameters."""
    yield policy, path
    if isinstance(policy, Budget):
        yield from _with_inner(policy.policy, (*path, "policy", "parameters"))
    if isinstance(policy, Combined):
        for index, inner in enumerate(policy.policies):
            yield from _with_inner(inner, (*path, "policies", index, "parameters"))


def _check_budget(budget: Budget, spec: ScalingSpec, problems: Problems, section: FieldPath, path: FieldPath) -> None:
    cost = budget.cost if spec.cost_per_replica_hour is None else spec.cost_per_replica_hour
    if not cost:
        says = "a budget must know what a replica costs; write costPerReplicaHour, above 0, in this section"
        problems.add((*section, "costPerReplicaHour") if cost == 0 else section, says)
        return
    for name, money, hours in (("perHour", budget.per_hour, 1), ("perMonth", budget.per_month, MIN_HOURS_PER_MONTH)):
        least = spec.min_replicas * cost * hours
        if money is not None and money * (1 + 1e-9) < least:
            costs = f"{money:g} does not pay for min, which is {spec.min_replicas} and costs {least:g}"
            problems.add((*path, name), f"{costs}; raise it, or lower min")


class NodeScaling:
    """The scaling plans of nodes. A built-in policy of the application is called for each node separately. A policy
    that the user wrote is called once, with all nodes."""

    def __init__(self, written: Mapping[str, Any] | None, problems: Problems) -> None:
        self._problems = problems
        before = len(problems)
        self._common = None if written is None else self._spec(written, ("scaling",))
        self._per_node = self._common is not None and self._common.policy in scaling_policies()
        made = scaling(self._common, problems, ("scaling",), replicas=None)
        self.of_application = None if self._per_node else made
        """The plan with the policy that is called for all nodes at once; None if there is no such policy."""
        self._broken = len(problems) > before

    def of(self, node: Node, path: FieldPath) -> ScalingPlan | None:
        """The plan for a node; None if its number of replicas is fixed, or after reporting what is wrong."""
        options, where = node.options, (*path, "scaling")
        replicas = options.num_replicas if self._problems.written((*path, "replicas")) else None
        if options.scaling is None:
            if self._common is None or self._broken:
                return None
            return scaling(self._common, self._problems, where, replicas=replicas, own_policy=self._per_node)
        own_policy = self._common is None or bool(POLICY_FIELDS & options.scaling.keys())
        if not own_policy and self._per_node and self._common is not None and not self._broken:
            own = {"policy": self._common.policy, "parameters": self._common.parameters, **options.scaling}
            return scaling(self._spec(own, where), self._problems, where, replicas=replicas)
        return scaling(
            self._spec(options.scaling, where), self._problems, where, replicas=replicas, own_policy=own_policy
        )

    def _spec(self, written: Mapping[str, Any], path: FieldPath) -> ScalingSpec:
        made: ScalingSpec = Validator(self._problems).value(dict(written), ScalingSpec, path)
        return made
