"""Placement: what an instance needs, where it fits, which place is best, and why.

Enters: a fleet (workers, GPUs, claims) and asks. Leaves: places, or refusals that say what would have to change. The
one rule: claims are the true need, and nobody is placed where the fleet has no room for it.
"""
