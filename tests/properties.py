"""How many examples property tests try: the same few in each `make test`, others and many in `make soak-properties`."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
SHARE = {"repeatable": 0.3, "searching": 10.0}[PROFILE]
"""Of what a test names as enough to find most mistakes."""
FEWEST = 10


def examples(enough: int) -> int:
    return max(min(enough, FEWEST), round(enough * SHARE))
