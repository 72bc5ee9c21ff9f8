"""The local runtime: processes on this machine, and servers that others started anywhere.

The one rule: no engine outlives its plane for longer than the grace time, however the plane ends.
"""
