"""Checks a policy or plugin. Generated cases try its promises, and the report shows the smallest cases that break them.

Enters: a function that builds the policy. Leaves: a report. The one rule: a promise is a function that takes a case and
returns what is broken in it, or None. The search and the shrinking call the same function.
"""

from pointsman.lab.check.checker import check
from pointsman.lab.check.report import Broken, Report

__all__ = ["check", "Report", "Broken"]
