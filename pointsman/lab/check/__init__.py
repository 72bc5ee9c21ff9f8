"""Checks a policy or plugin: generated cases look for a broken promise, and the report shows the smallest one.

Enters: a function that builds the policy. Leaves: a report. The one rule: a promise is a function from a case to what
is broken in it, or None; the search and the shrinking call the same function.
"""

from pointsman.lab.check.checker import check
from pointsman.lab.check.report import Broken, Report

__all__ = ["check", "Report", "Broken"]
