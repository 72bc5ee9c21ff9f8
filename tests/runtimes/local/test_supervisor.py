"""The supervisor as a real process with real children."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from pointsman.errors import PointsmanError
from pointsman.http.pool import short_path
from pointsman.runtimes.machine import children, supervisor
from pointsman.runtimes.machine.supervisor_link import (
    SOCKET,
    EngineProcess,
    ProcessExited,
    ProcessFailed,
    ProcessStarted,
    Report,
    SupervisorLink,
    SupervisorTerms,
    open_supervisor,
)
from tests.runtimes.local.processes import eventually, is_alive, until

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
DEAF = [
    sys.executable, "-S", "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
]  # fmt: skip
FAMILY = [
    sys.executable, "-S", "-c",
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)",
]  # fmt: skip


class Hold:
    """A plane of few words: a link, and what was heard over it."""

    def __init__(self, link: SupervisorLink, running: list[EngineProcess], state: Path) -> None:
        self.link, self.running, self.state = link, running, state
        self.heard: list[Report] = []
        self.lost = False
        link.listen(self.heard.append, self._lose)

    @classmethod
    async def of(cls, state: Path, grace_s: float = 0.3) -> "Hold":
        link, running = await open_supervisor(state, SupervisorTerms(grace_s, 0.3))
        return cls(link, running, state)

    def _lose(self) -> None:
        self.lost = True

    def log(self, name: str) -> Path:
        return self.state / f"{name}.log"

    async def start(self, name: str, argv: list[str]) -> int:
        self.link.start(name, argv, dict(os.environ), "/", self.log(name))
        started: ProcessStarted = await self.hear(ProcessStarted, name)
        return started.pid

    async def hear(self, kind: type[Any], name: str) -> Any:
        def found() -> list[Report]:
            return [report for report in self.heard if isinstance(report, kind) and report.id == name]

        await eventually(found, f"{kind.__name__} {name}, heard {self.heard}")
        return found()[-1]

    async def says(self, name: str) -> str:
        """The first line that a child writes."""

        def lines() -> list[str]:
            return [line for line in self.log(name).read_text().splitlines() if not line.startswith("[pointsman]")]

        await eventually(lambda: self.log(name).exists() and lines(), f"a word of {name}")
        return lines()[0]


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_it_starts_reports_ends_and_leaves_nothing(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        assert hold.running == []
        pid = await hold.start("a", SLEEP)
        assert is_alive(pid)
        assert os.getpgid(pid) == os.getsid(pid) == pid
        await hold.start("b", [sys.executable, "-S", "-c", "print('good bye'); raise SystemExit(3)"])
        assert await hold.hear(ProcessExited, "b") == ProcessExited(
            "b", (await hold.hear(ProcessStarted, "b")).pid, code=3
        )
        assert await hold.says("b") == "good bye"
        await hold.link.end()
        assert (await hold.hear(ProcessExited, "a")).signal == signal.SIGTERM
        assert not is_alive(pid)
        assert not is_alive(hold.link.process.pid)
        assert not hold.lost
        assert not (state / SOCKET).exists()

    run(story())


def test_what_cannot_be_started_is_reported_with_the_reason(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        hold.link.start("a", ["/nowhere/engine"], {}, "/", hold.log("a"))
        why = "/nowhere/engine: No such file or directory"
        assert await hold.hear(ProcessFailed, "a") == ProcessFailed("a", why, errno.ENOENT)
        await hold.start("b", SLEEP)
        hold.link.start("b", SLEEP, {}, "/", hold.log("b"))
        assert "it is running already" in (await hold.hear(ProcessFailed, "b")).why
        await hold.link.end()

    run(story())


def test_signals_reach_the_whole_group_and_a_leader_takes_its_group_along(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        for name, number in (("a", signal.SIGTERM), ("b", signal.SIGKILL)):
            leader = await hold.start(name, FAMILY)
            grandchild = int(await hold.says(name))
            assert is_alive(grandchild)
            hold.link.signal(name, number)
            assert (await hold.hear(ProcessExited, name)).signal == number
            assert not is_alive(leader)
            assert not is_alive(grandchild)
        leader = await hold.start("c", FAMILY)
        grandchild = int(await hold.says("c"))
        os.kill(leader, signal.SIGKILL)  # it crashes, and its children are not told
        await hold.hear(ProcessExited, "c")
        assert not is_alive(grandchild)
        await hold.link.end()

    run(story())


def test_a_stopped_process_receives_sigterm(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        pid = await hold.start("a", SLEEP)
        os.kill(pid, signal.SIGSTOP)
        hold.link.signal("a", signal.SIGTERM)
        assert (await hold.hear(ProcessExited, "a")).signal == signal.SIGTERM
        await hold.link.end()

    run(story())


def test_children_inherit_neither_sockets_nor_input_nor_ignored_signals(state: Path) -> None:
    look = (
        "import os, signal\n"
        "print(sorted(set(os.listdir('/proc/self/fd')) - {'0', '1', '2'}), os.readlink('/proc/self/fd/0'),"
        " signal.getsignal(signal.SIGINT).__name__, signal.getsignal(signal.SIGHUP).name, os.environ.get('ONLY'))"
    )

    async def story() -> None:
        hold = await Hold.of(state)
        environment = {"ONLY": "this", "POINTSMAN_TEST": os.environ["POINTSMAN_TEST"]}
        hold.link.start("a", [sys.executable, "-S", "-c", look], environment, "/", hold.log("a"))
        # One descriptor is that of the listing itself.
        assert await hold.says("a") == "['3'] /dev/null default_int_handler SIG_DFL this"
        await hold.link.end()

    run(story())


def test_a_successor_adopts_within_the_grace_time(state: Path) -> None:
    async def story() -> None:
        first = await Hold.of(state, grace_s=30.0)
        pids = {name: await first.start(name, SLEEP) for name in ("a", "b")}
        first.link.close()
        second = await Hold.of(state, grace_s=0.3)
        assert {process.id: process.pid for process in second.running} == pids
        assert all(process.born == children.born(process.pid) != "" for process in second.running)
        assert second.link.process.pid == first.link.process.pid
        await second.link.end()
        assert not any(map(is_alive, pids.values()))
        await first.link.process.wait()

    run(story())


PLANE = """
import asyncio, os, sys
from pathlib import Path
from pointsman.runtimes.machine.supervisor_link import SupervisorTerms, open_supervisor

