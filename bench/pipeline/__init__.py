"""`make bench-pipeline`: the diamond on Ray Serve and on Pointsman's local runtime, in one run.

Enters: the servers that are installed. Leaves: tables of requests per second, latency and CPU, with ratios and targets.
The one rule: one server runs at a time, the same clients ask each, and every answer is checked.
"""
