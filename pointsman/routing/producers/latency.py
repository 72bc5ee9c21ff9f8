"""Predicts when each endpoint would answer a request, from what was sent to it and from what engines have done."""

from collections.abc import Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Annotated

from pointsman.parameters import NoEffect
from pointsman.routing.endpoints import THEIR_TOKENS, Endpoint
from pointsman.routing.engine_model import EngineModel
from pointsman.routing.engine_work import MIN_ANSWER, EngineWork, Reading
from pointsman.routing.plugins import (
    LATENCY_PREDICTIONS,
    OUTLOOK,
    PREDICTED,
    UNCACHED_REQUEST_TOKENS,
    Endpoints,
    LatencyOutlook,
    LatencyPrediction,
    RequestCycle,
)
from pointsman.selection import Column, PerMembers, SchedulingResult
from pointsman.selection.arrays import np
from pointsman.selection.columns import array, column_of, linear, plus, times
from pointsman.types import RequestMetadata

if TYPE_CHECKING:
    from pointsman.routing.events import Ended

ALIKE = 0.25
"""Instances whose speeds differ by less count as equally fast. Otherwise an idle fleet would use only the fastest."""
BUSY_MS = 60_000.0
"""Time constant of the average share of busy endpoints."""
SLO_HEADERS = {kind: (f"x-llm-d-slo-{kind}-ms", f"x-slo-{kind}-ms") for kind in ("ttft", "tpot")}


def objective_ms(request: RequestMetadata, kind: str) -> float:
    """The objective for "ttft" or "tpot" in the headers of a request; 0 if there is none."""
    headers = request.headers
    if not headers:
        return 0.0
    name, alias = SLO_HEADERS[kind]
    written = headers.get(name) or headers.get(alias)
    if not written:
        return 0.0
    try:
        stated = float(written)
    except ValueError:
        return 0.0
    return stated if 0.0 < stated < inf else 0.0


class WorkColumns:
    """Sums for each row of the fleet, so that all rows are computed at once."""

    __slots__ = ("context", "head", "left", "patient", "since", "slowness", "works")

    def __init__(self, works: list[EngineWork], arrays: bool) -> None:
        self.works = works
        count = len(works)
        self.left, self.head, self.since = (column_of([0.0] * count, arrays) for _ in range(3))
        self.slowness, self.context = column_of([1.0] * count, arrays), column_of([0.0] * count, arrays)
        self.patient: set[int] = set()
        """Rows that have a prompt whose first token the gateway will not see."""
        for row in range(count):
            self.note(row)

    def note(self, row: int) -> None:
        """Update a row whose work has changed."""
        work = self.works[row]
        self.left[row], self.head[row], self.since[row] = work.left_ms, work.head_ms, work.since
        slowness = work.slowness.value
        self.slowness[row] = slowness if abs(slowness - 1.0) > ALIKE else 1.0
        self.context[row] = work.context
        if work.patient:
            self.patient.add(row)
        else:
            self.patient.discard(row)

    def behind(self, now: float) -> Column:
        """The time until the prompts on each row are read."""
        if self.patient:
            head, since = self.head, self.since
            for row in [row for row in self.patient if now - since[row] >= head[row]]:
                self.works[row].settle(now)
                self.note(row)
        if isinstance(self.left, list):
            return [
                left - (head if now - since > head else now - since) if left else 0.0
                for left, head, since in zip(self.left, self.head, self.since)  # noqa: B905 (of one length)
            ]
        return np.where(self.left > 0.0, self.left - np.minimum(now - array(self.since), self.head), 0.0)


class PredictionErrors:
    """The errors of predictions, as sums in milliseconds that only grow."""

    __slots__ = ("sums",)

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {"ttft": [0.0] * 4, "tpot": [0.0] * 4}
        """Four numbers per latency: the count of predictions, and the sums of predictions, of measurements and of
        absolute errors."""

    def add(self, kind: str, predicted_ms: float, actual_ms: float) -> None:
        sums = self.sums[kind]
        sums[0] += 1.0
        sums[1] += predicted_ms
        sums[2] += actual_ms
        sums[3] += abs(predicted_ms - actual_ms)

    def share(self, kind: str) -> float | None:
        """The mean error divided by the mean of the measured values; None before the first measurement."""
        _, _, actual, error = self.sums[kind]
        return error / actual if actual else None


