"""What the dispatcher writes down: the story of each request, and the counts over all of them."""

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.outcomes import Refusal
from pointsman.routing.pools import Sent
from pointsman.routing.records import Record, Records
from pointsman.routing.tally import Tally
from pointsman.selection import SchedulingFailure, Trace
from pointsman.types import RequestMetadata, SchedulingDecision


class Journal:
    """Records and tally, kept together. A record may have made room for newer ones; the counts are always kept."""

    def __init__(self, keep_records: int, strategy: str) -> None:
        self.records = Records(keep_records)
        self.tally = Tally()
        self._strategy = strategy
        """Whose requests they are until somebody has decided."""

    def arrived(self, request: RequestMetadata, now: float) -> None:
        self.tally.arrived += 1
        self.records.open(request, now)

    def tried(self, request: RequestMetadata, trace: Trace | None, failure: SchedulingFailure[Endpoint] | None) -> None:
        """Somebody was looked for, and found or not."""
        record = self.records.get(request.request_id)
        if record is not None:
            record.trace, record.failure = trace, failure

    def sent(self, sent: Sent, made: SchedulingDecision) -> None:
        self.tally.dispatched(sent.strategy, made.target_instance_id, sent.item.taken_at - sent.item.enqueued_at)
        record = self.records.get(made.request_id)
        if record is not None:
            record.strategy, record.decision, record.failure = sent.strategy, made, None
            record.sent_at = sent.item.taken_at

    def first_token(self, request_id: str, now: float) -> None:
        record = self.records.get(request_id)
        if record is not None:
            record.first_token_at = now

    def failed(self, request: RequestMetadata, culprit: str, why: str) -> None:
        """A try came to nothing."""
        self.tally.retries[culprit] += 1
        record = self.records.get(request.request_id)
        if record is not None:
            record.failures.append((culprit, why))
            record.decision = None

    def served(self, request: RequestMetadata, output_tokens: int | None, now: float) -> None:
        record = self.records.get(request.request_id)
        if record is not None:
            record.ended_at, record.output_tokens = now, output_tokens
        self._ended("served", record)

    def refused(self, request: RequestMetadata, refusal: Refusal, now: float) -> None:
        record = self.records.get(request.request_id)
        if record is not None:
            record.refusal, record.ended_at = refusal, now
        self._ended(refusal.outcome.value, record)

    def error(self, error: Exception, whose: str = "") -> None:
        """A policy or plugin raised."""
        said = f"{type(error).__name__}: {error}"
        self.tally.policy_error(f"{whose}: {said}" if whose else said)

    def _ended(self, outcome: str, record: Record | None) -> None:
        if record is None:
            self.tally.ended(self._strategy, "", outcome, None)
            return
        instance = "" if record.decision is None else record.decision.target_instance_id
        self.tally.ended(record.strategy or self._strategy, instance, outcome, record.met_deadline)
