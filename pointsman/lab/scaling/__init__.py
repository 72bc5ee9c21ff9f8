"""Scaling policies on recorded load: what they would have cost, and what would have gone unserved.

Enters: a series of request rates, a policy as it runs live, and how long a replica takes to start. Leaves:
replica-hours beside those of someone who knows the future, the share of requests that nobody was there for, and a plot.
The one rule: a policy sees what would have been measured by then, and never the future.
"""

from pointsman.lab.scaling.comparison import Comparison, Reactive, clairvoyant, compare, least_hours, static_peak
from pointsman.lab.scaling.plot import plot, plots
from pointsman.lab.scaling.reading import Series, UnreadableLoad, arrivals_of, chosen, rates_of
from pointsman.lab.scaling.replay import Replay, ReplayOutcome, Setting

__all__ = [
    "Series", "rates_of", "arrivals_of", "chosen", "UnreadableLoad",
    "Setting", "Replay", "ReplayOutcome",
    "least_hours", "static_peak", "clairvoyant", "Reactive",
    "compare", "Comparison",
    "plot", "plots",
]  # fmt: skip
