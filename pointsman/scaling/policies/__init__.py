"""The built-in scaling policies, one file each.

Enters: a view of a deployment. Leaves: how many replicas it should have. The one rule: a policy keeps no state of
its own. Everything that it needs between two calls is in `view.state`.
"""
