"""Chaos test: a real plane under steady load while its instances are killed, hung and made to send garbage.

Enters: a seed and a duration. Leaves: a table of how every request ended. The one rule: clients check every response in
full. `python -m bench.chaos --help`; docs/chaos.md lists the guarantees.
"""
