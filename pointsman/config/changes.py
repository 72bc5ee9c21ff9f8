"""The differences between two plans, field by field, and which of them are destructive.

Enters: the plan in force, another plan, and what that means for instances. Leaves: changes, in reading order. The one
rule: values that may be secret are never among them.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pointsman.config.plan import DeploymentPlan, PointsmanPlan
from pointsman.config.schema import GatewaySpec, KeySpec
from pointsman.control import ReconcileStep, What
from pointsman.errors import PointsmanError
from pointsman.parameters import duration_text, is_duration, is_secret, without_secrets, yaml_name
from pointsman.render.text import quantity, text_table
from pointsman.scaling.limits import ScalingPlan

AFTER_A_RESTART = frozenset({"listen", "processes", "nodes", "grpcListen", "tls", "keepRecords", "upstream.maxTries"})
"""Settings of the gateway that take effect after a restart."""
OF_APPLICATION = frozenset({"interval", "timeLimit"})
"""Scaling settings of an application itself; the others are reported for its nodes."""
CHANGED = "changed"
"""The replacement for values that are not shown."""
MARK = "!"
"""The mark in front of destructive changes."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    what: str
    """For instances: start, stop, restart, replace, update, add, remove. Otherwise: open, close, policy, scaling,
    price, endpoints, configure, calls, workers, gateway."""
    subject: str
    """The instance, the deployment, or the setting."""
    why: str
    where: str = ""
    """For an instance that is started: its future place, or why there is none."""
    place: dict[str, Any] | None = None
    """The place as code, facts and text."""
    destructive: bool = False
    """Whether it is part of one of the `dangers`."""


class Changes(msgspec.Struct, frozen=True):
    """All changes; false if there are none."""

    steps: tuple[Change, ...] = ()
    dangers: tuple[str, ...] = ()
    """What is destructive about them, one sentence each; empty if nothing is."""
    confirmation: str = ""
    """Confirms exactly these changes to exactly the present state; empty if nothing is destructive."""

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return "no changes"
        heads, rows = ["what", "subject", "why"], [[step.what, step.subject, step.why] for step in self.steps]
        if any(step.where for step in self.steps):
            heads, rows = [*heads, "where"], [[*row, step.where] for row, step in zip(rows, self.steps, strict=True)]
        if not self.dangers:
            return text_table(heads, rows)
        marks = [MARK if step.destructive else "" for step in self.steps]
        table = text_table(["", *heads], [[mark, *row] for mark, row in zip(marks, rows, strict=True)])
        return "\n".join([table, "", *(f"{MARK} destructive: {danger}" for danger in self.dangers)])

    def summary(self) -> str:
        """A summary in one line: how many changes of which kinds."""
        counts: dict[str, list[str]] = {}
        for step in self.steps:
            counts.setdefault(step.what, []).append(step.subject)
        return "; ".join(
            f"{what} {subjects[0]}" if len(subjects) == 1 else f"{what} {subjects[0]} and {len(subjects) - 1} more"
            for what, subjects in counts.items()
        )


