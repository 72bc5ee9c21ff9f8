"""The runtime of a Ray cluster: its nodes are the workers.

Enters: orders of a plane, and nodes that join and leave. Leaves: processes under one supervisor per node, and reports
about them. The one rule: before something is started in place of what a silent node ran, the node's lease is over.
"""
