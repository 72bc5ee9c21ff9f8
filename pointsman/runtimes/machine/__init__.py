"""One machine as a worker, for any runtime: its processes under a supervisor, their logs, its devices, and a store.

Enters: orders from a plane on this machine or another. Leaves: reports. The one rule: every process is ended at
some time, even if its plane or its supervisor dies.
"""
