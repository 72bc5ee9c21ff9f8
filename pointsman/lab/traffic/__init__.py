"""Replays recorded traffic for routing policies: what each would have done, and how close that is to the possible best.

Enters: recorded or generated requests, policies, and a fleet that need not exist. Leaves: figures for each policy, side
by side. The one rule: a replay runs the product's own plane on virtual time, and the same seed gives the same figures.
"""

from pointsman.lab.traffic.arrivals import Arrival, ReplayLoad, arrivals
from pointsman.lab.traffic.bound import TrafficBound, bound, bound_capacity
from pointsman.lab.traffic.capacity import Capacity, capacities, capacity_table
from pointsman.lab.traffic.comparison import TrafficComparison, bounds_of
from pointsman.lab.traffic.fleets import LabFleet, fleet_of, fleet_of_manifest
from pointsman.lab.traffic.measures import Objectives, RunFigures, figures
from pointsman.lab.traffic.page import page
from pointsman.lab.traffic.policies import LAB_POLICIES, TriedPolicy, distinct, policy_of
from pointsman.lab.traffic.recording import (
    RecordedRequest,
    Recording,
    UnreadableRecording,
    recording_of_file,
    requests_of_plane,
)
from pointsman.lab.traffic.regret import Regret, regret
from pointsman.lab.traffic.replay import Replayed, ReplaySetting, faults_of, replay
from pointsman.lab.traffic.sources import recording_of
from pointsman.lab.traffic.trials import Trial, TrialCache, default_cache, grid, run_trials

__all__ = [
    "RecordedRequest", "Recording", "UnreadableRecording", "recording_of_file", "requests_of_plane",
    "recording_of",
    "Arrival", "ReplayLoad", "arrivals",
    "LAB_POLICIES", "TriedPolicy", "policy_of", "distinct",
    "LabFleet", "fleet_of", "fleet_of_manifest",
    "Replayed", "ReplaySetting", "replay", "faults_of",
    "Objectives", "RunFigures", "figures",
    "Trial", "TrialCache", "default_cache", "grid", "run_trials",
    "TrafficComparison", "bounds_of", "page",
    "TrafficBound", "bound", "bound_capacity",
    "Regret", "regret",
    "Capacity", "capacities", "capacity_table",
]  # fmt: skip
