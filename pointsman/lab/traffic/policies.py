"""Routing policies to try. Each is a built-in policy, comes from a file, or is a user's class.

Enters: text from the command line. Leaves: a `scheduling` section, as written in a manifest. The one rule: the loader
of manifests loads the policy, so that the same policy runs here as would run live.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config import load_picker
from pointsman.config.problems import Problems
from pointsman.config.registry import plugins, policies
from pointsman.config.yaml import read_yaml, text_of
from pointsman.errors import PointsmanError, UnknownName
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Column, SchedulingResult


class TakesTurns:
    """A scorer for the policy `round-robin`: one endpoint after the other, whatever their load."""

    bounded = True

    def __init__(self) -> None:
        self._turn = 0

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        width = len(candidates)
        return [float(index == self._turn % width) for index in range(width)]

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None:
        self._turn += 1


def _profile(**weights: float) -> dict[str, Any]:
    """A `scheduling` section with these scorers and weights."""
    names = {name.replace("_", "-"): weight for name, weight in weights.items()}
    entries = [{"pluginRef": name, "weight": weight} for name, weight in names.items()]
    declared = [{"type": name} for name in names]
    return {"config": {"plugins": declared, "schedulingProfiles": [{"name": "default", "plugins": entries}]}}


LAB_POLICIES: dict[str, dict[str, Any]] = {
    "round-robin": {"config": {"plugins": [{"type": f"{__name__}:TakesTurns"}]}},
    "least-requests": _profile(active_request_scorer=1),
    "least-tokens": _profile(token_load_scorer=1),
    "published-default": {"config": {}},
    "prefix-and-tokens": _profile(prefix_cache_scorer=3, token_load_scorer=2, kv_cache_utilization_scorer=2),
    "tokens-times-requests": {
        "config": {"plugins": [{"type": "pending-work-scorer", "parameters": {"ownWeight": 1, "baseRequests": 1}}]}
    },
    "pending-work": {"config": {"plugins": [{"type": "pending-work-scorer"}]}},
    "default": {},
}
"""Policies for comparison, in addition to those that manifests know by name. `published-default` is the policy of an
empty EndpointPickerConfig. `default` is the policy of a deployment without `scheduling`."""


class TriedPolicy(msgspec.Struct, frozen=True):
    """A policy with the name that reports use."""

    name: str
    section: dict[str, Any]
    """The `scheduling` section of a deployment."""
    folder: str = ""
    """The folder with the users' classes that the section names. Empty if it is the current folder."""


def policy_of(text: str) -> TriedPolicy:
    """The policy that a text names: NAME, module:Class, NAME={parameters as JSON}, or a YAML file."""
    name, opened, rest = text.partition("={")
    parameters = _parameters("{" + rest, text) if opened else {}
    if name.endswith((".yaml", ".yml")):
        if opened:
            raise PointsmanError(f"{name} has its parameters in it; write them there")
        return _of_file(Path(name))
    if name in LAB_POLICIES and not parameters:
        return TriedPolicy(name, LAB_POLICIES[name])
    if policies().find(name, Problems("").apart(), ()) is not None:
        return TriedPolicy(text, {"policy": name, "parameters": parameters})
    if plugins().find(name, problems := Problems(""), ()) is not None:
        return TriedPolicy(text, {"config": {"plugins": [{"type": name, "parameters": parameters}]}})
    if ":" in name:
        problems.raise_if_any()
    raise UnknownName("policy", name, [*LAB_POLICIES, *(kind.name for kind in policies())])


def _parameters(text: str, whole: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PointsmanError(f'"{whole}": the parameters are not JSON: {error}') from None
    assert isinstance(found, dict), "it begins with a brace"
    return found


def _of_file(file: Path) -> TriedPolicy:
    """The policy in a file: an EndpointPickerConfig, or a `scheduling` section with or without that key above it."""
    data, problems = read_yaml(text_of(file), str(file))
    problems.raise_if_any()
    if not isinstance(data, dict):
        raise PointsmanError(f"{file}: expected an EndpointPickerConfig or a scheduling section, found no mapping")
    folder = str(file.absolute().parent)
    if data.keys() & {"kind", "plugins", "schedulingProfiles", "featureGates", "flowControl"}:
        load_picker(file)  # raises errors with line numbers
        body = {key: value for key, value in data.items() if key not in ("kind", "apiVersion")}
        return TriedPolicy(file.stem, {"config": body}, folder)
    section = data.get("scheduling", data)
    if not isinstance(section, dict) or not section.keys() & {"policy", "config"}:
        wanted = "plugins of an EndpointPickerConfig, or a scheduling section with policy or config"
        raise PointsmanError(f"{file}: expected {wanted}; found {', '.join(map(str, data)) or 'nothing'}")
    return TriedPolicy(file.stem, section, folder)


def distinct(tried: Sequence[TriedPolicy]) -> list[TriedPolicy]:
    """The policies. A number is appended to each repeated name."""
    seen: dict[str, int] = {}
    named = []
    for one in tried:
        seen[one.name] = count = seen.get(one.name, 0) + 1
        named.append(one if count == 1 else msgspec.structs.replace(one, name=f"{one.name} ({count})"))
    return named
