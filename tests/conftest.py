"""The same conditions for every run: property tests repeat themselves, and Ctrl-C works. The browser is here too.

HYPOTHESIS_PROFILE=searching pytest looks further, and elsewhere each time.
"""

import os
import signal

from hypothesis import settings

from tests.browser import browser

__all__ = ["browser"]

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell without job control ignores SIGINT in what it runs in the background, and processes of tests inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
