"""Kinds of model servers, one adapter each.

Enters: the parameters of `engine:`, and the metrics of a server. Leaves: the command that starts the server, the
requests that probe it, and its load as `Metrics`. The one rule: an adapter describes one kind of server and performs no
I/O.
"""

from collections.abc import Mapping
from types import MappingProxyType

from pointsman.engines.base import Engine, LaunchSpec, ProbeRequest, ProcessEnd
from pointsman.engines.command import Command
from pointsman.engines.llama_cpp import LlamaCpp
from pointsman.engines.openai import OpenAI
from pointsman.engines.prometheus import Samples
from pointsman.engines.python import Python
from pointsman.engines.sglang import Sglang
from pointsman.engines.simulated import Simulated
from pointsman.engines.vllm import Vllm

ENGINES: Mapping[str, type[Engine]] = MappingProxyType(
    {engine.name: engine for engine in (LlamaCpp, Vllm, Sglang, Command, Python, Simulated, OpenAI)}
)
"""Engine classes by their name, which is `type:` in a manifest."""

__all__ = [
    "ENGINES", "Engine", "LaunchSpec", "ProbeRequest", "ProcessEnd", "Samples",
    "Command", "LlamaCpp", "OpenAI", "Python", "Sglang", "Simulated", "Vllm",
]  # fmt: skip
