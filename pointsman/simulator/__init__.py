"""A simulated model server: the OpenAI API, vLLM's metrics, the pace of measured hardware, and faults.

Enters: HTTP. Leaves: answers with numbered words, which show if one is missing, doubled or from another answer. The one
rule: it is small and quick (no msgspec, no numpy), so that a fleet of them fits on one machine.
"""
