"""The `scheduling` of a deployment: a policy by its name, or the plugins of a picker."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.config.building import built
from pointsman.config.picker import picker_plan
from pointsman.config.plan import PickerPlan
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.registry import policies
from pointsman.config.schema import InlinePicker, SchedulingSpec
from pointsman.config.validation import INVALID, Validator
from pointsman.strategies import SchedulingPolicy


class Scheduling(msgspec.Struct, frozen=True):
    """How requests find their instances. Neither: what is wrong has been noted."""

    recipe: str = ""
    policy: SchedulingPolicy | None = None
    picker: PickerPlan | None = None


def scheduling(spec: SchedulingSpec | None, problems: Problems, path: FieldPath) -> Scheduling:
    """What a section builds. One that says nothing is the default picker."""
    how = SchedulingSpec() if spec is None else spec
    if how is INVALID or how.policy is INVALID or how.config is INVALID:
        return Scheduling()
    if how.policy and how.config is not None:
        problems.add(path, "has a policy and a config; keep one of them")
        return Scheduling()
    if how.policy:
        made = Scheduling(policy=policy(how.policy, how.parameters or {}, problems, path))
    else:
        if how.parameters:
            problems.add((*path, "parameters"), "belong to a policy; name one, such as policy: slo-aware")
        config = InlinePicker() if how.config is None else how.config
        made = Scheduling(picker=picker_plan(config, problems, (*path, "config"), queues=True))
    if len(problems):  # of the document: nothing of it will run
        return made
    return msgspec.structs.replace(made, recipe=msgspec.json.encode(how, order="sorted").decode())


def policy(name: str, parameters: Mapping[str, Any], problems: Problems, path: FieldPath) -> SchedulingPolicy | None:
    """The policy of this name; None after noting what is wrong."""
    kind = policies().find(name, problems, (*path, "policy"))
    made = built(kind, parameters, path, Validator(problems)) if kind is not None else INVALID
    return None if made is INVALID else made
