"""The local runtime: what a manifest says runs on this machine, as processes of ours or servers of others.

Enters: manifests, and what an operator asks. Leaves: running engines, kept at work whatever fails, and what is known of
them. The one rule: no engine outlives its plane for longer than the grace time, however the plane ends.
"""

from pointsman.runtimes.local.plane import Plane
from pointsman.runtimes.local.store import stored_manifest

__all__ = ["Plane", "stored_manifest"]
