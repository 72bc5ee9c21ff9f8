"""What became of all requests, which promises were kept, and the table of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.chaos.clients import Sample, Verdict
from bench.chaos.mischief import Mischief
from pointsman.render.text import text_table


class FailedTry(NamedTuple):
    """A try of a request that came to nothing and was made good elsewhere, or broke the answer off."""

    request_id: str
    instance: str
    why: str


class Outcome(NamedTuple):
    """A run."""

    samples: Sequence[Sample]
    mischief: Mischief
    failed_tries: Sequence[FailedTry]
    """As the plane's own records have them."""
    counted: int
    """Requests that the gateway counts as ended."""
    in_flight: int
    """Requests that the gateway still counted when all clients had gone."""
    settled_s: float | None
    """From the end of the load until every instance was ready; None: never."""

    def broken_promises(self) -> list[str]:
        """What must not be, each with the first examples."""
        broken = []
        for verdict, promise in PROMISES.items():
            found = [sample for sample in self.samples if sample.verdict is verdict]
            if found:
                examples = "".join(f"\n    {one.ask.request_id}: {one.why}" for one in found[:5])
                broken.append(f"{promise}: {len(found)}{examples}")
        if self.counted != len(self.samples):
            broken.append(f"the gateway counts {self.counted} requests, its clients {len(self.samples)}")
        if self.in_flight:
            broken.append(f"the gateway still counts {self.in_flight} requests that nobody waits for")
        if self.settled_s is None:
            broken.append("not every instance came back")
        return broken

    def __str__(self) -> str:
        return "\n\n".join((self._of_requests(), self._of_faults(), self._of_times()))

    def _of_requests(self) -> str:
        rows = []
        retried = {one.request_id for one in self.failed_tries}
        kinds = (("plain", False), ("streams", True))
        for name, samples in [
            *((name, [one for one in self.samples if one.ask.stream is stream]) for name, stream in kinds),
            ("all", list(self.samples)),
        ]:
            verdicts = Counter(one.verdict for one in samples)
            again = sum(one.verdict is Verdict.SERVED and one.ask.request_id in retried for one in samples)
            rows.append([name, str(len(samples)), *(str(verdicts[verdict]) for verdict in Verdict), str(again)])
        return text_table(("requests", "sent", *(verdict.value for verdict in Verdict), "served after retries"), rows)

    def _of_faults(self) -> str:
        by_id = {one.ask.request_id: one for one in self.samples}
        tries: Counter[str] = Counter()
        broken_off: Counter[str] = Counter()
        for failed in self.failed_tries:
            sample = by_id.get(failed.request_id)
            strike = None if sample is None else self.mischief.struck(failed.instance, sample.ended)
            kind = "none of ours" if strike is None else strike.kind
            if sample is not None and sample.verdict is Verdict.BROKEN_OFF and failed.instance == sample.instance:
                broken_off[kind] += 1
            else:
                tries[kind] += 1
        struck = Counter(strike.kind for strike in self.mischief.strikes)
        rows = [
            [kind, str(struck[kind]), str(broken_off[kind]), str(tries[kind])]
            for kind in sorted({*struck, *tries, *broken_off})
        ]
        return text_table(("fault", "times", "streams broken off", "tries made good elsewhere"), rows)

    def _of_times(self) -> str:
        served = [one for one in self.samples if one.verdict is Verdict.SERVED]
        first = [one.first_at - one.began for one in served if one.ask.stream and one.first_at is not None]
        rows = [
            ["first token of a stream", *_percentiles(first)],
            ["whole stream", *_percentiles(one.ended - one.began for one in served if one.ask.stream)],
            ["plain answer", *_percentiles(one.ended - one.began for one in served if not one.ask.stream)],
        ]
        return text_table(("milliseconds", "p50", "p99", "most"), rows)


PROMISES = {
    Verdict.LOST: "requests without a whole answer or a clean error",
    Verdict.WRONG: "answers that are wrong, doubled, or badly framed",
    Verdict.REFUSED: "requests that failed although nothing of the answer was out and an instance lived",
    Verdict.UNREACHABLE: "times that nobody took a connection",
}


def _percentiles(seconds: Iterable[float]) -> list[str]:
    ordered = sorted(seconds)
    if not ordered:
        return ["", "", ""]
    at = (0.5, 0.99, 1.0)
    return [f"{1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]:.0f}" for share in at]
