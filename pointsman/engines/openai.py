"""Any OpenAI-compatible server that somebody else started."""

from pointsman.engines.base import Engine, LaunchSpec, ProbeRequest
from pointsman.errors import ConfigError


class OpenAI(Engine):
    """A server of unknown make: it is asked, never started, and says nothing of itself."""

    name = "openai"
    launchable = False
    health = ProbeRequest("GET", "/v1/models")
    metrics_path = ""
    work = "chat"

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        raise ConfigError(['engine "openai" cannot be started; write the server under endpoints, or use "command"'])
