"""Runtimes, and the plane that runs on any of them.

Enters: documents, requests, and operators' orders. Leaves: running instances, and requests that are sent to them. The
one rule: a runtime and the code above it share only `interface.py`, and only `choosing.py` names concrete runtimes.
"""
