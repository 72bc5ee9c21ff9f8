"""Whether a policy can do its work in the section where it stands: with its bounds, and what an instance costs.

Enters: policies that were made, the outer one and those inside it. Leaves: what is wrong, noted at its line, and what
the author should know. The one rule: nothing here depends on the load.
"""

from collections.abc import Iterator
from typing import Any

from pointsman.config.problems import FieldPath, Problems
from pointsman.config.scaling_schema import ScalingSpec
from pointsman.scaling.budget import Budget
from pointsman.scaling.combined import Combined
from pointsman.scaling.scheduled import Scheduled

HOURS_OF_A_MONTH = 28 * 24
"""At least."""


def check_sense(policy: Any, spec: ScalingSpec, problems: Problems, path: FieldPath) -> list[str]:
    """Notes; problems have been noted as such."""
    notes = []
    for one, where in _with_inner(policy, (*path, "parameters")):
        if isinstance(one, Budget):
            _check_budget(one, spec, problems, path, where)
        if isinstance(one, Scheduled):
            notes += [
                f'scaling: "{entry.cron}" wants {entry.replicas}, and there are never more than {spec.max} (max)'
                for entry, _ in one.entries
                if entry.replicas > spec.max
            ]
    return notes


def _with_inner(policy: Any, path: FieldPath) -> Iterator[tuple[Any, FieldPath]]:
    """A policy and all that it asks, each with the way to its parameters."""
    yield policy, path
    if isinstance(policy, Budget):
        yield from _with_inner(policy.policy, (*path, "policy", "parameters"))
    if isinstance(policy, Combined):
        for place, inner in enumerate(policy.policies):
            yield from _with_inner(inner, (*path, "policies", place, "parameters"))


def _check_budget(budget: Budget, spec: ScalingSpec, problems: Problems, section: FieldPath, path: FieldPath) -> None:
    cost = budget.cost if spec.cost_per_replica_hour is None else spec.cost_per_replica_hour
    if not cost:
        says = "a budget must know what a replica costs; write costPerReplicaHour, above 0, in this section"
        problems.add((*section, "costPerReplicaHour") if cost == 0 else section, says)
        return
    for name, money, hours in (("perHour", budget.per_hour, 1), ("perMonth", budget.per_month, HOURS_OF_A_MONTH)):
        least = spec.min * cost * hours
        if money is not None and money * (1 + 1e-9) < least:
            costs = f"{money:g} does not pay for min, which is {spec.min} and costs {least:g}"
            problems.add((*path, name), f"{costs}; raise it, or lower min")
