"""Any OpenAI-compatible server that a command starts."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

from pointsman.engines.base import Engine, LaunchSpec, ProbeRequest, Work
from pointsman.engines.llama_cpp import LlamaCpp, llama_cpp_metrics
from pointsman.engines.prometheus import Samples
from pointsman.engines.sglang import Sglang, sglang_metrics
from pointsman.engines.vllm import Vllm, vllm_metrics
from pointsman.errors import ConfigError
from pointsman.parameters import Count
from pointsman.placement.asks import EngineAbility
from pointsman.routing.endpoints import Metrics

_PLACEHOLDER = re.compile(r"\{(?:port|host|model)\}")
_ABILITIES = {engine.name: engine.ability for engine in (LlamaCpp, Sglang, Vllm)}
"""By the dialect of its metrics."""


class Command(Engine):
    """A server started by a command in which {port}, {host} and {model} are filled in."""

    name = "command"
    key_variable = ""
    remedy = "install it, or correct the command of the engine"

    def __init__(
        self,
        command: Sequence[str] | str,
        *,
        health: str = "/health",
        metrics: Literal["none", "vllm", "llama.cpp", "sglang"] = "none",
        metrics_path: str = "/metrics",
        slots: Count | None = None,
        work: Work = "completions",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._argv = _words(command) if isinstance(command, str) else list(command)
        if not any("{port}" in word for word in self._argv):
            written = shlex.join(self._argv)
            raise ConfigError([f"the command must contain {{port}}, which is filled in when it is started: {written}"])
        self.health = ProbeRequest("GET", health)
        self.metrics_path = "" if metrics == "none" else metrics_path
        self._dialect = metrics
        self.serves_messages = metrics in ("vllm", "llama.cpp")
        self.ability = _ABILITIES.get(metrics, EngineAbility(needs_gpu=False))
        self._slots = slots
        self._env = dict(env or {})
        self.work = work

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        # Not str.format: arguments may contain JSON with braces.
        filled = {"{port}": str(port), "{host}": host, "{model}": model}
        argv = tuple(_PLACEHOLDER.sub(lambda found: filled[found[0]], word) for word in self._argv)
        return LaunchSpec(argv, self._env)

    def metrics(self, samples: Samples) -> Metrics | None:
        match self._dialect:
            case "vllm":
                return vllm_metrics(samples)
            case "llama.cpp":
                return llama_cpp_metrics(samples, self._slots)
            case "sglang":
                return sglang_metrics(samples)
        return None

    @property
    def slots(self) -> int | None:
        return self._slots


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        why = f"the command cannot be split into words ({error}); write it as a list: {command}"
        raise ConfigError([why]) from None
