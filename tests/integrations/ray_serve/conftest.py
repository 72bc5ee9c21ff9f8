"""One Ray cluster with Serve for all tests of this folder; it ends with them."""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from pprint import pformat
from signal import SIGKILL
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from bench.chaos.planes import MARK
from bench.gateway.processes import free_port
from tests.live.ray_clusters import LONG_S
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

    def applications(self) -> set[str]:
        from ray import serve

        return set(serve.status().applications)

    def delete(self, name: str) -> None:
        """Replicas that idle take time from the next test."""
        from ray import serve

        serve.delete(name, _blocking=False)

    def ask(self, path: str, headers: dict[str, str] | None = None, body: bytes | None = None) -> Answer:
        try:
            with urlopen(Request(f"{self.url}{path}", body, headers or {}), timeout=LONG_S) as answer:
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
    # Ray's workers yield to every other process of a busy machine otherwise.
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "PYTHONPATH": os.pathsep.join(paths),
        MARK: (mark := uuid4().hex),
    }
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
                with suppress(TimeoutExpired):  # what is left shows below
                    head.wait(LONG_S)
                try:
                    left = partial(marked_processes, mark)
                    until(lambda: not left(), "all processes of the cluster have ended", left)
                finally:
                    for pid in marked_processes(mark):
                        with suppress(ProcessLookupError):
                            os.kill(pid, SIGKILL)
                    os.environ.clear()
                    os.environ |= saved


@pytest.fixture(autouse=True)
def applications_are_deleted_after_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also those of a test that fails: the next one finds none of them."""
    if "cluster" not in request.fixturenames:
        yield
        return
    one: Cluster = request.getfixturevalue("cluster")
    before = one.applications()
    yield
    for name in one.applications() - before:
        one.delete(name)


def until(holds: Callable[[], Any], what: str, seen: Callable[[], Any] | None = None, seconds: float = LONG_S) -> Any:
    """Ask until it holds. `seen`: what a failure shows."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > end:
            shown = "" if seen is None else f"; seen: {pformat(seen(), width=160)}"
            raise AssertionError(f"{what}: not within {seconds:g} s{shown}")
        time.sleep(0.05)
    return found
