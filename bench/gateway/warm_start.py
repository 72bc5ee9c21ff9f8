"""Time from `pointsman up` with two tiny llama.cpp instances to the first token."""

import http.client
import json
import os
import time
from pathlib import Path

import msgspec

from bench.gateway.peers import Pointsman
from bench.gateway.processes import Process, free_port

WEIGHTS = Path(__file__).parents[2] / "tests" / "models" / "tiny-pydoc-q8_0.gguf"
TIMEOUT_S = 60.0


class WarmStart(msgspec.Struct, frozen=True):
    """Seconds since the start of the process."""

    listening_s: float
    first_token_s: float


def warm_start(folder: Path, number: int) -> WarmStart:
    """One start with a new state directory, on all cores. Raises RuntimeError if no token arrives."""
    port = free_port()
    manifest = folder / f"warm-start-{number}.yaml"
    manifest.write_text(_manifest(port))
    command = [str(Pointsman().executable), "up", str(manifest), "--state", str(folder / f"warm-start-{number}")]
    begun = time.monotonic()
    with Process(command, cores=os.sched_getaffinity(0), log=folder / "warm-start.log") as process:
        listening = 0.0
        while process.running and time.monotonic() < begun + TIMEOUT_S:
            try:
                if _first_token(port):
                    now = time.monotonic() - begun
                    return WarmStart(listening or now, now)
                listening = listening or time.monotonic() - begun
            except OSError:
                pass
            time.sleep(0.01)
        raise RuntimeError(process.log_tail())


def _first_token(port: int) -> bool:
    """Whether a streamed request gets its first event; False on an error status. Raises OSError if nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Return the"}], "max_tokens": 4, "stream": True}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status == 200 and response.readline().startswith(b"data: {")
    except http.client.HTTPException:
        return False
    finally:
        connection.close()


def _manifest(port: int) -> str:
    engine = {"type": "llama.cpp", "parameters": {"model": str(WEIGHTS), "contextTokens": 1024, "slots": 2}}
    document = {
        "apiVersion": "pointsman/v1alpha1",
        "kind": "Pointsman",
        "deployments": [{"name": "tiny", "model": "tiny", "replicas": 2, "engine": engine}],
        "gateway": {"listen": f"127.0.0.1:{port}"},
    }
    return json.dumps(document, indent=2)
