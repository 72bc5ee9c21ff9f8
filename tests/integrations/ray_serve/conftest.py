"""One Ray cluster with Serve for all tests of this folder; it ends with them."""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from bench.chaos.planes import MARK
from bench.gateway.processes import free_port
from tests.live.test_scripts import marked_processes

ROOT = Path(__file__).parents[3]


class Answer(NamedTuple):
    status: int
    text: str
    headers: dict[str, str]


class Cluster:
    """Serve on one machine: where its proxy is, and how to deploy."""

    def __init__(self, port: int, address: str) -> None:
        self.address = address
        self.url = f"http://127.0.0.1:{port}"

    def run(self, application: Any, name: str) -> Any:
        from ray import serve

        return serve.run(application, name=name, route_prefix=f"/{name}", logging_config={"log_level": "WARNING"})

    def delete(self, name: str) -> None:
        """Replicas that idle take time from the next test."""
        from ray import serve

        serve.delete(name, _blocking=False)

    def ask(self, path: str, headers: dict[str, str] | None = None, body: bytes | None = None) -> Answer:
        try:
            with urlopen(Request(f"{self.url}{path}", body, headers or {}), timeout=60) as answer:
                return Answer(answer.status, answer.read().decode(), dict(answer.headers))
        except HTTPError as error:
            return Answer(error.code, error.read().decode(), dict(error.headers))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    import ray

    saved = dict(os.environ)
    # Policies of the tests are imported by replicas and proxies, too.
    paths = [str(ROOT), *filter(None, [saved.get("PYTHONPATH", "")])]
    # A token of its own, so that Ray leaves none in the home folder.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(paths), MARK: (mark := uuid4().hex)}
    with tempfile.TemporaryDirectory(prefix="rs-", ignore_cleanup_errors=True) as folder:  # sockets need short paths
        port = free_port()
        command = [sys.executable, str(Path(__file__).with_name("ray_head.py")), folder, str(port)]
        with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as head:
            try:
                assert head.stdout is not None
                address = head.stdout.readline().strip()
                assert address, "the cluster did not start"
                with suppress(ModuleNotFoundError):  # versions of Ray before tokens
                    # Ray may have been imported before the token was set.
                    import_module("ray._private.authentication_test_utils").reset_auth_token_state()
                ray.init(address, _node_ip_address="127.0.0.2", log_to_driver=False)
                yield Cluster(port, address)
            finally:
                ray.shutdown()
                assert head.stdin is not None
                head.stdin.close()
                head.wait(60)
                until(lambda: not marked_processes(mark), "all processes of the cluster have ended")
                os.environ.clear()
                os.environ |= saved


def until(holds: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Ask until it holds."""
    end = time.monotonic() + seconds
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)
