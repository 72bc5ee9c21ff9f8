"""The desired and the observed state of instances: `Controller.handle(event, now) -> commands`.

Enters: the desired state, and events of workers, processes and servers. Leaves: commands for a runtime, and status,
previews and reasons for people. The one rule: the same events give the same commands.
"""

from pointsman.control.controller import Controller
from pointsman.control.desired import Desired, DesiredDeployment, DesiredEndpoint, DesiredEngine, Lifecycle
from pointsman.control.instances import InstanceStatus, Phase
from pointsman.control.reconcile import ReconcileStep, What

__all__ = [
    "Controller", "Desired", "DesiredDeployment", "DesiredEndpoint", "DesiredEngine", "Lifecycle",
    "InstanceStatus", "Phase", "ReconcileStep", "What",
]  # fmt: skip
