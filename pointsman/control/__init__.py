"""What should run and what does: `Controller.handle(event, now) -> commands`.

Enters: what is wanted, and news of processes and servers. Leaves: commands to a runtime, and for people what is there,
what would be done, and why. The one rule: the same events give the same commands.
"""

from pointsman.control.controller import Controller
from pointsman.control.desired import Desired, DesiredDeployment, DesiredEndpoint, DesiredEngine, Lifecycle
from pointsman.control.instances import InstanceStatus, Phase
from pointsman.control.reconcile import ReconcileStep, What

__all__ = [
    "Controller",
    "Desired",
    "DesiredDeployment",
    "DesiredEndpoint",
    "DesiredEngine",
    "Lifecycle",
    "InstanceStatus",
    "Phase",
    "ReconcileStep",
    "What",
]
