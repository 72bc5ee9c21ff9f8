"""What a class can be used for, told from the methods that it has."""

import inspect
from typing import Any

from pointsman.routing.endpoints import Extractor
from pointsman.routing.plugins import (
    Admitter,
    Decider,
    DepartureListener,
    DispatchListener,
    HeaderWriter,
    ResponseHeaderWriter,
)
from pointsman.routing.queue import FairnessPolicy, OrderingPolicy, SaturationDetector, UsageLimitPolicy
from pointsman.selection import Filter, Picker, Producer, ProfileHandler, Scorer
from pointsman.strategies import SchedulingPolicy

ROLES: dict[str, Any] = {
    "filter": Filter,
    "scorer": Scorer,
    "picker": Picker,
    "profile handler": ProfileHandler,
    "producer": Producer,
    "extractor": Extractor,
    "decider": Decider,
    "admitter": Admitter,
    "fairness policy": FairnessPolicy,
    "ordering policy": OrderingPolicy,
    "usage limit policy": UsageLimitPolicy,
    "saturation detector": SaturationDetector,
    "dispatch listener": DispatchListener,
    "departure listener": DepartureListener,
    "header writer": HeaderWriter,
    "response header writer": ResponseHeaderWriter,
}


def roles_of(plugin: object) -> list[str]:
    """The roles that a plugin, or a class of plugins, fills."""
    return [role for role, protocol in ROLES.items() if isinstance(plugin, protocol)]


def is_plugin(made: type) -> bool:
    """Whether objects of this class can stand in the `plugins` of a document."""
    return bool(roles_of(made)) and not getattr(made, "_is_protocol", False) and not inspect.isabstract(made)


def is_scaling_policy(made: type) -> bool:
    """Whether objects of this class can say how many instances there are."""
    return callable(getattr(made, "desired_replicas", None)) and not inspect.isabstract(made)


def is_policy(made: type) -> bool:
    """Whether objects of this class can schedule a deployment."""
    return issubclass(made, SchedulingPolicy) and not inspect.isabstract(made)
