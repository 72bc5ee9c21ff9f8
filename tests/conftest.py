"""The same conditions for every run: property tests repeat themselves, and Ctrl-C works. The browser is here too.

`make soak-properties` looks further, and elsewhere each time.
"""

import signal

from hypothesis import settings

from tests.browser import browser
from tests.properties import PROFILE, examples

__all__ = ["browser"]

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=examples(100))
settings.register_profile("searching", deadline=None, max_examples=examples(100))
settings.load_profile(PROFILE)

# A shell without job control ignores SIGINT in what it runs in the background, and processes of tests inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
