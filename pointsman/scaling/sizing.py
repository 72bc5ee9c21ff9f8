"""From a load to a number of replicas that settles: more as soon as needed, fewer with something to spare."""

import math
from collections.abc import Mapping

from pointsman.scaling.view import DeploymentView, Window
from pointsman.scaling.windows import looking_back

SPARE = 0.1
"""Fewer only if they could take a tenth more: a load that stays about the same changes nothing."""


def replicas_for(exact: float, view: DeploymentView, spare: float = SPARE) -> int:
    """So many whole ones for what would take exactly that many."""
    needed = math.ceil(exact - 1e-9)
    if needed >= view.target:
        return needed
    return min(view.target, math.ceil(exact * (1 + spare) - 1e-9))


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


def checked(name: str, value: float | None, above: float = 0.0) -> None:
    """A parameter that must be above this, if it is given."""
    if value is not None and not value > above:
        raise ValueError(f"{name} must be above {above:g}, found {value:g}")
