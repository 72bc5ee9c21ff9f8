"""A model server that only acts like one: the OpenAI API, vLLM's metrics, the pace of measured hardware, any fault.

Enters: HTTP. Leaves: answers whose words are numbered, so that a missing, doubled or foreign one is seen. The one rule:
it is small and quick (no msgspec, no numpy), so that a fleet of them fits into one machine.
"""
