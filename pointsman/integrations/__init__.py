"""Our policies inside other systems: they send and run requests, our code decides.

The one rule: a system is imported only by the folder of its name here, and only when that folder is used.
"""
