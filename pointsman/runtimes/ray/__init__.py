"""The runtime of a Ray cluster: its nodes are the workers.

Enters: orders of a plane, and nodes that join and leave. Leaves: processes under one supervisor per node, and reports
about them. The one rule: the processes of a silent node are replaced only after the node's lease is over.
"""
