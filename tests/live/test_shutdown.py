"""Shutdown: new connections are refused, requests in flight finish or fail with a reason, and no process is left."""

import asyncio
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.chaos.clients import Client, LoadRequest, Sample, Verdict, check_text
from bench.chaos.planes import TIMEOUT_S, LivePlane
from tests.live.manifests import manifest, simulated

TOKENS_PER_SECOND = 50


def start(plane: LivePlane, **gateway: Any) -> str:
    """Start two instances that take two requests each; returns the URL of the gateway."""
    paced = simulated("m", 2, maxConcurrency=2, parameters={"tokensPerSecond": TOKENS_PER_SECOND})
    plane.up(manifest(paced, **gateway))
    return plane.url


def send(pool: ThreadPoolExecutor, plane: LivePlane, url: str, *requests: LoadRequest) -> Future[list[Sample]]:
    """Send each request on its own connection. Returns when the plane has received all of them."""

    async def send_all() -> list[Sample]:
        where = urlsplit(url)
        clients = [Client(where.hostname or "", where.port or 80, check_text) for _ in requests]
        try:
            return await asyncio.gather(*(one.send(request) for one, request in zip(clients, requests, strict=True)))
        finally:
            for one in clients:
                one.close()

    future = pool.submit(lambda: asyncio.run(send_all()))
    plane.until(lambda: len(plane.admin.get("requests")["requests"]) == len(requests), "all requests received")
    plane.until(lambda: plane.status()["deployments"][0]["running"] == min(len(requests), 4), "requests running")
    streams = [request.request_id for request in requests[:4] if request.stream]
    plane.until(
        lambda: all(plane.admin.get("requests", one)["first_token_ms"] is not None for one in streams),
        "streams started",
    )
    return future


def load_request(name: str, tokens: int, *, stream: bool = True) -> LoadRequest:
    return LoadRequest(name, "m", f"a long story about {name}", tokens, chat=stream, stream=stream)


def is_refused(url: str) -> bool:
    where = urlsplit(url)
    try:
        socket.create_connection((where.hostname or "", where.port or 80), 5.0).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "down"])
def test_requests_in_flight_are_finished(plane: LivePlane, how: str) -> None:
    """Streams, plain requests, and requests that are still queued."""
    url = start(plane)
    requests = [load_request(f"stream-{number}", 60) for number in range(3)]
    requests += [
        load_request("plain", 60, stream=False),
        load_request("waits-1", 10),
        load_request("waits-2", 10, stream=False),
    ]
    with ThreadPoolExecutor() as pool:
        answers = send(pool, plane, url, *requests)
        if how == "down":
            assert plane.pointsman("down").returncode == 0
        else:
            plane.process.send_signal(signal.Signals[how])
        plane.until(lambda: is_refused(url), "no new connections")
        samples = answers.result()
        ended = time.monotonic()
    assert [
        (one.request.request_id, one.verdict, one.why) for one in samples if one.verdict is not Verdict.SERVED
    ] == []
    assert plane.process.wait(TIMEOUT_S) == 0
    assert plane.processes() == {}
    print(f"\n{how}: 6 requests finished; everything gone {time.monotonic() - ended:.2f} s after the last")


def test_requests_beyond_the_drain_timeout_fail_with_a_reason(plane: LivePlane) -> None:
    url = start(plane, drainTimeout="1s")
    requests = [load_request(f"long-{number}", 2000) for number in range(3)]
    with ThreadPoolExecutor() as pool:
        answers = send(
            pool, plane, url, *requests, load_request("plain", 2000, stream=False), load_request("waits", 2000)
        )
        assert plane.stop() == 0
        *long, plain, waits = answers.result()
    for one in long:
        assert one.verdict is Verdict.INTERRUPTED
        assert "the gateway is shutting down" in one.why
    for one in (plain, waits):
        assert (one.verdict, one.status) == (Verdict.REFUSED, 503)
        assert "the gateway is shutting down" in one.why
    assert plane.processes() == {}


def test_a_second_interrupt_stops_at_once(plane: LivePlane) -> None:
    url = start(plane, drainTimeout="10m")
    with ThreadPoolExecutor() as pool:
        answers = send(pool, plane, url, load_request("long", 20_000), load_request("plain", 20_000, stream=False))
        plane.process.send_signal(signal.SIGINT)
        plane.until(lambda: is_refused(url), "no new connections")
        plane.process.send_signal(signal.SIGINT)
        assert plane.process.wait(TIMEOUT_S) == 0
        long, plain = answers.result()
    assert (long.verdict, plain.verdict) == (Verdict.INTERRUPTED, Verdict.REFUSED)
    assert "2 requests were cut off" in plane.log_tail()
    assert plane.processes() == {}


def test_engines_that_ignore_sigterm_are_killed(plane: LivePlane) -> None:
    """A stopped process cannot exit, and its clients must not delay the shutdown."""
    url = start(plane, drainTimeout="1s")
    with ThreadPoolExecutor() as pool:
        answers = send(pool, plane, url, load_request("stuck-1", 2000), load_request("stuck-2", 2000))
        for pid in plane.pids().values():
            os.kill(pid, signal.SIGSTOP)
        assert plane.stop() == 0
        assert {one.verdict for one in answers.result()} == {Verdict.INTERRUPTED}
    assert plane.processes() == {}


@pytest.mark.parametrize("presses", [1, 2], ids=["once", "twice"])
def test_ctrl_c_in_a_terminal(plane: LivePlane, presses: int) -> None:
    """As in `make run`: the foreground process group gets the signal, and engines and supervisor are not part of it."""
    file = plane.write(manifest(simulated("m", 2)))
    command = f"{sys.executable} -m pointsman.cli.main up {file} --state {plane.state}"
    makefile = plane.folder / "Makefile"
    makefile.write_text(f"run:\n\t@{command}\n", encoding="utf-8")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        ["make", "-f", str(makefile), "run"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=plane.folder,
        env={**os.environ, **plane.environment},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        shown = read_until(master, b"try it:")
        assert b"ready in" in shown
        for _ in range(presses):
            os.write(master, b"\x03")
        shown += read_until(master, None)
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert b"stopped" in shown
    assert b"Traceback" not in shown
    assert plane.processes() == {}


def read_until(terminal: int, word: bytes | None) -> bytes:
    """The output of a terminal up to and including a word; up to its end if None."""
    shown = b""
    with suppress(OSError):  # Linux raises EIO once the last process has closed the terminal
        while (word is None or word not in shown) and (piece := os.read(terminal, 65536)):
            shown += piece
    assert word is None or word in shown, shown
    return shown