class PredictedLatencyProducer:
    """Learns how fast engines read prompts and write answers, and predicts both latencies of a request per endpoint.

    A deployment learns one model from all of its endpoints, and for each endpoint how much slower or faster it is. It
    uses only what the gateway itself observes, so what it knows includes the last request. Objectives are those of the
    request, or else `ttft_slo_ms` and `tpot_slo_ms`.
    """

    def __init__(
        self,
        ttft_slo_ms: float = 5000.0,
        tpot_slo_ms: float = 100.0,
        streaming_mode: Annotated[bool, NoEffect("each request says whether it streams")] = True,
        sampling_mean: Annotated[float, NoEffect("each answer is learned from")] = 1000.0,
        max_sampled_tokens: Annotated[int, NoEffect("each answer is learned from")] = 20,
        slo_buffer_factor: Annotated[float, NoEffect("objectives are taken as they are stated")] = 1.0,
    ) -> None:
        for parameter, value in {"ttftSloMs": ttft_slo_ms, "tpotSloMs": tpot_slo_ms}.items():
            if not value > 0:
                raise ValueError(f"{parameter} is {value:g}; it must be above 0")
        self._ttft, self._tpot = ttft_slo_ms, tpot_slo_ms
        self.geometry = ttft_slo_ms, tpot_slo_ms
        """Its settings: producers with equal settings have learned the same."""
        self.model = EngineModel()
        self.works: dict[str, EngineWork] = {}
        """The work of instances, by endpoint id."""
        self._columns = PerMembers(self._laid_out)
        self._current = WorkColumns([], arrays=False)
        self._readers: dict[str, Endpoint] = {}
        """By request id, the endpoint that reads the prompt, for requests whose answers another endpoint writes."""
        self.errors = PredictionErrors()
        self._busy = 0.0
        self._seen_at = 0.0

    def _laid_out(self, fleet: Endpoints) -> WorkColumns:
        works = [self.works.get(one.id) or self._begin(one) for one in fleet]
        self._current = WorkColumns(works, fleet.arrays)
        return self._current

    def _begin(self, endpoint: Endpoint) -> EngineWork:
        work = self.works[endpoint.id] = EngineWork(self.model)
        return work

    def produce(self, cycle: RequestCycle, candidates: Endpoints) -> None:
        columns, request, state = self._columns.of(candidates), cycle.request, cycle.state
        prompt = float(request.input_tokens)
        each, per_token, per_pair = self.model.reading.coefficients
        per_token *= 1e-3
        per_pair *= 1e-6
        half, slope = per_pair / 2, per_token + per_pair * prompt
        tokens: Column | None = state.get(UNCACHED_REQUEST_TOKENS)
        slowness = columns.slowness
        reading: Column
        if tokens is None:
            tokens = column_of([prompt] * len(columns.works), not isinstance(slowness, list))
        if isinstance(slowness, list):
            reading = [slow * (each + u * (slope - half * u)) for slow, u in zip(slowness, tokens)]  # noqa: B905
        else:
            tokens = array(tokens)
            reading = slowness * (each + tokens * (slope - half * tokens))
        now = cycle.now * 1000.0
        behind = columns.behind(now)
        theirs = candidates.columns[THEIR_TOKENS]
        if any(theirs) if isinstance(theirs, list) else theirs.any():
            # Of other dispatchers' requests only the tokens are known. They are assumed to take as long as ours.
            behind = plus(behind, times(linear(theirs, per_token, 0.0), slowness))
        if len(behind):
            idle = behind.count(0.0) if isinstance(behind, list) else len(behind) - np.count_nonzero(behind)
            passed, self._seen_at = now - self._seen_at, now
            self._busy += passed / (passed + BUSY_MS) * (1.0 - idle / len(behind) - self._busy)
        ttft, tpot = self._objectives(request)
        waited = now - request.arrived_at(cycle.now) * 1000.0
        outlook = LatencyOutlook(
            behind, reading, columns.context, columns.works, self.model, ttft, tpot, waited, self._ttft, self._busy
        )
        state[OUTLOOK] = outlook
        state[LATENCY_PREDICTIONS] = Predictions(outlook, candidates)

    def _objectives(self, request: RequestMetadata) -> tuple[float, float]:
        """The objectives for the first token and per token, in ms: those of the request, else the defaults."""
        ttft = tpot = 0.0
        if request.headers:
            ttft, tpot = objective_ms(request, "ttft"), objective_ms(request, "tpot")
        if not ttft and request.slo_deadline_ms:
            # The deadline is for the whole answer. The first token is due earlier, by the time to write the answer.
            lengths = self.model.lengths.mean
            tokens = lengths if request.max_tokens is None else min(lengths, request.max_tokens)
            ttft = max(request.slo_deadline_ms - tokens * self.model.step_ms(0.0), 0.1 * request.slo_deadline_ms)
        return ttft or self._ttft, tpot or self._tpot

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None:
        outlook: LatencyOutlook | None = cycle.state.get(OUTLOOK)
        if outlook is None:
            return
        request, target = cycle.request, result.target
        reader = target
        if len(result.results) > 1 and result.primary != "prefill" and "prefill" in result.results:
            reader = result.results["prefill"].targets[0]
            self._readers[request.request_id] = reader
        row, now = reader.row, cycle.now * 1000.0
        ms, prompt = float(outlook.reading[row]), float(request.input_tokens)
        uncached: Column | None = cycle.state.get(UNCACHED_REQUEST_TOKENS)
        tokens = prompt if uncached is None else min(float(uncached[row]), prompt)
        work = outlook.works[row]
        ttft, tpot = cycle.state[PREDICTED] = float(outlook.behind[row]) + ms, outlook.works[target.row].tpot_ms()
        due, tpot_slo = now - outlook.waited + outlook.ttft_slo_ms, outlook.tpot_slo_ms
        one = Reading(ms, tokens, prompt, now, due, tpot_slo, ttft, tpot, streams=request.streams)
        work.sent(request.request_id, one)
        self._note(reader)

    def first_token(self, endpoint: Endpoint, request: RequestMetadata, now: float) -> None:
        reader = self._readers.pop(request.request_id, None) if self._readers else None
        work = self.works.get((reader or endpoint).id)
        if work is None:
            return
        predicted_ms = work.first_token(request.request_id, now * 1000.0)
        if predicted_ms is not None:
            self.errors.add("ttft", predicted_ms, now * 1000.0 - work.writing[request.request_id].sent)
        if reader is not None:
            work.ended(request.request_id, None, now * 1000.0)
        self._note(reader or endpoint)

    def ended(self, endpoint: Endpoint, request: RequestMetadata, answer: "Ended | None", now: float) -> None:
        tokens = answer.output_tokens if answer is not None and answer.status < 400 else None
        if tokens:
            self.model.lengths.add(tokens)
        reader = self._readers.pop(request.request_id, None) if self._readers else None
        work = self.works.get((reader or endpoint).id)
        if work is None:
            return
        written = work.writing.get(request.request_id)
        work.ended(request.request_id, tokens, now * 1000.0)
        if written is not None and written.streams and tokens is not None and tokens > MIN_ANSWER:
            self.errors.add("tpot", written.step, (now * 1000.0 - written.began) / (tokens - 1))
        self._note(reader or endpoint)

    def departed(self, endpoint: Endpoint) -> None:
        self.works.pop(endpoint.id, None)

    def _note(self, endpoint: Endpoint) -> None:
        columns = self._current
        if 0 <= endpoint.row < len(columns.works):
            columns.note(endpoint.row)


