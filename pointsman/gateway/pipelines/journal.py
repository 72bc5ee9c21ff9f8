"""What is noted of a request on its way: when each step began and ended, where, and what came of it."""

import time

from pointsman.gateway.pipelines.records import PipelineRecord, StepRecord


class StepJournal:
    """Of one request, or of a call through a handle that is part of one: then its steps are told with the caller's."""

    def __init__(self, record: PipelineRecord, caller: "StepJournal | None" = None) -> None:
        self.record = record
        self.caller = caller
        self._depth: int = 0 if caller is None else caller._depth + 1
        self._steps: list[StepRecord] = record.steps if caller is None else caller._steps
        self._told: dict[int, StepRecord] = {}
        """By place."""
        self._children = 0

    def began(self, place: int, step: str, node: str, now: float) -> None:
        """A step is ready."""
        request_id = f"{self.record.request_id}.{step}"
        told = self._told[place] = StepRecord(step, node, request_id, now, depth=self._depth)
        self._steps.append(told)

    def sent(self, place: int, instance_id: str) -> None:
        """It is on its way to an instance."""
        told = self._told[place]
        told.instance, told.tries = instance_id, told.tries + 1

    def ended(self, place: int, now: float, failure: str = "") -> None:
        """It has a result, or will have none."""
        told = self._told.get(place)
        if told is not None and told.ended_at is None:
            told.ended_at, told.failure = now, failure

    def over(self, status: int | None) -> float:
        """The request has ended; how long it took."""
        now = time.monotonic()
        self.record.ended_at, self.record.status = now, status
        return now - self.record.arrived_at

    # Calls through handles

    def child_of(self, step_id: str) -> str:
        """The id of a call that one of its steps makes."""
        self._children += 1
        return f"{step_id}.{self._children}"

    def model_called(self, request_id: str, what: str) -> None:
        """One of its steps calls a model."""
        self._steps.append(StepRecord(what, "", request_id, time.monotonic(), depth=self._depth + 1))
