"""What nobody can do better: replicas for a load that is known beforehand."""

from itertools import pairwise

from pointsman.lab.scaling.replay import ReplayOutcome, Setting
from pointsman.lab.scaling.series import Series


def least_hours(series: Series, capacity: float) -> float:
    """Replica-hours of the clairvoyant minimum: exactly what every bin needs, there at once."""
    return sum(series.needed(capacity)) * series.bin_s / 3600


def static_peak(series: Series, setting: Setting) -> ReplayOutcome:
    """As many as the peak needs, all the time."""
    need = series.needed(setting.capacity)
    return _served(series, setting, [max(need)] * len(need), max(need) * series.seconds / 3600)


def clairvoyant(series: Series, setting: Setting) -> ReplayOutcome:
    """Knows the future, and must start replicas early: every start costs from when it is ordered."""
    need = series.needed(setting.capacity)
    whole, part = divmod(setting.start_up_s, series.bin_s)
    # An order in the last part of a bin is there one bin later than an order in its first part.
    early = [max(need[place : place + int(whole) + 1]) for place in range(len(need))]
    late = [max(need[place : place + int(whole) + 2]) for place in range(len(need))]
    seconds = sum((series.bin_s - part) * first + part * then for first, then in zip(early, late, strict=True))
    return _served(series, setting, late if part else early, seconds / 3600)


def _served(series: Series, setting: Setting, replicas: list[int], hours: float) -> ReplayOutcome:
    changes = sum(before != after for before, after in pairwise(replicas))
    line = [(place * series.bin_s, count, count) for place, count in enumerate(replicas)]
    least = least_hours(series, setting.capacity)
    ratio = hours / least if least else 1.0
    return ReplayOutcome(
        hours=hours, ratio=ratio, unserved=0.0, changes=changes, most=max(replicas), problems=0, line=line, records=[]
    )
