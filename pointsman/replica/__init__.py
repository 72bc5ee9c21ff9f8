"""A replica: one process that runs one node of an application, and nothing else.

Enters: calls over HTTP, in the format of `wire/`. Leaves: the results of the user's code. The one rule: code that is
not known to be quick never runs on the event loop, so that health checks are always answered.
"""
