"""Profile handlers and their deciders: enter the results so far, leave the profiles to run next and the final result.

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
