"""A replica: one process that runs one node of an application, and nothing else.

Enters: HTTP, with calls as `wire/` writes them. Leaves: what the user's code returned. The one rule: the loop
is never kept waiting by code that is not known to be quick, so that whoever asks for health always hears.
"""
