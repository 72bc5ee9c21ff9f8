"""Replays recorded load for scaling policies: what each would have cost, and which share of requests it would miss.

Enters: a series of request rates, a policy as it runs live, and the start-up time of a replica. Leaves: replica-hours
compared with those of references that know the future, the unserved share, and a plot. The one rule: at each moment, a
policy sees only what would have been measured by then.
"""

from pointsman.lab.scaling.comparison import Comparison, Reactive, clairvoyant, compare, least_hours, static_peak
from pointsman.lab.scaling.plot import plot, plots
from pointsman.lab.scaling.recording import (
    NamedPolicy,
    RecordedLoad,
    Series,
    UnreadableLoad,
    arrivals_of,
    chosen,
    load_of_file,
    load_of_plane,
    rates_of,
)
from pointsman.lab.scaling.replay import Replay, ReplayOutcome, Setting

__all__ = [
    "Series", "rates_of", "arrivals_of", "chosen", "UnreadableLoad",
    "RecordedLoad", "NamedPolicy", "load_of_file", "load_of_plane",
    "Setting", "Replay", "ReplayOutcome",
    "least_hours", "static_peak", "clairvoyant", "Reactive",
    "compare", "Comparison",
    "plot", "plots",
]  # fmt: skip
