"""The differences between two plans, field by field, and which of them are destructive.

Enters: the plan in force, another plan, and what that plan means for instances. Leaves: changes, in reading order. The
one rule: changes never show values that may be secret.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pointsman.config.plan import DeploymentPlan, PointsmanPlan
from pointsman.config.schema import GatewaySpec, KeySpec
from pointsman.control import ReconcileStep, What
from pointsman.errors import PointsmanError
from pointsman.parameters import duration_text, is_duration, is_secret, without_secrets, yaml_name
from pointsman.reasons import Reason
from pointsman.render.text import text_table
from pointsman.scaling.limits import ScalingPlan

AFTER_A_RESTART = frozenset({"listen", "processes", "nodes", "grpcListen", "tls", "keepRecords", "upstream.maxTries"})
"""Settings of the gateway that take effect after a restart."""
OF_APPLICATION = frozenset({"interval", "timeLimit"})
"""Scaling settings of an application itself; all other scaling settings are reported for its nodes."""
MARK = "!"
"""The mark in front of destructive changes."""


class Change(msgspec.Struct, frozen=True):
    what: str
    """The kind of change. For instances: start, stop, restart, replace, update, add, remove. Otherwise: open, close,
    policy, scaling, price, endpoints, configure, calls, workers, gateway."""
    subject: str
    """The instance, the deployment or the setting that changes."""
    why: Reason
    place: Reason | None = None
    """The place that a started instance will get, or why there is no place for it."""
    destructive: bool = False
    """Whether the change belongs to one of the `dangers`."""

    @property
    def where(self) -> str:
        return "" if self.place is None else str(self.place)

    def as_dict(self) -> dict[str, Any]:
        told = {"what": self.what, "subject": self.subject, "why": str(self.why), "reason": self.why.as_dict()}
        if self.place is not None:
            told |= {"where": self.where, "place": self.place.as_dict()}
        return told | ({"destructive": True} if self.destructive else {})


class Changes(msgspec.Struct, frozen=True):
    """All changes. The object is false if there are no changes."""

    steps: tuple[Change, ...] = ()
    dangers: tuple[Reason, ...] = ()
    """What is destructive about the changes; empty if nothing is."""
    confirmation: str = ""
    """A code that confirms exactly these changes to exactly the present state; empty if nothing is destructive."""

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return "no changes"
        heads, rows = ["what", "subject", "why"], [[one.what, one.subject, str(one.why)] for one in self.steps]
        if any(step.where for step in self.steps):
            heads, rows = [*heads, "where"], [[*row, step.where] for row, step in zip(rows, self.steps, strict=True)]
        if not self.dangers:
            return text_table(heads, rows)
        marks = [MARK if step.destructive else "" for step in self.steps]
        table = text_table(["", *heads], [[mark, *row] for mark, row in zip(marks, rows, strict=True)])
        return "\n".join([table, "", *(f"{MARK} destructive: {danger}" for danger in self.dangers)])

    def as_dict(self) -> dict[str, Any]:
        """The JSON form. `destructive` has the texts of the `dangers`; `confirmation` confirms exactly these
        changes."""
        told = {"changes": [step.as_dict() for step in self.steps], "text": str(self)}
        dangers = {
            "destructive": [str(danger) for danger in self.dangers],
            "dangers": [danger.as_dict() for danger in self.dangers],
            "confirmation": self.confirmation,
        }
        return told | (dangers if self.dangers else {})

    def summary(self) -> str:
        """One line: the number of changes of each kind."""
        counts: dict[str, list[str]] = {}
        for step in self.steps:
            counts.setdefault(step.what, []).append(step.subject)
        return "; ".join(
            f"{what} {subjects[0]}" if len(subjects) == 1 else f"{what} {subjects[0]} and {len(subjects) - 1} more"
            for what, subjects in counts.items()
        )


class NotConfirmed(PointsmanError):
    """A destructive change was not confirmed, or the confirmation was for other changes. Nothing was changed."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        dangers = "; ".join(map(str, changes.dangers))
        super().__init__(f"nothing was changed, because this is destructive and needs a confirmation: {dangers}")


class Outlook(msgspec.Struct, frozen=True):
    """What a plan does to instances when it takes effect."""

    steps: Sequence[ReconcileStep] = ()
    running: Mapping[str, int] = {}
    """Instances that run now, by deployment."""
    wanted: Mapping[str, int] = {}
    """Number of instances that the plan asks for, by deployment."""


def changes_between(before: PointsmanPlan | None, after: PointsmanPlan, outlook: Outlook) -> Changes:
    """The differences between two plans, and their effect on instances. `before` is None if no plan is in force."""
    old = PointsmanPlan() if before is None else before
    found = [*_of_applications(old, after), *_of_deployments(old, after)]
    found += [Change(step.what.value, step.subject, step.why, step.where) for step in outlook.steps]
    if before is not None:
        found += _of_workers(before, after)
        found += _of_gateway(before.gateway, after.gateway)
    return _marked(found, [*_of_authentication(old, after), *_of_names(old, after), *_of_instances(outlook)])


