"""Property tests repeat themselves, so that a failure is the fault of the change at hand.

HYPOTHESIS_PROFILE=searching pytest looks further, and elsewhere each time.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
