"""Chaos, live: a real plane under steady load while its instances are killed, hung and made to answer garbage.

Enters: a seed and a time. Leaves: a table of what became of every request. The one rule: every answer is checked word
for word, by clients that trust nobody. `python -m bench.chaos --help`; docs/chaos.md has the promises.
"""