class NotConfirmed(PointsmanError):
    """A destructive change that was not confirmed, or not in its present form. Nothing was changed."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        dangers = "; ".join(changes.dangers)
        super().__init__(f"nothing was changed, because this is destructive and needs a confirmation: {dangers}")


class Outlook(msgspec.Struct, frozen=True):
    """The effect on instances if a plan comes into force."""

    steps: Sequence[ReconcileStep] = ()
    running: Mapping[str, int] = {}
    """Instances that run now, by deployment."""
    wanted: Mapping[str, int] = {}
    """Number of desired instances after it, by deployment."""


def changes_between(before: PointsmanPlan | None, after: PointsmanPlan, outlook: Outlook) -> Changes:
    """The differences between two plans, and their effect on instances. `before`: None if none is in force."""
    old = PointsmanPlan() if before is None else before
    found = [*_of_applications(old, after), *_of_deployments(old, after)]
    for step in outlook.steps:
        where = ("", None) if step.where is None else (str(step.where), step.where.as_dict())
        found.append(Change(step.what.value, step.subject, str(step.why), *where))
    if before is not None:
        found += _of_workers(before, after)
        found += _of_gateway(before.gateway, after.gateway)
    return _marked(found, [*_of_authentication(old, after), *_of_names(old, after), *_of_instances(outlook)])


# Destructive changes


class Danger(msgspec.Struct, frozen=True):
    text: str
    marks: frozenset[tuple[str, str]]
    """(what, subject) of its changes."""


def _marked(steps: Sequence[Change], dangers: Sequence[Danger]) -> Changes:
    marks = {mark for danger in dangers for mark in danger.marks}
    marked = [
        msgspec.structs.replace(step, destructive=True) if (step.what, step.subject) in marks else step
        for step in steps
    ]
    return Changes(tuple(marked), tuple(danger.text for danger in dangers))


def _of_authentication(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Danger]:
    old, new = before.gateway, after.gateway
    if old.keys and not new.keys:
        text = "it removes authentication: the gateway has keys now, and would serve requests without any"
        yield Danger(text, frozenset({("gateway", "gateway.keys")}))
    if old.admin_key_sha256 and not new.admin_key_sha256:
        text = "it removes the admin key: the admin API would not be reachable over the network any more"
        yield Danger(text, frozenset({("gateway", "gateway.adminKeySha256")}))


def _of_names(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Danger]:
    """The danger that all deployments, or all applications, are removed."""
    kinds = {
        "deployment": [{one.name for one in plan.deployments if not one.internal} for plan in (before, after)],
        "application": [{one.name for one in plan.applications} for plan in (before, after)],
    }
    for noun, (old, new) in kinds.items():
        if old and not old & new:
            there = f"the only {noun}, {min(old)}" if len(old) == 1 else f"all {len(old)} {noun}s"
            yield Danger(f"it removes {there}", frozenset(("close", name) for name in old))


def _of_instances(outlook: Outlook) -> Iterator[Danger]:
    surplus = {name: count - outlook.wanted.get(name, 0) for name, count in outlook.running.items()}
    gone, running = sum(max(count, 0) for count in surplus.values()), sum(outlook.running.values())
    if gone * 2 > running:
        fewer = {name for name, count in surplus.items() if count > 0}
        marks = {
            (step.what.value, step.subject)
            for step in outlook.steps
            if step.what in (What.STOP, What.REMOVE, What.REPLACE) and step.deployment in fewer
        }
        yield Danger(f"it takes away {gone} of {quantity(running, 'instance')} that run", frozenset(marks))


# Applications and deployments


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
        if text := ", ".join(scaling):
            yield Change("scaling", name, text)
        old, new = known[name].user_configs, plan.user_configs
        for deployment in [one.name for one in plan.deployments]:
            there = any(one.name == deployment for one in known[name].deployments)
            if there and old.get(deployment) != new.get(deployment):
                fields = ", ".join(field for field, *_ in differences(old.get(deployment), new.get(deployment)))
                which = f"userConfig ({fields})" if fields.strip() else "userConfig"
                yield Change("configure", deployment, f"its {which} has changed; no restart is needed")


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
            new = "calls of its application" if plan.internal else f'requests for "{plan.model}"'
            yield Change("open", name, f"new: it takes {new}; {plan.decided_by} decides where they go")


def _of_deployment(before: DeploymentPlan, after: DeploymentPlan) -> Iterator[Change]:
    if before.scheduling_recipe != after.scheduling_recipe:
        old, new = before.decided_by, after.decided_by
        if old != new:
            yield Change("policy", after.name, f"{old} -> {new}")
        else:
            for text in field_texts(_decoded(before.scheduling_recipe), _decoded(after.scheduling_recipe)):
                yield Change("policy", after.name, f"{new}: {text}")
    if before.shadow_recipe != after.shadow_recipe:
        names = ", ".join(one.name for one in after.shadow) or "none"
        yield Change("shadow", after.name, f"candidates: {names}")
    if scaling := ", ".join(_of_scaling(before.scaling, after.scaling)):
        yield Change("scaling", after.name, scaling)
    for text in field_texts(_written(before.price), _written(after.price)):
        yield Change("price", after.name, text)
    if before.endpoints_file != after.endpoints_file:
        yield Change("endpoints", after.name, _arrow(before.endpoints_file, after.endpoints_file))


def _of_scaling(
    before: ScalingPlan | None,
    after: ScalingPlan | None,
    default: str = "a fixed number",
    settings: Container[str] | None = None,
) -> Iterator[str]:
    """The differences in words. `default` stands for no plan; with `settings`, only these are reported."""
    old, new = (default if one is None else one.policy_name or "its application's policy" for one in (before, after))
    if old != new:
        yield _arrow(old, new)
    if before is None or after is None:
        return
    if old == new and (before.recipe, before.metrics) != (after.recipe, after.metrics):
        for text in field_texts(_policy_settings(before), _policy_settings(after)):
            yield f"{new}: {text}"
    limits, limits_after = _settings_of(before), _settings_of(after)
    for name in limits:
        if limits[name] != limits_after[name] and (settings is None or name in settings):
            yield f"{name} {_arrow(limits[name], limits_after[name])}"


def _policy_settings(plan: ScalingPlan) -> dict[str, Any]:
    _, parameters, metrics, code = (*_decoded(plan.recipe), None, None, None, None)[:4]
    return {"parameters": parameters or {}, "metrics": metrics or [], "code": code or {}}


def _settings_of(plan: ScalingPlan) -> dict[str, Any]:
    """Names and values, written as in a manifest."""
    return {**_written(plan.limits), "costPerReplicaHour": plan.cost_per_replica_hour}


# Workers and the gateway


def _of_workers(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Change]:
    for field, one, other in differences(_written(before.workers), _written(after.workers), "workers"):
        yield Change("workers", field, _arrow(one, other))
    for field, one, other in differences(_written(before.runtime), _written(after.runtime), "runtime"):
        yield Change("runtime", field, f"{_arrow(one, other)}; takes effect after a restart")


def _of_gateway(before: GatewaySpec, after: GatewaySpec) -> Iterator[Change]:
    old, new = _written(before), _written(after)
    for name in old:
        if name == "keys":
            yield from _of_keys(before.keys, after.keys)
            continue
        for field, one, other in differences(old[name], new[name], name):
            change = CHANGED if is_secret(field) else _arrow(one, other)
            if is_secret(field) and not (one and other):
                change = "added" if other else "removed"
            late = "; takes effect after a restart" if {name, field} & AFTER_A_RESTART else ""
            yield Change("gateway", f"gateway.{field}", change + late)


def _of_keys(before: Sequence[KeySpec], after: Sequence[KeySpec]) -> Iterator[Change]:
    """How many keys of which tenants change; never the keys themselves."""
    old, new = {one.sha256: one for one in before}, {one.sha256: one for one in after}
    parts = []
    for word, keys, others in (("added", new, old), ("removed", old, new)):
        tenants = [one.tenant for digest, one in keys.items() if digest not in others]
        parts += [f"{quantity(tenants.count(tenant), 'key')} of {tenant} {word}" for tenant in dict.fromkeys(tenants)]
    changed = [one for digest, one in old.items() if digest in new and one != new[digest]]
    parts += [f"a key of {one.tenant} changed, now of {new[one.sha256].tenant}" for one in changed]
    if parts:
        yield Change("gateway", "gateway.keys", f"{', '.join(parts)}; {len(new) or 'none'} in force then")


# Field by field


def differences(before: Any, after: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(field, before, after) of all values that differ. Entries of lists that have names are compared by name; None
    stands for what is absent."""
    if before == after:
        return
    old, new = _named(before), _named(after)
    if before is None and new is not None and any(isinstance(one, dict | list) and one for one in new.values()):
        old = {}
    if after is None and old is not None and any(isinstance(one, dict | list) and one for one in old.values()):
        new = {}
    if old is None or new is None:
        yield field, before, after
        return
    for name in [*old, *(name for name in new if name not in old)]:
        if name == "name" and None in (before, after):
            continue  # the dot is part of the field
        yield from differences(old.get(name), new.get(name), f"{field}.{name}" if field else name)


