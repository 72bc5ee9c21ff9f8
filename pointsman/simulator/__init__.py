"""A simulated model server: the OpenAI API, vLLM's metrics, the pace of measured hardware, and faults.

Enters: requests over HTTP. Leaves: answers with numbered words, which show whether a word is missing, doubled or from
another answer. The one rule: the server is small and quick (no msgspec, no numpy), so that one machine can run a fleet.
"""
