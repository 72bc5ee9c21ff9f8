"""Compares the desired state with the instances, and returns the next steps, each with its reason.

Enters: the desired state and the instances. Leaves: steps; nothing is changed. The one rule: steps that were carried
out are not returned again, except `REPLACE`, which is returned while it waits.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import msgspec

from pointsman.control.desired import PYTHON, Desired, DesiredDeployment, DesiredEndpoint
from pointsman.control.instances import Instance, Phase
from pointsman.parameters import without_secrets
from pointsman.placement.fleet import Fleet
from pointsman.placement.moves import victims
from pointsman.reasons import Reason
from pointsman.types import ExecutionInstance

# What has changed


def between_recipes(before: str, after: str) -> Reason:
    """The differences between the recipe that an instance was started from and another recipe."""
    unknown = Reason("recipe-differs")
    try:
        old, new = _flat(before), _flat(after)
    except (
        msgspec.DecodeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ):  # it was stored by another version of Pointsman
        return unknown
    return _changes(old, new) or unknown


def endpoint_recipe(spec: DesiredDeployment, endpoint: DesiredEndpoint) -> str:
    """The recipe of a server that was started elsewhere. Servers with different recipes are different servers."""
    facts = {"model": spec.model, "url": endpoint.url, "engine": endpoint.engine}
    more = {"servedModel": endpoint.served_model, "API key": endpoint.key}
    return msgspec.json.encode(facts | {name: value for name, value in more.items() if value}, order="sorted").decode()


def _flat(recipe: str) -> dict[str, Any]:
    decoded = msgspec.json.decode(recipe)
    if isinstance(decoded, dict):
        return decoded
    model, engine = decoded
    if engine is None:
        return {"model": model, "engine": None}
    kind, parameters = engine.pop("type"), engine.pop("parameters", {})
    variables = parameters.pop("env", None) or {}
    more = {f"engine.{name}": value for name, value in {**engine, **parameters}.items()}
    more |= {f"engine.env.{name}": value for name, value in variables.items()}
    if kind == PYTHON and "engine.version" in more:
        more["code version"] = more.pop("engine.version")  # users do not write this field
    return {"model": model, "engine": kind, **more}


def _facts(instance: ExecutionInstance) -> dict[str, Any]:
    labels = {f"label {name}": value for name, value in instance.labels.items()}
    facts = {
        "model": instance.model_name,
        "aliases": ", ".join(sorted(instance.adapters & instance.engine_names.keys())) or None,
        "adapters": ", ".join(sorted(instance.adapters - instance.engine_names.keys())) or None,
        "max_concurrency": instance.max_concurrency,
        "price per hour": instance.price_per_hour,
        "tokens per second": instance.throughput_tokens_per_sec,
        "messagesApi": "native" if instance.serves_messages else "translated",
    }
    return facts | labels


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Reason | None:
    names = [*before, *(name for name in after if name not in before)]
    changes = [
        {"field": name, "before": _shown(name, before.get(name)), "after": _shown(name, after.get(name))}
        for name in names
        if before.get(name) != after.get(name)
    ]
    return Reason("changed", {"changes": changes}) if changes else None


def _shown(name: str, value: Any) -> str:
    value = without_secrets(value, name)
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


WORTH = (Phase.READY, Phase.UNHEALTHY, Phase.EJECTED, Phase.STARTING, Phase.STOPPING, Phase.BACKING_OFF, Phase.DRAINING)
"""Phases of instances to keep when there are too many, best first."""

DRAIN_ASKED = Reason("drain-asked")


class What(Enum):
    START = "start"
    STOP = "stop"
    """Stop an instance, which is drained first if it is in service."""
    KEEP = "keep"
    """Keep an instance that was draining because there were too many. It is wanted after all."""
    RESTART = "restart"
    """Restart an instance that is not in service: its process may end before the next one starts."""
    REPLACE = "replace"
    """Stop an instance in service after another has taken over. There is nothing to do now."""
    UPDATE = "update"
    ADD = "add"
    """Add a server that was started elsewhere."""
    REMOVE = "remove"
    """Remove a server that was started elsewhere. It is drained first."""


class ReconcileStep(msgspec.Struct, frozen=True):
    what: What
    subject: str
    """The instance, or the deployment whose lifecycle has changed."""
    why: Reason
    deployment: str
    endpoint: str = ""
    """The name of the server, if it was started elsewhere."""
    where: Reason | None = None
    """The place that the instance would get, or why there is no place; None if no place was looked for."""
    in_no_hurry: bool = False
    """Whether there is no drain timeout, because the instance is merely surplus."""


def reconcile(
    desired: Desired, observed: Iterable[Instance], *, shutting_down: bool = False, fleet: Fleet | None = None
) -> list[ReconcileStep]:
    """The next steps. With `shutting_down`, no instance is wanted any more. With `fleet`, surplus instances are stopped
    in an order that frees the most useful room first."""
    mine: dict[str, list[Instance]] = {}
    leaving: dict[str, list[Instance]] = {}
    taken = set()
    for instance in observed:
        taken.add(instance.id)
        (leaving if instance.leaving else mine).setdefault(instance.deployment, []).append(instance)
    wanted = {} if shutting_down else desired.deployments
    steps: list[ReconcileStep] = []
    for name, members in mine.items():
        if name not in wanted:  # these come first, to make room
            why = Reason("shut-down") if shutting_down else Reason("deployment-unwanted", {"deployment": name})
            steps += [_leave(instance, why) for instance in members]
    for name, spec in wanted.items():
        members = mine.get(name, [])
        back = [one for one in leaving.get(name, []) if one.may_stay and one.recipe == spec.recipe]
        steps += _processes(spec, [one for one in members if one.endpoint is None], back, taken, fleet)
        steps += _endpoints(spec, [one for one in members if one.endpoint is not None], taken)
    return steps


def lifecycle_steps(before: Desired, after: Desired) -> list[ReconcileStep]:
    """Changes of timeouts and limits. They are only reported: nothing is to be done."""
    steps = []
    for name, spec in after.deployments.items():
        known = before.deployments.get(name, spec).lifecycle
        changed = _changes(msgspec.structs.asdict(known), msgspec.structs.asdict(spec.lifecycle))
        if changed is not None:
            steps.append(ReconcileStep(What.UPDATE, name, changed, name))
    return steps


# Instances whose processes the plane starts


def _processes(
    spec: DesiredDeployment, members: list[Instance], back: list[Instance], taken: set[str], fleet: Fleet | None
) -> list[ReconcileStep]:
    """Steps with surge 1: at most one instance more than wanted. An outdated instance that serves is stopped only when
    enough others are ready. During a stopped rollout, the same applies to an instance that served before and has
    crashed. `back`: draining instances that may stay. They are preferred to new instances."""
    wanted = max(spec.replicas, 0) if spec.engine is not None else 0
    recipe = spec.recipe
    current: list[Instance] = []
    outdated: list[Instance] = []
    steps: list[ReconcileStep] = []
    stopped = any(one.halted for one in members)
    for instance in members:
        serves = instance.serving is not None or (stopped and instance.has_served)
        if serves and (instance.drain_asked or instance.recipe != recipe):
            outdated.append(instance)
        elif instance.drain_asked:
            steps.append(_leave(instance, DRAIN_ASKED))
        else:
            current.append(instance)
    count = Reason("replica-count", {"wanted": wanted, "present": len(current) + len(outdated)})
    current.sort(key=lambda one: (WORTH.index(one.phase), -one.warmth, *_number(one)))
    ready = sum(one.phase is Phase.READY for one in current[:wanted])
    held = _replace(outdated, max(wanted - ready, 0), recipe, steps)
    room = min(wanted, wanted + 1 - len(held))
    if fleet is not None and spec.ask is not None and len(current) > room:
        warmth = {one.id: one.warmth for one in current if one.phase is Phase.READY}
        gone = victims(fleet, list(warmth), len(warmth) - room, arrangement=spec.ask.arrangement, warmth=warmth)
        current.sort(key=lambda one: (WORTH.index(one.phase), one.id in gone, *_number(one)))
    steps += [msgspec.structs.replace(_leave(instance, count), in_no_hurry=True) for instance in current[room:]]
    for instance in current[:room]:
        steps += _amend(instance, spec, recipe)
    back = sorted(back, key=lambda one: (-one.warmth, *_number(one)))[: max(room - len(current), 0)]
    steps += [ReconcileStep(What.KEEP, one.id, count, spec.name) for one in back]
    for number in range(len(current) + len(back), room):
        why = count if number + len(held) < wanted else Reason("takes-over", {"instance": held[0].id})
        steps.append(ReconcileStep(What.START, _free_id(spec.name, taken), why, spec.name))
    return steps


def _amend(instance: Instance, spec: DesiredDeployment, recipe: str) -> list[ReconcileStep]:
    """The update or restart that a remaining instance needs."""
    if instance.recipe != recipe:
        return [ReconcileStep(What.RESTART, instance.id, between_recipes(instance.recipe, recipe), spec.name)]
    changed = _changed(instance, spec, None)
    return [ReconcileStep(What.UPDATE, instance.id, changed, spec.name)] if changed is not None else []


def _changed(instance: Instance, spec: DesiredDeployment, endpoint: DesiredEndpoint | None) -> Reason | None:
    """Why dispatchers must be sent an update of an instance; None if they need no update."""
    same = instance.spec is spec or instance.spec == spec
    if instance.foreign or (same and instance.endpoint == endpoint):
        return None
    return _changes(_facts(instance.served(True)), _facts(instance.served(True, spec, endpoint)))


def _replace(outdated: list[Instance], needed: int, recipe: str, steps: list[ReconcileStep]) -> list[Instance]:
    """The outdated instances that must still serve. The others are stopped: unhealthy ones first, then in order."""
    order = sorted(outdated, key=lambda one: (one.phase is Phase.READY, not one.drain_asked, *_number(one)))
    spare = max(len(order) - needed, 0)
    for index, instance in enumerate(order):
        why = DRAIN_ASKED if instance.drain_asked else between_recipes(instance.recipe, recipe)
        steps.append(ReconcileStep(What.STOP if index < spare else What.REPLACE, instance.id, why, instance.deployment))
    return order[spare:]


def _free_id(deployment: str, taken: set[str]) -> str:
    number = 1
    while f"{deployment}-{number}" in taken:
        number += 1
    taken.add(f"{deployment}-{number}")
    return f"{deployment}-{number}"


def _number(instance: Instance) -> tuple[int, str]:
    """Sorts m-2 before m-10."""
    return len(instance.id), instance.id


# Servers that were started elsewhere


def _endpoints(spec: DesiredDeployment, members: list[Instance], taken: set[str]) -> list[ReconcileStep]:
    wanted = {endpoint.name: endpoint for endpoint in reversed(spec.endpoints)}  # if two have the same name, the first
    steps = []
    named: dict[str, list[Instance]] = {}
    for one in members:
        named.setdefault(_name(one), []).append(one)
    for name, endpoint in reversed(wanted.items()):
        steps += _endpoint(spec, endpoint, named.get(name, []), taken)
    return steps + [_leave(one, Reason("endpoint-unlisted")) for one in members if _name(one) not in wanted]


def _endpoint(
    spec: DesiredDeployment, endpoint: DesiredEndpoint, members: list[Instance], taken: set[str]
) -> list[ReconcileStep]:
    """A server at another address is a different server. The old server serves until the new one is ready."""
    recipe = endpoint_recipe(spec, endpoint)
    current = [one for one in members if one.recipe == recipe]
    steps = []
    if not current:
        added = _free_endpoint_id(spec.name, endpoint.name, taken)
        listed = Reason("endpoint-listed", {"url": endpoint.url})
        steps.append(ReconcileStep(What.ADD, added, listed, spec.name, endpoint.name))
    for instance in current:
        changed = _changed(instance, spec, endpoint)
        if changed is not None:
            steps.append(ReconcileStep(What.UPDATE, instance.id, changed, spec.name, endpoint.name))
    taken_over = any(one.phase is Phase.READY for one in current)
    for instance in members:
        if instance.recipe != recipe:
            why = between_recipes(instance.recipe, recipe)
            if instance.serving is None or taken_over:
                steps.append(_leave(instance, why))
            else:
                steps.append(ReconcileStep(What.REPLACE, instance.id, why, spec.name, endpoint.name))
    return steps


def _free_endpoint_id(deployment: str, name: str, taken: set[str]) -> str:
    """The name of the endpoint, prefixed with its deployment if it is taken, and with a number if that is taken too."""
    found, number = name, 1
    while found in taken:
        found = f"{deployment}-{name}" if number == 1 else f"{deployment}-{name}-{number}"
        number += 1
    taken.add(found)
    return found


def _name(instance: Instance) -> str:
    return "" if instance.endpoint is None else instance.endpoint.name


def _leave(instance: Instance, why: Reason) -> ReconcileStep:
    what = What.STOP if instance.endpoint is None else What.REMOVE
    return ReconcileStep(what, instance.id, why, instance.deployment, _name(instance))
