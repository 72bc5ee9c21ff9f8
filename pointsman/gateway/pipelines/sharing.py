"""Files in shared memory that belong to requests: removed once nobody needs them, so that senders use them again."""

import time
from asyncio import AbstractEventLoop
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pointsman.gateway.pipelines.request import PipelineRequest

LEFT_S = 900.0
"""What is older is nobody's: its request has ended without our hearing of the file."""
SWEEP_S = 60.0
READ_S = 30.0
"""An answer to somebody whose request we do not know is kept so long."""


class SharedFiles:
    """The files of one plane."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._folder: Path | None = None
        self._borrowed: dict[PipelineRequest, list[str]] = {}
        """Of calls through handles that have ended: what they answered, until the request that called them ends."""

    def use(self, folder: Path) -> None:
        """This is where they are."""
        if self._folder is None:
            self._loop.call_later(SWEEP_S, self._sweep)
        self._folder = folder

    def ended(self, passage: PipelineRequest) -> None:
        """A request needs nothing any more, but that whoever called it still has to read its answer."""
        self._remove(passage.results.files())
        self._remove(self._borrowed.pop(passage, ()))
        answer = list(passage.results.answer_files())
        if passage.caller is not None and not passage.caller.over:
            self._borrowed.setdefault(passage.caller, []).extend(answer)
        elif answer:
            self._loop.call_later(READ_S, self._remove, answer)

    def _remove(self, files: Iterable[str]) -> None:
        for file in files:
            if self._folder is not None:
                with suppress(OSError):
                    (self._folder / file).unlink()

    def _sweep(self) -> None:
        self._loop.call_later(SWEEP_S, self._sweep)
        oldest = time.time() - LEFT_S
        with suppress(OSError):
            for file in self._folder.iterdir() if self._folder is not None else ():
                if not file.name.startswith(".") and file.stat().st_ctime < oldest:
                    file.unlink()
