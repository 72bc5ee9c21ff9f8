"""The steps of an application, encoded once, before a request comes."""

from typing import Any

import msgspec

from pointsman.config.nodes import deployment_name
from pointsman.config.plan import ApplicationPlan
from pointsman.pipeline import NodeKind, Step
from pointsman.pipeline.building import INGRESS
from pointsman.pipeline.flow import InputValue, StepResult, call_flow
from pointsman.pipeline.graph import filled
from pointsman.wire import CallHead, placeholder, template


class PreparedStep(msgspec.Struct, frozen=True):
    """A step with its encoded arguments. Blob numbers stand for the values that are not known yet."""

    step: Step
    deployment: str
    """The name of the step's lane. If the step calls a model, this is the name of the model."""
    args: msgspec.Raw
    kwargs: msgspec.Raw
    sources: tuple[InputValue | StepResult, ...]
    """The source of each blob's value."""

    @property
    def is_model(self) -> bool:
        return self.step.kind is NodeKind.MODEL


class PreparedApplication:
    """An application, ready to take requests."""

    def __init__(self, plan: ApplicationPlan) -> None:
        self.plan = plan
        self.name = plan.name
        self.flow = plan.flow
        self.steps = tuple(prepared(plan, step) for step in plan.flow.steps)
        paths = [[[access.key, access.attribute] for access in part.path] for part in plan.flow.inputs]
        self.input_parts = template({"paths": paths})
        """The parts of the input that the ingress must return."""
        self.ingress = deployment_name(plan.name, INGRESS) if plan.graph.has_ingress else ""
        """The deployment that makes the input; empty if the input is the JSON in the body."""


class PreparedCall(PreparedApplication):
    """One call of a node through a handle. The arguments are passed on unchanged, to all shards if there are
    several."""

    def __init__(self, application: PreparedApplication, head: CallHead, blobs: int) -> None:
        plan = application.plan
        self.plan = plan
        self.name = plan.name
        self.flow = call_flow(plan.graph, head.node, head.method)
        inputs = tuple(InputValue(index) for index in range(blobs))
        self.steps = tuple(
            prepared(plan, step)
            if step.needs  # the step joins what shards have returned
            else PreparedStep(step, deployment_of(plan, step.node, step.rank), head.args, head.kwargs, inputs)
            for step in self.flow.steps
        )
        self.input_parts = template({})
        self.ingress = ""


def prepared(plan: ApplicationPlan, step: Step) -> PreparedStep:
    sources: dict[Any, int] = {}

    def number(reference: Any) -> Any:
        whole = StepResult(reference.index) if isinstance(reference, StepResult) else reference
        return placeholder(sources.setdefault(whole, len(sources)), getattr(reference, "path", ()))

    args, kwargs = template(filled(step.args, number)), template(filled(step.kwargs, number))
    return PreparedStep(step, deployment_of(plan, step.node, step.rank), args, kwargs, tuple(sources))


def deployment_of(plan: ApplicationPlan, node: str, rank: int | None) -> str:
    """The deployment of a node, or of one of its shards. If the node is a model, the name of the model."""
    known = plan.graph.node(node)
    return known.code if known.kind is NodeKind.MODEL else deployment_name(plan.name, node, rank)
