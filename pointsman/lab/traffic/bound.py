"""Bounds on how good any policy could be on a recording. No replay exceeds them.

Enters: a recording, a load, and a number of equal engines. Leaves: the work that is left with the best possible cache,
and the share of requests that could be in time. All assumptions are in favour of the policy:

- The longest prefix that a prompt shares with any earlier arrival need not be computed, whichever engine computed it
  before. At least the last token of a prompt is computed. Caches are unlimited, all engines share them, and they are
  filled when a request arrives.
- Work is marginal. A token costs `cc` and its part of a full step's `c0`. Attention and context have their full cost.
  Reading weights costs nothing, and no step is partly filled.
- N engines are one machine that is N times as fast. This machine may pause any work without loss.
- A request is in time if the work until its first token is done by the deadline of that token, and all its work by the
  deadline of its last token. Requests are counted separately for each deadline. The smaller number is the bound.

A request that would miss its objective alone on an idle engine misses it under any policy (an intrinsic miss). For the
other requests, the method of Moore and Hodgson finds the maximum number that the pooled machine ends by their
deadlines. The method takes requests in the order of their deadlines. When a request is late, the method drops the
request whose absence helps most. Here, deadlines have the same order as arrivals, and for such deadlines the method is
optimal (Kise, Ibaraki and Mine). A dropped request may wait without limit. If every request must be served, the longest
wait is at least as long as on the pooled machine in the order of arrival. No policy can keep a shorter limit.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pointsman.errors import PointsmanError
from pointsman.lab.traffic.arrivals import ReplayLoad, arrivals
from pointsman.lab.traffic.fleets import LabFleet
from pointsman.lab.traffic.measures import Objectives
from pointsman.lab.traffic.recording import BLOCK_TOKENS, RecordedRequest, Recording
from pointsman.simulator.continuous_batching import Limits
from pointsman.simulator.performance import Hardware, hardware

Seconds = NDArray[np.float64]
STEP_TOKENS = Limits().max_num_batched_tokens
SHARE = 0.9
"""Default share of requests that must be in time for a speed to be within the capacity."""
TOLERANCE = 0.005
"""Relative precision of a capacity."""


class RequestWork(msgspec.Struct, frozen=True):
    """The minimum work of each request, in seconds on one engine. Requests are in the order of arrival."""

    first_token: Seconds
    """Work until the first token."""
    whole: Seconds
    alone: Seconds
    """Time to the first token on an idle engine."""
    alone_whole: Seconds
    cached_tokens: int
    input_tokens: int


class TrafficBound(msgspec.Struct, frozen=True, kw_only=True):
    """The bound at one speed, with one seed."""

    hit_rate: float
    """Share of input tokens that an unlimited shared cache would hold."""
    serve_all: float
    """The speed-up at which the work keeps all engines busy all the time."""
    intrinsic_misses: float
    """Share of requests that no policy can serve in time."""
    attainment: float
    """Maximum share of requests in time, if late requests may wait without limit."""
    least_wait_s: float
    """If every request is served, at least one request waits this long for its first token."""

    def attainment_within(self, limit_s: float) -> float | None:
        """The attainment if every first token must come within the limit. None if no policy can keep the limit."""
        return self.attainment if self.least_wait_s <= limit_s else None


def engines_of(fleet: LabFleet) -> tuple[int, Hardware]:
    """The number of engines and their hardware. Raises if the fleet does not have equal simulated engines."""
    [deployment, *more] = fleet.document["deployments"]
    engine = deployment.get("engine") or {}
    parameters = engine.get("parameters") or {}
    if more or engine.get("type") != "simulated" or "hardware" not in parameters or deployment.get("scaling"):
        raise PointsmanError(
            f"there is a bound for a fixed number of equal simulated engines only, such as "
            f'"16x70B|a100_sxm|vllm|tp8"; {fleet.text} is something else'
        )
    return deployment.get("replicas", 1), hardware(parameters["hardware"])


def work_of(requests: Sequence[RecordedRequest], machine: Hardware) -> RequestWork:
    """The minimum work of requests, in the order of arrival."""
    seen: set[int] = set()
    rows = np.empty((4, len(requests)))
    cached_tokens = input_tokens = 0
    for index, one in enumerate(requests):
        known = 0
        for block in one.hash_ids[: (one.input_length - 1) // BLOCK_TOKENS]:
            if block not in seen:
                break
            known += 1
        seen.update(one.hash_ids)
        cached, output = known * BLOCK_TOKENS, max(one.output_length, 1)
        rows[:, index] = _marginal(one.input_length, cached, output, machine)
        cached_tokens += cached
        input_tokens += one.input_length
    first, whole, alone, alone_whole = rows / 1000
    return RequestWork(first, whole, alone, alone_whole, cached_tokens, input_tokens)


def _marginal(input_tokens: int, cached: int, output: int, machine: Hardware) -> tuple[float, float, float, float]:
    """Four times in ms for one request: the work until its first token, all its work, and the times to its first and
    last token on an idle engine."""
    own = input_tokens - cached
    token = machine.cc + machine.c0 / STEP_TOKENS
    first = token * own + machine.ca * own * (cached + own / 2)
    more = output - 1
    context = more * input_tokens + more * (more + 1) / 2
    whole = first + (token + machine.cb) * more + machine.ck * context
    alone, done = 0.0, cached
    while done < input_tokens:
        part = min(STEP_TOKENS, input_tokens - done)
        alone += machine.step_ms(part, part * (done + part / 2), 0, 0)
        done += part
    steps = more * machine.step_ms(1, 0.0, 0, 1) + machine.ck * context
    return first, whole, alone, alone + steps


def bound(
    recording: Recording, load: ReplayLoad, fleet: LabFleet, objectives: Objectives, seed: int = 0
) -> TrafficBound:
    """The bound of a replay with this load and seed."""
    number, machine = engines_of(fleet)
    each = list(arrivals(recording, load, seed))
    work = work_of([one.request for one in each], machine)
    times = np.array([one.at for one in each])
    return _bound(demand_of(work, [one.request for one in each], objectives), times, work, number, load.speed)


class TimelyWork(msgspec.Struct, frozen=True):
    """The work of each request, and the deadlines by which it must be done."""

    possible: NDArray[np.bool_]
    """Whether the request could be in time on an idle engine."""
    first_limit: Seconds
    first_work: Seconds
    """Work that is due within `first_limit`: all work if the request has an objective for its whole answer."""
    last_limit: Seconds
    """Time limit for all work of the request. It includes the objective for the time per token."""


def demand_of(work: RequestWork, requests: Sequence[RecordedRequest], objectives: Objectives) -> TimelyWork:
    limits = np.array([objectives.ttft_s if one.slo_ms is None else one.slo_ms / 1000 for one in requests])
    own = np.array([one.slo_ms is not None for one in requests])
    paced = np.array([max(one.output_length - 1, 0) * objectives.tpot_s for one in requests])
    return TimelyWork(
        np.where(own, work.alone_whole, work.alone) <= limits,
        limits,
        np.where(own, work.whole, work.first_token),
        np.where(own, limits, limits + paced),
    )


def _bound(demand: TimelyWork, times: Seconds, work: RequestWork, number: int, speed: float) -> TrafficBound:
    span_s = float(times[-1]) or 1.0
    some = demand.possible
    by_first = most_in_time(times[some], demand.first_work[some] / number, demand.first_limit[some])
    by_last = most_in_time(times[some], work.whole[some] / number, demand.last_limit[some])
    return TrafficBound(
        hit_rate=work.cached_tokens / work.input_tokens,
        serve_all=speed * number * span_s / float(work.whole.sum()),
        intrinsic_misses=1 - float(some.mean()),
        attainment=min(by_first, by_last) / len(times),
        least_wait_s=float(_delays(times, work.first_token / number).max()),
    )


def _delays(times: Seconds, work: Seconds) -> Seconds:
    """Time from arrival to end for each job, if one machine takes the jobs in the order of arrival."""
    total = np.cumsum(work)
    began = np.maximum.accumulate(times - (total - work))
    ends: Seconds = began + total - times
    return ends


def most_in_time(times: Seconds, work: Seconds, limits: Seconds) -> int:
    """The maximum number of jobs that one machine can end within their limits.

    Deadlines are delayed until they have the order of arrivals, which can only increase this number.
    """
    deadlines = np.maximum.accumulate(times + limits)
    kept = 0
    size = len(times)
    starts, arrived, needs = np.empty(size), np.empty(size), np.empty(size)
    """Start, arrival and work of the jobs that are kept, in order. `kept` is the number of these jobs."""
    free = -np.inf
    busy_from = 0
    """Index of the first job in the busy period that ends with the last job."""
    for at, need, deadline in zip(times.tolist(), work.tolist(), deadlines.tolist(), strict=True):
        if at >= free:
            busy_from, start = kept, at
        else:
            start = free
        starts[kept], arrived[kept], needs[kept] = start, at, need
        kept += 1
        free = start + need
        if free <= deadline + 1e-9:
            continue
        # If a job is dropped, the jobs after it begin earlier, but not before they arrive.
        slack = starts[busy_from:kept] - arrived[busy_from:kept]
        slack = np.append(slack[1:], np.inf)
        gains = np.minimum(needs[busy_from:kept], np.minimum.accumulate(slack[::-1])[::-1])
        gone = busy_from + int(gains.argmax())
        shifts = np.minimum(needs[gone], np.minimum.accumulate(starts[gone + 1 : kept] - arrived[gone + 1 : kept]))
        starts[gone : kept - 1] = starts[gone + 1 : kept] - shifts
        arrived[gone : kept - 1] = arrived[gone + 1 : kept]
        needs[gone : kept - 1] = needs[gone + 1 : kept]
        kept -= 1
        free = starts[kept - 1] + needs[kept - 1] if kept > busy_from else at
        free = float(free)
    return kept


def bound_capacity(
    recording: Recording,
    load: ReplayLoad,
    fleet: LabFleet,
    objectives: Objectives,
    longest_wait_s: float = math.inf,
    share: float = SHARE,
    seed: int = 0,
) -> float:
    """The largest speed at which, by the bound, this share of requests can be in time, and no request needs to wait
    longer than `longest_wait_s` for its first token. 0 if there is no such speed."""
    number, machine = engines_of(fleet)
    if load.clients:
        raise PointsmanError("the capacity is a speed-up of time; leave --clients out")
    each = list(arrivals(recording, msgspec.structs.replace(load, speed=1.0), seed))
    requests = [one.request for one in each]
    work = work_of(requests, machine)
    demand = demand_of(work, requests, objectives)
    times = np.array([one.at for one in each])

    def enough(speed: float) -> bool:
        found = _bound(demand, times / speed, work, number, speed).attainment_within(longest_wait_s)
        return found is not None and found >= share

    low, high = 0.01, 1.0
    if not enough(low):
        return 0.0
    while enough(high) and high < 1e4:
        low, high = high, high * 2
    while high - low > TOLERANCE * low:
        middle = (low + high) / 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low
