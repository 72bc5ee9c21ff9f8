"""Asks instances whether they work, one question per instance at a time."""

import asyncio
from collections.abc import Callable

import msgspec

from pointsman.control.desired import Address
from pointsman.control.events import Answered, ControllerEvent, Silent
from pointsman.engines import ProbeRequest
from pointsman.runtimes.local.asking import Unanswered, ask


class Prober:
    """Puts questions to instances and tells the answers; a new question to an instance takes the place of the old."""

    def __init__(self, tell: Callable[[ControllerEvent], None]) -> None:
        self._tell = tell
        self._asking: dict[str, asyncio.Task[None]] = {}

    def probe(
        self, instance_id: str, address: Address, question: ProbeRequest, *, readiness: bool, timeout_s: float
    ) -> None:
        """Ask now; tell `Answered` or `Silent` within the time limit."""
        self.forget(instance_id)
        work = self._probe(instance_id, address, question, readiness, timeout_s)
        self._asking[instance_id] = asyncio.get_running_loop().create_task(work)

    def forget(self, instance_id: str) -> None:
        """The answer does not matter any more."""
        task = self._asking.pop(instance_id, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Ask nobody any more."""
        for instance_id in list(self._asking):
            self.forget(instance_id)

    async def _probe(
        self, instance_id: str, address: Address, question: ProbeRequest, readiness: bool, timeout_s: float
    ) -> None:
        why = await _refusal(address, question, timeout_s, is_work=readiness)
        self._asking.pop(instance_id, None)
        self._tell(Silent(instance_id, why) if why else Answered(instance_id, readiness))


async def _refusal(address: Address, question: ProbeRequest, timeout_s: float, *, is_work: bool) -> str:
    """Why a probe failed; empty: it did not. `is_work`: what it did must be there to be seen, too."""
    try:
        answer = await ask(address, question.method, question.path, question.body, timeout_s=timeout_s)
    except Unanswered as error:
        return str(error)
    said = " ".join(answer.body[:200].decode("utf-8", "replace").split())
    if 200 <= answer.status < 300:
        wrong = is_work and not _is_json_object(answer.body)
        return f"{question.method} {question.path} was answered with something else than JSON: {said}" if wrong else ""
    return f"{question.method} {question.path} was answered with {answer.status}{f': {said}' if said else ''}"


def _is_json_object(body: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(body), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