async def main():
    state = Path(sys.argv[1])
    link, _ = await open_supervisor(state, SupervisorTerms(0.2, 0.2))
    link.listen(lambda report: print(link.process.pid, report.pid, flush=True), lambda: None)
    for name, argv in (("family", eval(sys.argv[2])), ("deaf", eval(sys.argv[3]))):
        link.start(name, argv, dict(os.environ), "/", state / f"{name}.log")
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_when_the_plane_is_killed_everything_dies_after_the_grace_time(state: Path) -> None:
    command = [sys.executable, "-c", PLANE, str(state), repr(FAMILY), repr(DEAF)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as plane:
        assert plane.stdout is not None
        kept, first = map(int, plane.stdout.readline().split())
        _, second = map(int, plane.stdout.readline().split())
        family, deaf = state / "family.log", state / "deaf.log"
        until(lambda: len(family.read_text().splitlines()) > 1 and "deaf\n" in deaf.read_text())
        grandchild = int(family.read_text().splitlines()[1])
        assert all(map(is_alive, (kept, first, second, grandchild)))
        plane.kill()
    until(lambda: not any(map(is_alive, (kept, first, second, grandchild))), "the end of all")
    assert not (state / SOCKET).exists()


def test_when_the_supervisor_is_killed_its_children_die_and_the_plane_notices(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        pid = await hold.start("a", SLEEP)
        os.kill(hold.link.process.pid, signal.SIGKILL)
        await eventually(lambda: hold.lost)
        await eventually(lambda: not is_alive(pid))
        again = await Hold.of(state)  # the socket of a dead supervisor does no harm
        assert again.link.process.pid != hold.link.process.pid
        await again.link.end()
        await hold.link.process.wait()

    run(story())


def test_a_terminated_supervisor_ends_everything(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        pids = [await hold.start("a", SLEEP), await hold.start("b", DEAF)]
        os.kill(hold.link.process.pid, signal.SIGTERM)
        await eventually(lambda: hold.lost)
        await hold.link.process.wait()
        assert not any(map(is_alive, pids))

    run(story())


def test_a_process_that_left_its_group_is_killed_at_the_end(state: Path) -> None:
    escape = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True).pid, flush=True)"
    )

    async def story() -> None:
        hold = await Hold.of(state)
        await hold.start("a", [sys.executable, "-S", "-c", escape])
        assert (await hold.hear(ProcessExited, "a")).code == 0
        stray = int(await hold.says("a"))
        assert is_alive(stray)
        await hold.link.end()
        assert not is_alive(stray)

    run(story())


