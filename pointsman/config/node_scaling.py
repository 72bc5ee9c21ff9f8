"""The `scaling` of nodes: each its own, that of the application for all of them at once, or one for each alike."""

from collections.abc import Mapping
from typing import Any

from pointsman.config.plan import ScalingPlan
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.registry import scaling_policies
from pointsman.config.scaling import scaling
from pointsman.config.scaling_schema import ScalingSpec
from pointsman.config.validation import Validator
from pointsman.pipeline.graph import Node

OWN_POLICY = frozenset({"policy", "parameters"})
"""Whoever has one of these decides for itself."""


class NodeScaling:
    """Makes the plans of nodes. A built-in policy of the application is asked of each node alone; one of the author's
    own is asked once, and sees them all."""

    def __init__(self, written: Mapping[str, Any] | None, problems: Problems) -> None:
        self._problems = problems
        before = len(problems)
        self._common = None if written is None else self._spec(written, ("scaling",))
        self._alike = self._common is not None and self._common.policy in scaling_policies()
        made = scaling(self._common, problems, ("scaling",), replicas=None)
        self.of_application = None if self._alike else made
        """Asked for all nodes at once; None: each is asked alone, or nobody is."""
        self._broken = len(problems) > before

    def of(self, node: Node, path: FieldPath) -> ScalingPlan | None:
        """None: it always has as many replicas as its options say, or something is wrong and noted."""
        options, where = node.options, (*path, "scaling")
        replicas = options.num_replicas if self._problems.written((*path, "replicas")) else None
        if options.scaling is None:
            if self._common is None or self._broken:
                return None
            return scaling(self._common, self._problems, where, replicas=replicas, asked=self._alike)
        asked = self._common is None or bool(OWN_POLICY & options.scaling.keys())
        if not asked and self._alike and self._common is not None and not self._broken:
            own = {"policy": self._common.policy, "parameters": self._common.parameters, **options.scaling}
            return scaling(self._spec(own, where), self._problems, where, replicas=replicas)
        return scaling(self._spec(options.scaling, where), self._problems, where, replicas=replicas, asked=asked)

    def _spec(self, written: Mapping[str, Any], path: FieldPath) -> ScalingSpec:
        made: ScalingSpec = Validator(self._problems).value(dict(written), ScalingSpec, path)
        return made
