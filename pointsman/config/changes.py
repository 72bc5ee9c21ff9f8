"""What applying a manifest would change, and why: for people to read before, and for the history after."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import msgspec

from pointsman.config.plan import DeploymentPlan, PointsmanPlan
from pointsman.config.schema import GatewaySpec
from pointsman.control import ReconcileStep
from pointsman.parameters import duration_text, yaml_name
from pointsman.render.text import text_table
from pointsman.scaling.limits import ScalingLimits, ScalingPlan

AFTER_A_RESTART = frozenset({"listen", "grpcListen", "tls", "keepRecords", "upstream.maxTries"})
"""Settings of the gateway that take effect after a restart."""
OF_APPLICATION = frozenset({"interval", "timeLimit"})
"""Scaling settings of an application itself; the others are reported for its nodes."""
SECRET = frozenset({"adminKeySha256", "keys", "tls"})
"""Settings whose values are not shown."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that changes."""

    what: str
    """Of instances: start, stop, restart, replace, update, add, remove. Else: open, close, policy, scaling, price,
    endpoints, configure, calls, workers, gateway."""
    subject: str
    """The instance, the deployment, or the setting."""
    why: str
    where: str = ""
    """Of an instance that is started: the place that it would get, or why there is none."""
    place: dict[str, Any] | None = None
    """The same as code, facts and text."""


class Changes(msgspec.Struct, frozen=True):
    """Everything that changes; false: nothing."""

    steps: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return "no changes"
        heads, rows = ["what", "subject", "why"], [[step.what, step.subject, step.why] for step in self.steps]
        if any(step.where for step in self.steps):
            heads, rows = [*heads, "where"], [[*row, step.where] for row, step in zip(rows, self.steps, strict=True)]
        return text_table(heads, rows)


def changes_between(before: PointsmanPlan | None, after: PointsmanPlan, steps: Iterable[ReconcileStep]) -> Changes:
    """What differs between two plans, and the steps that follow from it for instances."""
    old = PointsmanPlan() if before is None else before
    found = [*_of_applications(old, after), *_of_deployments(old, after)]
    for step in steps:
        where = ("", None) if step.where is None else (str(step.where), step.where.as_dict())
        found.append(Change(step.what.value, step.subject, str(step.why), *where))
    if before is not None:
        if before.workers != after.workers:
            found.append(Change("workers", "workers", _arrow(before.workers, after.workers)))
        found += _of_gateway(before.gateway, after.gateway)
    return Changes(tuple(found))


def _of_applications(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Change]:
    known = {plan.name: plan for plan in before.applications}
    wanted = {plan.name: plan for plan in after.applications}
    for name in known:
        if name not in wanted:
            yield Change("close", name, f"the application was removed, and /{name} with it")
    for name, plan in wanted.items():
        if name not in known:
            yield Change("open", name, f"new: the application takes requests at /{name}")
            continue
        if known[name].flow != plan.flow:
            yield Change("calls", name, "the calls of the application have changed")
        scaling = _of_scaling(known[name].scaling, plan.scaling, "a policy for each node", OF_APPLICATION)
        if scaling:
            yield Change("scaling", name, scaling)
        old, new = known[name].user_configs, plan.user_configs
        for deployment in [one.name for one in plan.deployments]:
            there = any(one.name == deployment for one in known[name].deployments)
            if there and old.get(deployment) != new.get(deployment):
                yield Change("configure", deployment, "its user config has changed; no restart is needed")


def _of_deployments(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Change]:
    known = {plan.name: plan for plan in before.deployments}
    wanted = {plan.name: plan for plan in after.deployments}
    for name, plan in known.items():
        if name not in wanted:
            gone = f'it was removed from the manifest, and "{plan.model}" with it'
            yield Change("close", name, "it is no longer a node of its application" if plan.internal else gone)
    for name, plan in wanted.items():
        if name in known:
            yield from _of_deployment(known[name], plan)
        else:
            new = "new: it takes calls of its application"
            yield Change("open", name, new if plan.internal else f'new: it takes requests for "{plan.model}"')


def _of_deployment(before: DeploymentPlan, after: DeploymentPlan) -> Iterator[Change]:
    if before.scheduling_recipe != after.scheduling_recipe:
        old, new = _decider(before), _decider(after)
        yield Change("policy", after.name, f"{old} -> {new}" if old != new else f"the settings of {new} have changed")
    scaling = _of_scaling(before.scaling, after.scaling)
    if scaling:
        yield Change("scaling", after.name, scaling)
    if before.price != after.price:
        yield Change("price", after.name, _arrow(before.price, after.price))
    if before.endpoints_file != after.endpoints_file:
        yield Change("endpoints", after.name, _arrow(before.endpoints_file, after.endpoints_file))


def _of_scaling(
    before: ScalingPlan | None,
    after: ScalingPlan | None,
    default: str = "a fixed number",
    settings: Container[str] | None = None,
) -> str:
    """The differences in words. `default`: stands for no plan. `settings`: report only these."""
    parts = [_of_policy(before, after, default)]
    if before is not None and after is not None:
        old, new = _settings_of(before), _settings_of(after)
        differ = [name for name in old if old[name] != new[name] and (settings is None or name in settings)]
        parts += [f"{name} {_arrow(old[name], new[name])}" for name in differ]
    return ", ".join(filter(None, parts))


def _of_policy(before: ScalingPlan | None, after: ScalingPlan | None, default: str) -> str:
    """The change of the policy or of its settings; empty if there is none."""
    old, new = (default if one is None else one.policy_name or "its application's policy" for one in (before, after))
    if old != new:
        return _arrow(old, new)
    same = before is None or after is None or (before.recipe, before.metrics) == (after.recipe, after.metrics)
    return "" if same else f"the settings of {new} have changed"


def _settings_of(plan: ScalingPlan) -> dict[str, object]:
    """Names and values as in a manifest."""
    limits = {yaml_name(field): getattr(plan.limits, field.name) for field in msgspec.structs.fields(ScalingLimits)}
    durations = {yaml_name(field) for field in msgspec.structs.fields(ScalingLimits) if field.name.endswith("_s")}
    return {
        name: duration_text(value)
        if name in durations and value is not None
        else f"{value:.15g}"
        if isinstance(value, float)
        else value
        for name, value in {**limits, "costPerReplicaHour": plan.cost_per_replica_hour}.items()
    }


def _decider(plan: DeploymentPlan) -> str:
    return "endpoint picker" if plan.policy is None else plan.policy.name


def _of_gateway(before: GatewaySpec, after: GatewaySpec) -> Iterator[Change]:
    old, new = _settings(before), _settings(after)
    for name in old:
        if old[name] != new[name]:
            change = "changed" if name in SECRET else _arrow(old[name], new[name])
            late = "; takes effect after a restart" if name in AFTER_A_RESTART else ""
            yield Change("gateway", f"gateway.{name}", change + late)


def _settings(spec: GatewaySpec) -> dict[str, Any]:
    """By their names in YAML; those of subsections with a dot."""
    settings = msgspec.to_builtins(spec)
    for part in ("limits", "upstream"):
        settings |= {f"{part}.{name}": value for name, value in settings.pop(part).items()}
    return dict(settings)


def _arrow(before: object, after: object) -> str:
    return f"{_shown(before)} -> {_shown(after)}"


def _shown(value: object) -> str:
    if value is None or value in ((), []):
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode().strip('"')
