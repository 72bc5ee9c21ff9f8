"""From a load to a number of replicas that does not flap: up as soon as needed, down only with a margin."""

import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from pointsman.scaling.policy import DeploymentView, Window
from pointsman.scaling.windows import looking_back

# As types, for messages of the configuration; `checked` does the same for policies that are created in Python.

Above1 = Annotated[float, Meta(gt=1)]
AtLeast1 = Annotated[float, Meta(ge=1)]
Between0And1 = Annotated[float, Meta(gt=0, lt=1)]


def checked(name: str, value: float | None, above: float = 0.0) -> None:
    """Raise if a parameter is given and is not above this."""
    if value is not None and not value > above:
        raise ValueError(f"{name} must be above {above:g}, found {value:g}")


MARGIN = 0.1
"""Scale down only if fewer replicas could take a tenth more than the load."""


def replicas_for(exact: float, view: DeploymentView, margin: float = MARGIN) -> int:
    """A whole number of replicas for a load that takes `exact` replicas."""
    needed = _whole(exact)
    if needed >= view.target:
        return needed
    return min(view.target, _whole(exact * (1 + margin)))


def per_replica(load: float, what: str, each: float, replicas: int) -> str:
    """For example `12.4 requests, 2 per replica: 7`. Enough digits are shown to tell why 6 would be too few."""
    needed = _whole(load / each)
    shown = (f"{load:.{digits}f}" for digits in range(1, 7))
    enough = next((text for text in shown if _whole(float(text) / each) == needed), f"{load:g}")
    margin = ", with a margin of a tenth" if replicas > needed else ""
    return f"{enough} {what}, {each:g} per replica: {replicas}{margin}"


def ongoing_target(policy: object) -> float | None:
    """The number of requests, running or waiting, that a policy wants per replica. If it contains several policies, the
    highest of their numbers. None if the policy does not size by this number."""
    inner = [*getattr(policy, "policies", ()), *filter(None, [getattr(policy, "policy", None)])]
    own = getattr(policy, "ongoing_per_replica", None)
    found = [own] if isinstance(own, int | float) else []
    return max([*found, *filter(None, map(ongoing_target, inner))], default=None)


def _whole(exact: float) -> int:
    return math.ceil(exact - 1e-9)


def mean_of(windows: Mapping[float, Window], seconds: float, now: float) -> tuple[float, str]:
    """The mean over the last `seconds`, or else the present value; and which of the two it is."""
    window = looking_back(windows, seconds)
    if window is None or window.mean is None:
        return now, "now"
    return window.mean, f"mean of {window.seconds:g} s"


def mean_load(view: DeploymentView, seconds: float) -> tuple[float, str]:
    """The mean of all requests, running or waiting, as `mean_of` returns it."""
    ongoing, when = mean_of(view.ongoing_windows, seconds, view.ongoing)
    queued, _ = mean_of(view.queued_windows, seconds, view.queued)
    return ongoing + queued, when
