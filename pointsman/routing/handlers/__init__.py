"""Profile handlers and their deciders: enter the results so far, leave the profiles to run next and what they came to.

The one rule: a handler never looks at candidates; choosing among them is what its profiles are for.
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