# Destructive changes


class Danger(msgspec.Struct, frozen=True):
    why: Reason
    marks: frozenset[tuple[str, str]]
    """(what, subject) of each change that belongs to this danger."""


def _marked(steps: Sequence[Change], dangers: Sequence[Danger]) -> Changes:
    marks = {mark for danger in dangers for mark in danger.marks}
    marked = [
        msgspec.structs.replace(step, destructive=True) if (step.what, step.subject) in marks else step
        for step in steps
    ]
    return Changes(tuple(marked), tuple(danger.why for danger in dangers))


def _of_authentication(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Danger]:
    old, new = before.gateway, after.gateway
    if old.keys and not new.keys:
        yield Danger(Reason("removes-authentication"), frozenset({("gateway", "gateway.keys")}))
    if old.admin_key_sha256 and not new.admin_key_sha256:
        yield Danger(Reason("removes-admin-key"), frozenset({("gateway", "gateway.adminKeySha256")}))


def _of_names(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Danger]:
    """A danger if the plan removes all deployments, and another if it removes all applications."""
    kinds = {
        "deployment": [{one.name for one in plan.deployments if not one.internal} for plan in (before, after)],
        "application": [{one.name for one in plan.applications} for plan in (before, after)],
    }
    for noun, (old, new) in kinds.items():
        if old and not old & new:
            why = Reason("removes-all", {"kind": noun, "names": sorted(old)})
            yield Danger(why, frozenset(("close", name) for name in old))


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
        yield Danger(Reason("takes-away", {"instances": gone, "running": running}), frozenset(marks))


# Applications and deployments


def _of_applications(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Change]:
    known = {plan.name: plan for plan in before.applications}
    wanted = {plan.name: plan for plan in after.applications}
    for name in known:
        if name not in wanted:
            yield Change("close", name, Reason("application-removed", {"application": name}))
    for name, plan in wanted.items():
        if name not in known:
            yield Change("open", name, Reason("application-added", {"application": name}))
            continue
        if known[name].flow != plan.flow:
            yield Change("calls", name, Reason("calls-changed"))
        yield from _of_scaling(name, known[name].scaling, plan.scaling, "a policy for each node", OF_APPLICATION)
        old, new = known[name].user_configs, plan.user_configs
        for deployment in [one.name for one in plan.deployments]:
            there = any(one.name == deployment for one in known[name].deployments)
            if there and old.get(deployment) != new.get(deployment):
                fields = [field for field, *_ in differences(old.get(deployment), new.get(deployment))]
                yield Change("configure", deployment, Reason("user-config-changed", {"fields": fields}))


def _of_deployments(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Change]:
    known = {plan.name: plan for plan in before.deployments}
    wanted = {plan.name: plan for plan in after.deployments}
    for name, plan in known.items():
        if name not in wanted:
            gone = Reason("deployment-removed-with-model", {"model": plan.model})
            yield Change("close", name, Reason("node-removed") if plan.internal else gone)
    for name, plan in wanted.items():
        if name in known:
            yield from _of_deployment(known[name], plan)
        else:
            facts = {"model": None if plan.internal else plan.model, "decided_by": plan.decided_by}
            yield Change("open", name, Reason("deployment-added", facts))


def _of_deployment(before: DeploymentPlan, after: DeploymentPlan) -> Iterator[Change]:
    if before.scheduling_recipe != after.scheduling_recipe:
        old, new = before.decided_by, after.decided_by
        if old != new:
            yield Change("policy", after.name, _setting_changed("", old, new))
        else:
            for why in field_changes(_decoded(before.scheduling_recipe), _decoded(after.scheduling_recipe)):
                yield Change("policy", after.name, why.having(of=new))
    if before.shadow_recipe != after.shadow_recipe:
        names = [one.name for one in after.shadow]
        yield Change("shadow", after.name, Reason("candidates-changed", {"candidates": names}))
    yield from _of_scaling(after.name, before.scaling, after.scaling)
    for why in field_changes(_written(before.price), _written(after.price)):
        yield Change("price", after.name, why)
    if before.endpoints_file != after.endpoints_file:
        yield Change("endpoints", after.name, _setting_changed("", before.endpoints_file, after.endpoints_file))


def _of_scaling(
    name: str,
    before: ScalingPlan | None,
    after: ScalingPlan | None,
    default: str = "a fixed number",
    settings: Container[str] | None = None,
) -> Iterator[Change]:
    """The differences as one change. `default` replaces a missing plan. `settings` limits what is reported."""
    found = [why.facts for why in _scaling_changes(before, after, default, settings)]
    if found:
        yield Change("scaling", name, Reason("settings-changed", {"changes": found}))


