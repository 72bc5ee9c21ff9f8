"""Does a policy keep its promises? Generated situations look for one that it breaks, and the smallest is shown.

Enters: a way to build the policy. Leaves: a report in plain words. The one rule: every promise is a function from a
situation to what is broken in it, or None; the same function finds and shrinks.
"""

from pointsman.lab.check.checking import check
from pointsman.lab.check.report import Broken, Report

__all__ = ["check", "Report", "Broken"]
