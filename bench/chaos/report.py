"""How the requests of a run ended, as tables, and which guarantees were violated."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.chaos.clients import Sample, Verdict
from bench.chaos.faults import FaultInjector
from pointsman.render.text import text_table


class FailedTry(NamedTuple):
    """A failed try; the request was retried, or its stream interrupted."""

    request_id: str
    instance: str
    why: str


class Outcome(NamedTuple):
    samples: Sequence[Sample]
    injector: FaultInjector
    failed_tries: Sequence[FailedTry]
    """From the plane's records."""
    counted: int
    """Requests that the gateway counted as ended."""
    in_flight: int
    """Requests that the gateway still counted after the load had ended."""
    settled_s: float | None
    """From the end of the load until every instance was ready; None if that did not happen."""

    def violations(self) -> list[str]:
        """Violated guarantees, each with the first five examples."""
        found = []
        for verdict, violation in VIOLATIONS.items():
            samples = [sample for sample in self.samples if sample.verdict is verdict]
            if samples:
                examples = "".join(f"\n    {one.request.request_id}: {one.why}" for one in samples[:5])
                found.append(f"{violation}: {len(samples)}{examples}")
        if self.counted != len(self.samples):
            found.append(f"the gateway counted {self.counted} requests, the clients sent {len(self.samples)}")
        if self.in_flight:
            found.append(f"the gateway still counts {self.in_flight} requests in flight")
        if self.settled_s is None:
            found.append("not all instances became ready again")
        return found

    def __str__(self) -> str:
        return "\n\n".join((self._requests_table(), self._faults_table(), self._latency_table()))

    def _requests_table(self) -> str:
        rows = []
        retried = {one.request_id for one in self.failed_tries}
        kinds = (("plain", False), ("streams", True))
        for name, samples in [
            *((name, [one for one in self.samples if one.request.stream is stream]) for name, stream in kinds),
            ("all", list(self.samples)),
        ]:
            verdicts = Counter(one.verdict for one in samples)
            recovered = sum(one.verdict is Verdict.SERVED and one.request.request_id in retried for one in samples)
            rows.append([name, str(len(samples)), *(str(verdicts[verdict]) for verdict in Verdict), str(recovered)])
        return text_table(("requests", "sent", *(verdict.value for verdict in Verdict), "served after retries"), rows)

    def _faults_table(self) -> str:
        by_id = {one.request.request_id: one for one in self.samples}
        tries: Counter[str] = Counter()
        interrupted: Counter[str] = Counter()
        for failed in self.failed_tries:
            sample = by_id.get(failed.request_id)
            fault = None if sample is None else self.injector.last_fault(failed.instance, sample.ended)
            kind = "not injected" if fault is None else fault.kind
            if sample is not None and sample.verdict is Verdict.INTERRUPTED and failed.instance == sample.instance:
                interrupted[kind] += 1
            else:
                tries[kind] += 1
        injected = Counter(fault.kind for fault in self.injector.faults)
        rows = [
            [kind, str(injected[kind]), str(interrupted[kind]), str(tries[kind])]
            for kind in sorted({*injected, *tries, *interrupted})
        ]
        return text_table(("fault", "times", "streams interrupted", "tries retried"), rows)

    def _latency_table(self) -> str:
        served = [one for one in self.samples if one.verdict is Verdict.SERVED]
        first = [one.first_at - one.began for one in served if one.request.stream and one.first_at is not None]
        rows = [
            ["first token of a stream", *_percentiles(first)],
            ["complete stream", *_percentiles(one.ended - one.began for one in served if one.request.stream)],
            ["plain response", *_percentiles(one.ended - one.began for one in served if not one.request.stream)],
        ]
        return text_table(("milliseconds", "p50", "p99", "max"), rows)


VIOLATIONS = {
    Verdict.LOST: "requests without a complete response or an error",
    Verdict.WRONG: "wrong, repeated or badly framed responses",
    Verdict.REFUSED: "requests that failed before their response began, with a healthy instance",
    Verdict.UNREACHABLE: "refused connections",
}


def _percentiles(seconds: Iterable[float]) -> list[str]:
    ordered = sorted(seconds)
    if not ordered:
        return ["", "", ""]
    at = (0.5, 0.99, 1.0)
    return [f"{1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]:.0f}" for share in at]
