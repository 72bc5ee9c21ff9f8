"""Any OpenAI-compatible server that is managed elsewhere."""

from pointsman.engines.base import Engine, LaunchSpec, ProbeRequest
from pointsman.errors import ConfigError


class OpenAI(Engine):
    """A server of unknown kind: it is probed, never started, and has no metrics."""

    name = "openai"
    launchable = False
    health = ProbeRequest("GET", "/v1/models")
    metrics_path = ""
    work = "chat"

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        raise ConfigError(['engine "openai" cannot be started; list the server under endpoints, or use "command"'])
