"""A server is there when it answers rightly, and afterwards nothing of it is."""

import sys
import time
from pathlib import Path

import pytest

from bench.gateway.cpu import family
from bench.pipeline import serving
from bench.pipeline.request_client import DIAMOND, Asker
from bench.pipeline.serving import Launch, Server

PROGRAM = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

# A child that neither belongs to the group nor ends when it is asked to.
CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(sys.argv[2].encode())

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Small(Server):
    """Answers the same to everything."""

    name = "small"

    def __init__(self, answer: str, program: str = PROGRAM) -> None:
        self._answer, self._program = answer, program

    def missing(self) -> str:
        return ""

    def launch(self, app: str, port: int, folder: Path) -> Launch:
        return Launch([sys.executable, "-c", self._program, str(port), self._answer], "/diamond")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LAST_S", 0.05)


def assert_goes(pid: int) -> None:
    """Ended: not there, or only waiting to be buried."""
    deadline = time.monotonic() + 10
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_it_serves_and_then_all_of_it_ends(tmp_path: Path) -> None:
    with Small("8").serving(DIAMOND, tmp_path / "small") as small:
        with Asker(small.port, small.path) as asker:
            assert asker.ask([1, 2, 3]) == 8
        assert small.url == f"http://127.0.0.1:{small.port}/diamond"
        assert small.cpu_s() > 0
        assert small.resident_mb() > 0
        pids = family(small.pid)
        assert len(pids) == 2
    for pid in pids:
        assert_goes(pid)


def test_wrong_answers_are_no_service(tmp_path: Path) -> None:
    wrong = pytest.raises(RuntimeError, match=r"wrong: .* is 9")
    with wrong, Small("9").serving(DIAMOND, tmp_path / "small"):
        pass


def test_a_server_that_ends_at_once_has_last_words(tmp_path: Path) -> None:
    ended = pytest.raises(RuntimeError, match="it does not serve: no such setting")
    with ended, Small("8", "raise SystemExit('no such setting')").serving(DIAMOND, tmp_path / "small"):
        pass
