"""Manifests for live tests, with short timeouts. They are JSON, which is valid YAML."""

import hashlib
import json
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[1] / "models" / "tiny-pydoc-q8_0.gguf"
LIFECYCLE = {
    "probeInterval": "200ms",
    "probeTimeout": "1s",
    "drainTimeout": "20s",
    "stopGrace": "3s",
    "backoff": "100ms",
    "backoffMax": "1s",
}


def manifest(*deployments: dict[str, Any], **gateway: Any) -> str:
    """A complete manifest; the gateway listens on a free port."""
    document = {"kind": "Pointsman", "deployments": list(deployments), "gateway": {"listen": "127.0.0.1:0", **gateway}}
    return json.dumps(document, indent=1)


def simulated(name: str = "m", replicas: int = 2, **fields: Any) -> dict[str, Any]:
    """A deployment of simulated engines with predictable answers. `parameters` extends the engine parameters."""
    parameters = {"tokensPerSecond": 200, "firstTokenMs": 20, "maxNumSeqs": 8, **fields.pop("parameters", {})}
    engine = {"type": "simulated", "parameters": parameters}
    return {"name": name, "model": name, "replicas": replicas, "engine": engine, "lifecycle": LIFECYCLE, **fields}


def llama(name: str = "tiny", replicas: int = 2, **fields: Any) -> dict[str, Any]:
    """A deployment of llama.cpp with a tiny model. `parameters` extends the engine parameters."""
    parameters = {"model": str(TINY), "slots": 2, "contextTokens": 256, **fields.pop("parameters", {})}
    engine = {"type": "llama.cpp", "parameters": parameters}
    return {"name": name, "model": name, "replicas": replicas, "engine": engine, "lifecycle": LIFECYCLE, **fields}


def hashed(key: str) -> str:
    """The digest of an API key, as manifests store it."""
    return hashlib.sha256(key.encode()).hexdigest()
