"""The in-process runtime: your program sends the requests, Pointsman decides where.

Enters: instances, requests, and how they ended. Leaves: decisions. The one rule: it starts nothing and opens nothing.
"""

from pointsman.runtimes.inprocess.manager import ControlPlaneManager

__all__ = ["ControlPlaneManager"]
