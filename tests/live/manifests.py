"""Manifests of live tests, short-lived in everything. JSON is YAML."""

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
    """A whole document; the gateway takes a free port."""
    told = {"kind": "Pointsman", "deployments": list(deployments), "gateway": {"listen": "127.0.0.1:0", **gateway}}
    return json.dumps(told, indent=1)


def simulated(name: str = "m", replicas: int = 2, **facts: Any) -> dict[str, Any]:
    """A deployment of engines whose answers are known. `parameters` adds to theirs."""
    parameters = {"tokensPerSecond": 200, "firstTokenMs": 20, "maxNumSeqs": 8, **facts.pop("parameters", {})}
    engine = {"type": "simulated", "parameters": parameters}
    return {"name": name, "model": name, "replicas": replicas, "engine": engine, "lifecycle": LIFECYCLE, **facts}


def llama(name: str = "tiny", replicas: int = 2, **facts: Any) -> dict[str, Any]:
    """A deployment of real engines with a real, if tiny, model. `parameters` adds to theirs."""
    parameters = {"model": str(TINY), "slots": 2, "contextTokens": 256, **facts.pop("parameters", {})}
    engine = {"type": "llama.cpp", "parameters": parameters}
    return {"name": name, "model": name, "replicas": replicas, "engine": engine, "lifecycle": LIFECYCLE, **facts}


def hashed(key: str) -> str:
    """As manifests keep keys."""
    return hashlib.sha256(key.encode()).hexdigest()
