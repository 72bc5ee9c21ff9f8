"""What has changed, in words: from one recipe to another, from one lifecycle to another, of an instance in service."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.control.desired import DesiredDeployment, Lifecycle
from pointsman.types import ExecutionInstance

ABSENT = "none"


def between_recipes(before: str, after: str) -> str:
    """What an instance that was started from one recipe lacks of another."""
    try:
        old, new = _flat(before), _flat(after)
    except (
        msgspec.DecodeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ):  # written by who knows whom, and kept in a store
        return "it was started from another recipe"
    return _listed(old, new) or "it was started from another recipe"


def between_lifecycles(before: Lifecycle, after: Lifecycle) -> str:
    """Empty: they are the same."""
    return _listed(msgspec.structs.asdict(before), msgspec.structs.asdict(after))


def between_facts(before: ExecutionInstance, after: ExecutionInstance) -> str:
    """What those who send requests must be told anew; empty: nothing."""
    return _listed(_facts(before), _facts(after))


def endpoint_recipe(spec: DesiredDeployment, url: str, engine: str) -> str:
    """The recipe of a server that somebody else started. Where it differs, it is another server."""
    return msgspec.json.encode({"model": spec.model, "url": url, "engine": engine}, order="sorted").decode()


def _flat(recipe: str) -> dict[str, Any]:
    decoded = msgspec.json.decode(recipe)
    if isinstance(decoded, dict):
        return decoded
    model, engine = decoded
    if engine is None:
        return {"model": model, "engine": None}
    parameters = {f"engine.{name}": value for name, value in engine["parameters"].items()}
    return {"model": model, "engine": engine["type"], **parameters}


def _facts(instance: ExecutionInstance) -> dict[str, Any]:
    labels = {f"label {name}": value for name, value in instance.labels.items()}
    aliases = ", ".join(sorted(instance.adapters)) or None
    return {"model": instance.model_name, "aliases": aliases, "max_concurrency": instance.max_concurrency, **labels}


def _listed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    names = [*before, *(name for name in after if name not in before)]
    return ", ".join(
        f"{name} {_shown(before.get(name))} -> {_shown(after.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    )


def _shown(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
