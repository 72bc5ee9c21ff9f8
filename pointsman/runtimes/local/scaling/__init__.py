"""Scaling on a running plane: measures, asks the policies, and says how many of each deployment there should be.

Enters: traffic, instances, and what operators ask. Leaves: targets, and the record of each change. The one rule: a
target is only ever a number that the controller is told; what is too much is drained there, and nobody is cut off.
"""

from pointsman.runtimes.local.scaling.scaled import Scaled
from pointsman.runtimes.local.scaling.scaling import Scaling

__all__ = ["Scaled", "Scaling"]
