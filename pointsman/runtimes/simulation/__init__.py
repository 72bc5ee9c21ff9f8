"""A model of a continuous-batching engine: what runs when, how long it takes, what its cache holds.

Enters: jobs and times. Leaves: steps, each with the jobs that got a token in it. The one rule: time is an argument, so
that the same model paces a simulated server by the machine's clock and a rehearsal by a virtual one.
"""
