"""Our policies inside other systems: what enters and leaves is theirs, what decides is ours.

The one rule: a system is imported only by the folder of its name here, and only when that folder is used.
"""
