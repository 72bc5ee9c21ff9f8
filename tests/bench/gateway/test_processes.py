"""What is started ends, and what it used is counted."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bench.gateway.cpu import busy_s, cpu_ns, family, resident_mb
from bench.gateway.processes import Process

CORE = min(os.sched_getaffinity(0))
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
BUSY = """
while True:
    wanted = int(input())
    sum(range(wanted))
    print("done", flush=True)
"""


def python(code: str, folder: Path) -> Process:
    return Process([sys.executable, "-c", code], cores={CORE}, log=folder / "log", piped=True)


def gone(pid: int) -> bool:
    """Ended: not there, or only waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def assert_goes(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    with python(PARENT, tmp_path) as parent:
        child = int(parent.read_line())
        assert family(parent.pid) == [parent.pid, child]
        assert resident_mb([parent.pid, child]) > resident_mb([child]) > 0
    assert_goes(parent.pid)
    assert_goes(child)


def test_a_process_that_will_not_end_is_ended(tmp_path: Path) -> None:
    with python(STUBBORN, tmp_path) as process:
        process.read_line()
        process.stop(timeout_s=0.05)
    assert gone(process.pid)


def test_nothing_outlives_the_run_even_if_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from bench.gateway.processes import Process\n"
        f"kept = Process([sys.executable, '-c', 'input()'], cores={{{CORE}}}, log=Path('log'), piped=True)\n"
        "print(kept.pid, flush=True); input()"
    )
    with python(f"import os; os.chdir({str(tmp_path)!r})\n{code}", tmp_path) as run:
        kept = int(run.read_line())
        os.kill(run.pid, signal.SIGKILL)
        assert_goes(kept)


def test_a_process_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    ended = pytest.raises(RuntimeError, match="ended without an answer: no such option")
    with python("raise SystemExit('no such option')", tmp_path) as process, ended:
        process.read_line()


def test_work_is_counted(tmp_path: Path) -> None:
    with python(BUSY, tmp_path) as process:
        spent = []
        for amount in (1, 3_000_000):
            before, busy = cpu_ns([process.pid]), busy_s(CORE)
            process.write_line(str(amount))
            process.read_line()
            spent.append(cpu_ns([process.pid]) - before)
            assert busy_s(CORE) >= busy
        assert spent[1] > spent[0]
        assert os.sched_getaffinity(process.pid) == {CORE}
