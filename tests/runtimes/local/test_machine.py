import os
import socket
from pathlib import Path

import pytest

from pointsman.runtimes.machine.detection.system import this_machine
from pointsman.runtimes.machine.processes import Ports


def test_this_machine_has_a_name_and_resources(tmp_path: Path) -> None:
    machine = this_machine(tmp_path)  # no control group
    assert machine.name == socket.gethostname()
    assert machine.cpus == len(os.sched_getaffinity(0))
    assert machine.memory_bytes is not None
    assert machine.memory_bytes > 2**20


@pytest.mark.parametrize(
    ("cpu", "memory", "cpus", "memory_bytes"),
    [
        ("150000 100000", "1048576", 2, 1048576),
        ("50000 100000", "max", 1, None),
        ("max 100000", "max", None, None),
        ("nonsense", "nonsense", None, None),
    ],
)
def test_a_control_group_may_allow_less(
    tmp_path: Path, cpu: str, memory: str, cpus: int | None, memory_bytes: int | None
) -> None:
    (tmp_path / "cpu.max").write_text(f"{cpu}\n")
    (tmp_path / "memory.max").write_text(f"{memory}\n")
    free, bound = this_machine(tmp_path / "nowhere"), this_machine(tmp_path)
    assert bound.cpus == (free.cpus if cpus is None else min(cpus, free.cpus))
    assert bound.memory_bytes == (free.memory_bytes if memory_bytes is None else memory_bytes)


def test_no_two_instances_get_the_same_port() -> None:
    ports = Ports("127.0.0.1")
    taken = [ports.take(f"m-{number}") for number in range(200)]
    assert len(set(taken)) == 200
    again = ports.take("m-0")
    assert again not in taken[1:]
    ports.release("m-0")
    ports.release("unknown")
    with socket.socket() as free:  # the port is free
        free.bind(("127.0.0.1", again))