class Predictions(Mapping[str, LatencyPrediction]):
    """The predictions by endpoint id, made when they are first read."""

    __slots__ = ("_made", "_outlook", "_roster")

    def __init__(self, outlook: LatencyOutlook, roster: Endpoints) -> None:
        self._outlook = outlook
        self._roster = roster
        self._made: dict[str, LatencyPrediction] | None = None

    def _all(self) -> dict[str, LatencyPrediction]:
        if self._made is None:
            outlook = self._outlook
            self._made = {endpoint.id: predicted(outlook, endpoint.row) for endpoint in self._roster.whole}
        return self._made

    def __getitem__(self, endpoint_id: str) -> LatencyPrediction:
        return self._all()[endpoint_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._roster.whole)

    def __contains__(self, endpoint_id: object) -> bool:
        return endpoint_id in self._all()


def predicted(outlook: LatencyOutlook, row: int) -> LatencyPrediction:
    work = outlook.works[row]
    ttft, tpot = float(outlook.behind[row]) + float(outlook.reading[row]), work.tpot_ms()
    in_time, fast = outlook.ttft_slo_ms - outlook.waited - ttft, outlook.tpot_slo_ms - tpot
    return LatencyPrediction(ttft, tpot, in_time, fast, in_time >= 0, fast >= 0, len(work.reading) + len(work.writing))
