"""Processes of ours that serve a model: llama.cpp's server, and one that only acts like a server.

Enters: a command line, then HTTP. Leaves: the OpenAI API. The one rule: nothing of the control plane is imported, so
that a process is up in a moment and small.
"""