def _named(value: Any) -> dict[str, Any] | None:
    """The entries of a mapping, or of a list whose entries have different names; None if it is neither."""
    if isinstance(value, dict):
        return {str(name): entry for name, entry in value.items()}
    if not isinstance(value, list | tuple) or not all(isinstance(one, dict) for one in value):
        return None
    names = [one.get("name") or one.get("pluginRef") or one.get("type") for one in value]
    return dict(zip(names, value, strict=True)) if all(names) and len(set(names)) == len(names) else None


def field_texts(before: Any, after: Any) -> Iterator[str]:
    """A text for each difference, without secrets."""
    for field, old, new in differences(before, after):
        if field.startswith("code"):
            yield "its code has changed"
            continue
        yield f"{field} {CHANGED if is_secret(field) else _arrow(old, new)}".lstrip()


def _decoded(recipe: str) -> Any:
    return msgspec.json.decode(recipe) if recipe else {}


def _written(value: Any) -> Any:
    """Plain data with names and times as in a manifest."""
    if isinstance(value, msgspec.Struct):
        return {
            yaml_name(field): duration_text(held) if is_duration(field.type) and held is not None else _written(held)
            for field in msgspec.structs.fields(value)
            for held in (getattr(value, field.name),)
        }
    if isinstance(value, list | tuple):
        return [_written(one) for one in value]
    return value


def _arrow(before: object, after: object) -> str:
    return f"{_shown(without_secrets(before))} -> {_shown(without_secrets(after))}"


def _shown(value: object) -> str:
    """A value on one line, without unset fields."""
    if value is None or value in ((), [], {}, ""):
        return "none"
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, dict):
        held = {name: entry for name, entry in value.items() if entry not in (None, (), [], {}, "") and name != "name"}
        return ", ".join(f"{name} {_shown(entry)}" for name, entry in held.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode().strip('"')
