"""What the dispatcher writes down: the story of each request, and the counts over all of them."""

from collections.abc import Callable

from pointsman.routing.decisions import Decided
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.events import Ended
from pointsman.routing.outcomes import Refusal
from pointsman.routing.pools import Sent
from pointsman.routing.records import Record, Records
from pointsman.routing.tally import Counters
from pointsman.selection import SchedulingFailure, Trace
from pointsman.types import RequestMetadata, SchedulingDecision


class Journal:
    """Records and tally, kept together. A record may have made room for newer ones; the counts are always kept."""

    def __init__(self, keep_records: int, strategy: str) -> None:
        self.records = Records(keep_records)
        self.tally = Counters()
        self.listener: Callable[[Record], None] | None = None
        """Told of each request that has ended, served or refused, with its whole story."""
        self._strategy = strategy
        """Whose requests they are until somebody has decided."""

    def go_on_from(self, other: "Journal") -> None:
        """Write on where another stopped."""
        self.records, self.tally, self.listener = other.records, other.tally, other.listener

    def arrived(self, request: RequestMetadata, now: float) -> Record:
        self.tally.arrived += 1
        return self.records.open(request, now)

    def went_at_once(self, sent: Sent, made: Decided, trace: Trace | None, now: float) -> None:
        """It arrived and was sent in one."""
        self.tally.arrived += 1
        self.tally.dispatched(sent.strategy, made.target_instance_id, 0.0)
        record = self.records.open(sent.item.request, now)
        record.trace, record.strategy, record.made, record.sent_at = trace, sent.strategy, made, now

    def tried(self, request: RequestMetadata, trace: Trace | None, failure: SchedulingFailure[Endpoint] | None) -> None:
        """Somebody was looked for, and found or not."""
        record = self.records.get(request.request_id)
        if record is not None:
            record.trace, record.failure = trace, failure

    def sent(self, sent: Sent, made: Decided | SchedulingDecision) -> None:
        item = sent.item
        self.tally.dispatched(sent.strategy, made.target_instance_id, item.taken_at - item.enqueued_at)
        record = self.records.get(made.request_id)
        if record is not None:
            record.strategy, record.made, record.failure = sent.strategy, made, None
            record.sent_at = item.taken_at

    def first_token(self, request_id: str, now: float) -> None:
        record = self.records.get(request_id)
        if record is not None:
            record.first_token_at = now

    def failed(self, request: RequestMetadata, culprit: str, why: str) -> None:
        """A try came to nothing."""
        self.tally.retries[culprit] += 1
        record = self.records.get(request.request_id)
        if record is not None:
            record.failures += ((culprit, why),)
            record.made = None

    def served(self, event: Ended, now: float) -> None:
        record = self.records.get(event.request_id)
        if record is not None:
            record.ended_at, record.output_tokens = now, event.output_tokens
            if event.input_tokens is not None:
                record.input_tokens, record.cached_tokens = event.input_tokens, event.cached_tokens
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
        self.tally.ended(record.strategy or self._strategy, record.instance, outcome, record.met_deadline)
        if self.listener is not None:
            self.listener(record)
