"""From a load to a number of replicas that settles: more as soon as needed, fewer with something to spare."""

import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from pointsman.scaling.view import DeploymentView, Window
from pointsman.scaling.windows import looking_back

# What numbers may be as parameters: as types, by which configuration names all that are wrong, each at its line; and
# as a check, for policies that are made in Python.


Above1 = Annotated[float, Meta(gt=1)]
AtLeast1 = Annotated[float, Meta(ge=1)]
Between0And1 = Annotated[float, Meta(gt=0, lt=1)]


def checked(name: str, value: float | None, above: float = 0.0) -> None:
    """A parameter that must be above this, if it is given."""
    if value is not None and not value > above:
        raise ValueError(f"{name} must be above {above:g}, found {value:g}")


SPARE = 0.1
"""Fewer only if they could take a tenth more: a load that stays about the same changes nothing."""


def replicas_for(exact: float, view: DeploymentView, spare: float = SPARE) -> int:
    """So many whole ones for what would take exactly that many."""
    needed = _whole(exact)
    if needed >= view.target:
        return needed
    return min(view.target, _whole(exact * (1 + spare)))


def per_replica(load: float, what: str, each: float, replicas: int) -> str:
    """12.4 requests here, 2 per replica: 7. With as many digits as it takes to see why it is not one fewer."""
    needed = _whole(load / each)
    shown = (f"{load:.{digits}f}" for digits in range(1, 7))
    enough = next((text for text in shown if _whole(float(text) / each) == needed), f"{load:g}")
    spare = ", with a tenth to spare" if replicas > needed else ""
    return f"{enough} {what}, {each:g} per replica: {replicas}{spare}"


def _whole(exact: float) -> int:
    return math.ceil(exact - 1e-9)


def mean_of(windows: Mapping[float, Window], seconds: float, now: float) -> tuple[float, str]:
    """The mean of the last seconds, else what it is now; and how to call that."""
    window = looking_back(windows, seconds)
    if window is None or window.mean is None:
        return now, "now"
    return window.mean, f"mean of {window.seconds:g} s"


def mean_load(view: DeploymentView, seconds: float) -> tuple[float, str]:
    """The same of all requests that are here, running or waiting."""
    ongoing, when = mean_of(view.ongoing_windows, seconds, view.ongoing)
    queued, _ = mean_of(view.queued_windows, seconds, view.queued)
    return ongoing + queued, when
