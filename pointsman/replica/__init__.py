"""A replica: one process that runs one node of an application, and nothing else.

Enters: HTTP, with calls in the format of `wire/`. Leaves: what the user's code returns. The one rule: code that is not
known to be quick never runs on the event loop, so that health checks are always answered.
"""