def test_a_supervisor_that_hangs_is_killed(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        pid = await hold.start("a", SLEEP)
        os.kill(hold.link.process.pid, signal.SIGSTOP)
        await hold.link.end(timeout_s=0.1)
        assert not is_alive(hold.link.process.pid)
        await eventually(lambda: not is_alive(pid))

    run(story())


def test_a_successor_keeps_its_socket(state: Path) -> None:
    async def story() -> None:
        old = await Hold.of(state, grace_s=0.1)
        await old.start("a", SLEEP)
        (state / SOCKET).unlink()
        new = await Hold.of(state)
        assert new.link.process.pid != old.link.process.pid
        old.link.close()
        await old.link.process.wait()
        assert (state / SOCKET).exists()
        await new.link.end()

    run(story())


def test_it_ends_without_processes_and_without_a_plane(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state, grace_s=600.0)
        pid = await hold.start("a", SLEEP)
        hold.link.close()
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not is_alive(hold.link.process.pid))
        await hold.link.process.wait()

    run(story())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n", b"{\n", b"[]\n", b"7\n", b"null\n", b'"start"\n', b"{}\n", b'{"ask": "dance"}\n', b'{"ask": []}\n',
        b'{"ask": "start"}\n', b'{"ask": "signal", "id": "a"}\n', b'{"ask": "signal", "id": "a", "number": 9999}\n',
        b'{"ask": "hello", "grace_s": "long"}\n', b'{"ask": "hello", "grace_s": NaN, "stop_grace_s": Infinity}\n',
        b"\xff\xfe\x00\n", b"[" * 100_000 + b"\n",
        b'{"ask": "start", "id": "x", "argv": 7, "env": {}, "log": "/nowhere"}\n',
        b'{"ask": "start", "id": "x", "argv": ["a\\u0000b"], "env": {"": ""}, "log": "/nowhere/x"}\n',
    ],
    ids=lambda line: repr(line[:40]),
)  # fmt: skip
def test_it_survives_invalid_messages(state: Path, garbage: bytes) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        pid = await hold.start("a", SLEEP)
        hold.link._transport.write(  # type: ignore[union-attr]
            garbage
        )
        await eventually(lambda: len(hold.heard) > 1, "an answer to garbage")
        assert hold.heard[-1].why  # type: ignore[union-attr]
        assert await hold.start("b", SLEEP)
        assert is_alive(pid)
        await hold.link.end()

    run(story())


def test_a_plane_that_sends_without_end_is_disconnected_and_the_next_is_served(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state, grace_s=30.0)
        pid = await hold.start("a", SLEEP)
        hold.link._transport.write(  # type: ignore[union-attr]
            b"x" * (supervisor.LINE_BYTES + 2 * children.PIECE)
        )
        await eventually(lambda: hold.lost)
        again = await Hold.of(state)
        assert [process.pid for process in again.running] == [pid]
        await again.link.end()
        await hold.link.process.wait()

    run(story())


def test_it_serves_one_plane_at_a_time(state: Path) -> None:
    async def story() -> None:
        hold = await Hold.of(state)
        with socket.socket(socket.AF_UNIX) as other:
            await asyncio.to_thread(other.connect, str(state / SOCKET))
            greeting = json.loads(await asyncio.to_thread(other.recv, 1000))
            assert greeting["busy"] is True
        with pytest.raises(PointsmanError, match="talks to another plane"):
            await Hold.of(state)
        await hold.link.end()

    run(story())


def test_a_state_directory_may_have_a_long_path(tmp_path: Path) -> None:
    state = tmp_path / ("long" * 30) / ("longer" * 20)
    state.mkdir(parents=True)
    assert len(os.fsencode(state)) > 200
    with short_path(state / SOCKET) as path:
        assert len(path) < 60

    async def story() -> None:
        first = await Hold.of(state, grace_s=30.0)
        pid = await first.start("a", SLEEP)
        first.link.close()
        second = await Hold.of(state)
        assert [process.pid for process in second.running] == [pid]
        await second.link.end()
        await first.link.process.wait()

    run(story())


def test_logs_are_bounded_and_keep_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LOG_BYTES", 1000)
    log = children.Log(str(tmp_path / "a.log"))
    for number in range(1000):
        log.write(b"line %d\n" % number)
    log.close()
    kept = (tmp_path / "a.log.1").read_text() + (tmp_path / "a.log").read_text()
    assert len(kept) <= 2000
    assert kept.endswith("line 998\nline 999\n")
    again = children.Log(str(tmp_path / "a.log"))  # a restart goes on where the last one ended
    again.write(b"and on\n")
    again.close()
    assert (tmp_path / "a.log").read_text().endswith("line 999\nand on\n")


def test_a_log_that_cannot_be_written_does_no_harm() -> None:
    log = children.Log("/nowhere/a.log")
    log.write(b"lost\n")
    log.note("lost too")
    log.close()