def _scaling_changes(
    before: ScalingPlan | None, after: ScalingPlan | None, default: str, settings: Container[str] | None
) -> Iterator[Reason]:
    old, new = (default if one is None else one.policy_name or "its application's policy" for one in (before, after))
    if old != new:
        yield _setting_changed("", old, new)
    if before is None or after is None:
        return
    if old == new and (before.recipe, before.metrics) != (after.recipe, after.metrics):
        for why in field_changes(_policy_settings(before), _policy_settings(after)):
            yield why.having(of=new)
    limits, limits_after = _settings_of(before), _settings_of(after)
    for field in limits:
        if limits[field] != limits_after[field] and (settings is None or field in settings):
            yield _setting_changed(field, limits[field], limits_after[field])


def _policy_settings(plan: ScalingPlan) -> dict[str, Any]:
    _, parameters, metrics, code = (*_decoded(plan.recipe), None, None, None, None)[:4]
    return {"parameters": parameters or {}, "metrics": metrics or [], "code": code or {}}


def _settings_of(plan: ScalingPlan) -> dict[str, Any]:
    """The names and values of the settings, as a manifest writes them."""
    return {**_written(plan.limits), "costPerReplicaHour": plan.cost_per_replica_hour}


# Workers and the gateway


def _of_workers(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Change]:
    for field, one, other in differences(_written(before.workers), _written(after.workers), "workers"):
        yield Change("workers", field, _setting_changed("", one, other))
    for field, one, other in differences(_written(before.runtime), _written(after.runtime), "runtime"):
        yield Change("runtime", field, _setting_changed("", one, other).having(after_restart=True))


def _of_gateway(before: GatewaySpec, after: GatewaySpec) -> Iterator[Change]:
    old, new = _written(before), _written(after)
    for name in old:
        if name == "keys":
            yield from _of_keys(before.keys, after.keys)
            continue
        for field, one, other in differences(old[name], new[name], name):
            why = _setting_changed("", one, other)
            if is_secret(field):
                hidden = "changed" if one and other else "added" if other else "removed"
                why = Reason("setting-changed", {"field": "", "hidden": hidden})
            late = {"after_restart": True} if {name, field} & AFTER_A_RESTART else {}
            yield Change("gateway", f"gateway.{field}", why.having(**late))


def _of_keys(before: Sequence[KeySpec], after: Sequence[KeySpec]) -> Iterator[Change]:
    """The number of keys that change for each tenant, without the keys themselves."""
    old, new = {one.sha256: one for one in before}, {one.sha256: one for one in after}
    added, removed = (
        Counter(one.tenant for digest, one in keys.items() if digest not in others)
        for keys, others in ((new, old), (old, new))
    )
    moved = [
        {"before": one.tenant, "after": new[digest].tenant}
        for digest, one in old.items()
        if digest in new and one != new[digest]
    ]
    if added or removed or moved:
        facts = {"added": dict(added), "removed": dict(removed), "changed": moved, "in_force": len(new)}
        yield Change("gateway", "gateway.keys", Reason("keys-changed", facts))


# Field by field


def differences(before: Any, after: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(field, before, after) of all values that differ. List entries that have names are compared by name. None
    stands for an absent value."""
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
            continue  # the name is already a part of the field's path
        yield from differences(old.get(name), new.get(name), f"{field}.{name}" if field else name)


def _named(value: Any) -> dict[str, Any] | None:
    """The entries of a mapping, or of a list whose entries have different names; None for any other value."""
    if isinstance(value, dict):
        return {str(name): entry for name, entry in value.items()}
    if not isinstance(value, list | tuple) or not all(isinstance(one, dict) for one in value):
        return None
    names = [one.get("name") or one.get("pluginRef") or one.get("type") for one in value]
    return dict(zip(names, value, strict=True)) if all(names) and len(set(names)) == len(names) else None


def field_changes(before: Any, after: Any) -> Iterator[Reason]:
    """One reason for each difference. Reasons contain no secrets."""
    for field, old, new in differences(before, after):
        if field.startswith("code"):
            yield Reason("setting-changed", {"field": "code", "hidden": "code"})
        elif is_secret(field):
            yield Reason("setting-changed", {"field": field, "hidden": "changed"})
        else:
            yield _setting_changed(field, old, new)


def _decoded(recipe: str) -> Any:
    return msgspec.json.decode(recipe) if recipe else {}


def _written(value: Any) -> Any:
    """The value as plain data. Names and times are written as in a manifest."""
    if isinstance(value, msgspec.Struct):
        return {
            yaml_name(field): duration_text(held) if is_duration(field.type) and held is not None else _written(held)
            for field in msgspec.structs.fields(value)
            for held in (getattr(value, field.name),)
        }
    if isinstance(value, list | tuple):
        return [_written(one) for one in value]
    return value


def _setting_changed(field: str, before: object, after: object) -> Reason:
    """`field` is empty if the subject of the change already names the setting."""
    shown = {"before": _shown(without_secrets(before)), "after": _shown(without_secrets(after))}
    return Reason("setting-changed", {"field": field, **shown})


def _shown(value: object) -> str:
    """A value on one line. Unset fields are left out."""
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
