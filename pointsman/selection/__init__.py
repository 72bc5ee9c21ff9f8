"""The kernel: Source -> Filter -> Score -> Pick, over candidates of any kind.

Enters: a cycle (the request, the time, a seed) and a roster of candidates. Leaves: a result, or a failure with the
reason for every candidate. The one rule: nothing here depends on what a candidate is.
"""

from pointsman.selection.columns import Column, PerMembers, Positions, Roster
from pointsman.selection.labels import LabelExpression, LabelSelector
from pointsman.selection.pickers import MaxScorePicker, PowerOfTwoPicker, RandomPicker, WeightedRandomPicker
from pointsman.selection.plugins import (
    Cycle,
    Filter,
    Key,
    Picker,
    Producer,
    ProfileHandler,
    Rejected,
    RejectedEach,
    Scorer,
    SplitMix64,
    mixed,
    plugin_name,
)
from pointsman.selection.profile import Profile, ProfileFailure, ProfileResult, Ranked, Scored, Weighted
from pointsman.selection.scheduler import (
    FallbackProfileHandler,
    Scheduler,
    SchedulingFailure,
    SchedulingResult,
    SingleProfileHandler,
)
from pointsman.selection.trace import Trace

__all__ = [
    "Cycle", "Key", "Roster", "PerMembers", "Column", "Positions",
    "Producer", "Filter", "Scorer", "Picker", "ProfileHandler",
    "Rejected", "RejectedEach", "Scored", "Ranked", "Weighted",
    "Profile", "ProfileResult", "ProfileFailure",
    "Scheduler", "SchedulingResult", "SchedulingFailure", "SingleProfileHandler", "FallbackProfileHandler",
    "MaxScorePicker", "RandomPicker", "WeightedRandomPicker", "PowerOfTwoPicker",
    "LabelSelector", "LabelExpression",
    "Trace", "SplitMix64", "mixed", "plugin_name",
]  # fmt: skip
