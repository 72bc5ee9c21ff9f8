"""Profile handlers and their deciders. Enters: the results so far. Leaves: the profiles to run next; the final result.

The one rule: a handler never looks at candidates; profiles choose among them.
"""

from pointsman.routing.handlers.disagg import (
    AlwaysDisaggMultimodalDecider,
    AlwaysDisaggPdDecider,
    DisaggProfileHandler,
    PrefixBasedPdDecider,
)
from pointsman.routing.handlers.header import HeaderProfileHandler

__all__ = [
    "HeaderProfileHandler", "DisaggProfileHandler",
    "PrefixBasedPdDecider", "AlwaysDisaggPdDecider", "AlwaysDisaggMultimodalDecider",
]  # fmt: skip
