"""Engines and fleets that are not there: a model of continuous batching, and workers on virtual time.

An engine: what runs when, how long it takes, what its cache holds. Enters: jobs and times. Leaves: steps, each with
the jobs that got a token in it. A fleet: a runtime for the controller. Enters: what is wanted, and what befalls
workers. Leaves: who is in service, when and where. The one rule: time is an argument, so that the same model paces a
simulated server by the machine's clock and a rehearsal by a virtual one.
"""
