"""No process of a test survives it: whatever a test starts carries its mark, and is looked for afterwards."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from tests.runtimes.local.processes import marked

MARK = "POINTSMAN_TEST"


@pytest.fixture(autouse=True)
def no_survivors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mark = uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield
    left = marked(f"{MARK}={mark}")
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}, "processes that the test left behind"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder
