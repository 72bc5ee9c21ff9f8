"""Files in shared memory that belong to requests: removed once nobody needs them, so that senders use them again."""

from asyncio import AbstractEventLoop
from collections.abc import Iterable

from pointsman.gateway.pipelines.request import PipelineRequest
from pointsman.runtimes.interface import SharedMemory

LEFT_S = 900.0
"""What is older is nobody's: its request has ended without our hearing of the file."""
SWEEP_S = 60.0
READ_S = 30.0
"""An answer to somebody whose request we do not know is kept so long."""


class SharedFiles:
    """The files of one plane."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._memory: SharedMemory | None = None
        self._borrowed: dict[PipelineRequest, list[str]] = {}
        """Of calls through handles that have ended: what they answered, until the request that called them ends."""

    def use(self, memory: SharedMemory) -> None:
        """This is where they are."""
        if self._memory is None:
            self._loop.call_later(SWEEP_S, self._sweep)
        self._memory = memory

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
        if self._memory is not None:
            self._memory.remove(files)

    def _sweep(self) -> None:
        self._loop.call_later(SWEEP_S, self._sweep)
        if self._memory is not None:
            self._memory.remove_older_than(LEFT_S)
