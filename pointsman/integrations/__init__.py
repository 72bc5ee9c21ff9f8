"""Our policies inside other systems: they send and run requests, our code decides.

The one rule: only the folder with a system's name imports that system, and only when the folder is used.
"""
