"""The lab tries policies out before they go live.

Enters: a policy, and generated cases or recorded load. Leaves: what the policy would do, and which promises it breaks.
The one rule: nothing here runs in production, and everything that runs in production can be tried here.
"""
