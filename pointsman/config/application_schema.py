"""An `Application` document as types: nodes, calls of them, and what is answered."""
# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)

from typing import Annotated, Any, Literal

from msgspec import Meta

from pointsman.config.manifest import Amount, Count, Time
from pointsman.config.quantities import Quantity
from pointsman.config.section import Section
from pointsman.parameters import Spelled
from pointsman.pipeline.graph import CALL

Share = Annotated[float, Meta(gt=0, le=1)]
Size = Annotated[Quantity, Meta(ge=0)]


class OptionsSpec(Section, frozen=True, kw_only=True):
    """What can be said of a node. The defaults are those of `NodeOptions`."""

    replicas: Annotated[int, Meta(ge=0)] = 1
    shards: Count = 1
    """Processes that make up one replica: a call goes to all of them."""
    max_concurrency: Count = 16
    """Calls that a replica is given at once."""
    threads: Count = 1
    """How many of them run side by side, where the code is not async."""
    cpus: Amount = 0.0
    memory: Size = 0
    """Of the machine."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    gpu_memory: Size = 0
    """On each of its GPUs."""
    gpu_share: Share | None = None
    """Of each of its GPUs; others may have the rest."""
    labels: dict[str, str] = {}
    """That a worker must have to be chosen."""
    idempotent: bool = False
    """A call may be made again if its replica dies."""
    deadline_share: Share | None = None
    """Of the time that a request has in all, what a call of this node may take."""
    user_config: Any = None
    """Handed to `reconfigure`, before the first call and whenever it changes."""
    scheduling: dict[str, Any] | None = None
    """As of a deployment; left out: fifo."""
    scaling: dict[str, Any] | None = None
    """As of a deployment; left out: always `replicas`."""
    env: dict[str, str] = {}
    start_timeout: Time = 120.0
    health_check_period: Time = 2.0
    health_check_timeout: Time = 5.0
    graceful_shutdown: Time = 60.0
    """What calls under way get to end before a replica is stopped."""


class NodeSpec(OptionsSpec, frozen=True, kw_only=True):
    """One node: a class, a function, or a model of the manifest."""

    name: str
    class_: Annotated[str, Spelled("class")] = ""
    """path/to/file.py:Name, relative to this file, or package.module:Name."""
    function: str = ""
    model: str = ""
    """A model, or an alias of one, that the manifest serves."""
    args: list[Any] = []
    """Of the class: plain data; {$handle: NODE} is a handle to another node."""
    kwargs: dict[str, Any] = {}
    version: str = ""
    """Of the code. Another version is another program: its replicas are replaced."""
    joins: bool = False
    """What its shards return goes to its method `join`."""


class CallSpec(Section, frozen=True, kw_only=True):
    """A method of a node, called once per request."""

    id: str
    node: str
    method: str = CALL
    args: list[Any] = []
    """{$input: [0]} is a part of the input, {$step: ID} the result of a call before."""
    kwargs: dict[str, Any] = {}


class IngressSpec(OptionsSpec, frozen=True, kw_only=True):
    """What HTTP requests pass through first, if it has a preprocessor or a schema."""

    preprocessor: str = ""
    """Where the function is that makes the input of a request; left out: its JSON is the input."""
    schema: str = ""
    """Where the class is that the input must be one of."""
    version: str = ""


class ApplicationDocument(Section, frozen=True, kw_only=True):
    """A pipeline, as `pointsman build` writes it."""

    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Application"] = "Application"
    name: str
    """Where it is reached, as /NAME."""
    nodes: list[NodeSpec]
    calls: list[CallSpec] = []
    """In an order in which they can be made."""
    output: Any
    """Usually {$step: ID} of the last call; several are a list or a mapping."""
    ingress: IngressSpec = IngressSpec()
    python_path: list[str] = []
    """Folders where modules are found besides, relative to this file."""
    scaling: dict[str, Any] | None = None
    """Of all nodes at once: the policy sees them all, and its limits hold for nodes that have none of their own."""
