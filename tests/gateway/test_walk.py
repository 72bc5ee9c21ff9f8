"""The walk of a request in docs/architecture.md, compared with the files that a real request passes."""

import sys
from types import FrameType
from typing import Any

from tests.architecture.house import PACKAGE
from tests.architecture.test_architecture_page import walks
from tests.gateway.bed import Bed
from tests.gateway.wire import chat

PLUGINS = ("routing/filters/", "routing/scorers/", "routing/producers/", "selection/pickers.py")
FACTS = {"routing/plugins.py", "selection/plugins.py"}
"""What plugins tell each other."""
POLICIES = {
    "routing/queue/ordering.py",
    "routing/queue/fairness.py",
    "routing/engine_model.py",
    "routing/engine_work.py",
}
VALUES = {"types.py", "reasons.py"}


def test_a_request_passes_the_files_of_its_walk(bed: Bed) -> None:
    bed.backend()
    bed.backend()
    client = bed.client()
    client.fetch(chat())
    passed: list[set[str]] = []

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            passed[-1].add(frame.f_code.co_filename.removeprefix(f"{PACKAGE}/"))

    for _ in range(5):  # timers of the plane may fire during one of them
        passed.append(set())
        bed.thread.call(lambda: sys.setprofile(trace))
        assert client.fetch(chat()).status == 200
        bed.thread.call(lambda: sys.setprofile(None))
    client.close()
    stations = {file for file in set.intersection(*passed) if not file.startswith(PLUGINS)} - POLICIES - FACTS - VALUES
    listed = {file for file, _ in walks()["A request"]}
    assert "routing/dispatcher.py" in stations
    assert stations <= listed
