"""Secrets of engines are shown nowhere: not in plan, apply, status, history, logs, problems, or the output of `up`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.planes import LivePlane
from tests.live.manifests import LIFECYCLE, manifest

SERVER = """
import sys, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self): self.answer(self.rfile.read(int(self.headers["content-length"])))
    def do_GET(self): self.answer(b"")
    def answer(self, _):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SECRETS = ["s3cr3t-env", "s3cr3t-arg", "s3cr3t-joined", "s3cr3t-bearer", "s3cr3t-url", "s3cr3t-shell", "s3cr3t-changed"]


def engine(folder: Path, changed: str, retries: int) -> dict[str, Any]:
    """A server that ignores its arguments."""
    arguments = ["--api-key", f"s3cr3t-arg{changed}", f"--hf-token=s3cr3t-joined{changed}", "--retries", str(retries)]
    arguments += ["--header", f"Authorization: Bearer s3cr3t-bearer{changed}"]
    arguments += [f"http://user:s3cr3t-url{changed}@proxy", f"run --password s3cr3t-shell{changed} --quiet"]
    command = [sys.executable, str(folder / "server.py"), "{port}", *arguments]
    env = {"HF_TOKEN": f"s3cr3t-env{changed}", "DATABASE": f"s3cr3t-env{changed}", "PLAIN": "same"}
    deployed = {"type": "command", "parameters": {"command": command, "env": env}}
    return {"name": "m", "model": "m", "engine": deployed, "lifecycle": LIFECYCLE}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[LivePlane]:
    (tmp_path / "server.py").write_text(SERVER)
    made = LivePlane(tmp_path)
    yield made
    made.close()


def test_secrets_are_shown_nowhere(plane: LivePlane) -> None:
    plane.up(manifest(engine(plane.folder, "", 3)))
    other = plane.write(manifest(engine(plane.folder, "-changed", 4)), "other.yaml")
    planned = plane.pointsman("plan", other)
    assert "engine.env.DATABASE *** -> ***, engine.env.HF_TOKEN *** -> ***" in planned.stdout
    assert '"--retries","3"' in planned.stdout, "what is no secret is shown"
    assert '"--retries","4"' in planned.stdout
    assert "PLAIN" not in planned.stdout, "it has not changed"
    applied = plane.pointsman("apply", other)
    assert applied.returncode == 0, applied.stderr
    wrong = engine(plane.folder, "", 3)
    wrong["engine"]["parameters"]["env"] = {"HF_TOKEN": ["s3cr3t-env"], "PIN": 8421973}
    refused = plane.pointsman("plan", plane.write(manifest(wrong), "wrong.yaml"))
    assert "env.PIN: expected text, found another value; put it in quotes" in refused.stderr
    shown = [
        *(done.stdout + done.stderr for done in (planned, applied, refused)),
        *(plane.pointsman(*words).stdout for words in (["plan", str(other), "--json"], ["status"], ["history"])),
        *(plane.pointsman("logs", name).stdout for name in plane.instances()),
        json.dumps(plane.status()),
        plane.log(),
        *(file.read_text(errors="replace") for file in plane.state.rglob("*.log*")),
    ]
    assert "started as process" in "".join(shown)
    whole = "\n".join(shown)
    assert [secret for secret in [*SECRETS, "8421973"] if secret in whole] == []
