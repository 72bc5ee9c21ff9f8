"""The simulation runtime: workers, processes and engines on virtual time, under the product's own plane.

Enters: a manifest, requests, and faults. Leaves: the same decisions as on real machines, and a log of each request. The
one rule: time jumps from event to event, and events at the same time happen in the order in which they were scheduled,
so that the same run gives the same log.
"""
