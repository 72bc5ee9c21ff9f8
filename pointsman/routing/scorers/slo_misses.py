"""The scorer that prefers the endpoint where a request causes the fewest missed latency objectives."""

from collections.abc import Sequence
from functools import partial
from math import exp, inf

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.engine_model import BIN, BINS
from pointsman.routing.engine_work import EngineWork
from pointsman.routing.plugins import OUTLOOK, Endpoints, LatencyOutlook, RequestCycle
from pointsman.selection import Column
from pointsman.selection.arrays import np
from pointsman.selection.columns import array, column_of

MAX_WEIGHED = 16
"""Maximum number of endpoints whose answers are examined one by one. Most decisions need only three."""
LAST_BIN = BINS - 1
IN_TIME = 0.97
"""If the first token is expected at this share of its objective, a miss is as likely as not."""
DOUBT = 0.06
"""The width of that uncertainty, as a share of the objective."""
CERTAIN = 12.0
"""Number of widths from that point beyond which a miss counts as certain, or as impossible."""
SLACK = 0.8
"""The part of the slack per token that prompts may take; the rest is for unforeseen delays."""
LATE_COUNTS = 0.2
"""The weight of a request whose first token is late: it has missed an objective, but should end soon."""
ROOM = 1.5
"""An endpoint has room for others if it can read its prompts in less than this many objectives for first tokens."""
FEW_TOKENS = 16_384.0
"""Context tokens per endpoint that do not justify the choice of an endpoint with fewer cached tokens."""
SHOWN = 4
"""Maximum number of endpoints that the reason for a decision lists."""


class Weighed(msgspec.Struct, frozen=True, gc=False):
    """An endpoint at the time of a decision; milliseconds."""

    endpoint: Endpoint
    behind: float
    reading: float
    answers: int
    """Number of answers that the endpoint writes, or will write before this answer."""
    misses: float
    """Expected number of misses among these answers because of this request."""
    cost: float


class SloMissScorer:
    """Prefers the endpoint where the request causes the fewest expected misses of latency objectives.

    The cost of an endpoint is the probability that the request's own first token is late, plus `harm_weight` times the
    expected misses of the answers that its prompt delays there, plus prices, in objectives for first tokens:
    `work_weight` times the time to read the prompt; the time until its first token, times `wait_weight` and, while
    endpoints have little to do, up to `calm_weight` more; `room_weight` times the time for which the endpoint can take
    no others in time; and `context_weight` times the context tokens there relative to the mean. Only requests that were
    sent and their outcomes are used, no measurements.
    """

    bounded = True

    def __init__(
        self,
        harm_weight: float = 1.0,
        work_weight: float = 1.5,
        wait_weight: float = 0.02,
        calm_weight: float = 2.0,
        room_weight: float = 0.75,
        context_weight: float = 0.1,
    ) -> None:
        given = {"harmWeight": harm_weight, "workWeight": work_weight, "waitWeight": wait_weight}
        given |= {"calmWeight": calm_weight, "roomWeight": room_weight, "contextWeight": context_weight}
        for parameter, value in given.items():
            if not value >= 0:
                raise ValueError(f"{parameter} is {value:g}; it must be 0 or more")
        self._harm, self._work, self._wait, self._context = harm_weight, work_weight, wait_weight, context_weight
        self._calm, self._room = calm_weight, room_weight

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        outlook: LatencyOutlook | None = cycle.state.get(OUTLOOK)
        if outlook is None or not len(candidates):
            return column_of([0.0] * len(candidates), candidates.arrays)
        behind, reading, context, rows = outlook.behind, outlook.reading, outlook.context, candidates.rows
        if rows is not None:
            behind, reading, context = candidates.cut(behind), candidates.cut(reading), candidates.cut(context)
        costs = self._costs(outlook, behind, reading, context)
        if isinstance(costs, list):
            order: Sequence[int] = sorted(range(len(costs)), key=costs.__getitem__)[:MAX_WEIGHED]
        else:
            most = min(MAX_WEIGHED, len(costs) - 1)
            nearest = np.argpartition(costs, most)[: most + 1]
            order = nearest[np.argsort(costs[nearest])].tolist()
        return self._with_harm(cycle, candidates, outlook, costs, order, behind, reading, context)

    def _costs(self, outlook: LatencyOutlook, behind: Column, reading: Column, context: Column) -> Column:
        """The cost of each endpoint, without the harm to other requests."""
        unit, own_scale = outlook.usual_ttft_slo_ms, 1.0 / (DOUBT * outlook.ttft_slo_ms)
        # If all endpoints are busy, some requests are late whatever is done. If those wait longer, others are in time.
        wait = (self._wait + self._calm * (1.0 - outlook.busy) ** 3) / unit
        work, horizon = wait + self._work / unit, ROOM * unit
        start = IN_TIME / DOUBT - outlook.waited * own_scale
        room = self._room / (2.0 * horizon * unit)
        if isinstance(behind, list):
            crowd = self._context / (sum(context) / len(context) + FEW_TOKENS)
            costs = []
            for before, own, tokens in zip(behind, reading, context, strict=True):
                after = before + own
                cost = work * own + wait * before + crowd * tokens
                late = start - after * own_scale
                if late < CERTAIN:
                    cost += 1.0 if late < -CERTAIN else 1.0 / (1.0 + exp(late))
                if before < horizon:
                    left = horizon - before
                    cost += room * (left * left if after >= horizon else own * (left + horizon - after))
                costs.append(cost)
            return costs
        crowd = self._context / (float(np.add.reduce(context)) / len(context) + FEW_TOKENS)
        befores, reads = array(behind), array(reading)
        afters = befores + reads
        doubts = np.minimum(np.maximum(start - afters * own_scale, -CERTAIN), CERTAIN)
        # The room before the prompt less the room after it.
        taken = np.maximum(horizon - befores, 0.0) ** 2 - np.maximum(horizon - afters, 0.0) ** 2
        known: Column = work * reads + wait * befores + crowd * array(context) + room * taken
        return known + 1.0 / (1.0 + np.exp(doubts))

    def _with_harm(
        self,
        cycle: RequestCycle,
        candidates: Endpoints,
        outlook: LatencyOutlook,
        costs: Column,
        order: Sequence[int],
        behind: Column,
        reading: Column,
        context: Column,
    ) -> Column:
        """The scores. Harm is never negative: once the next endpoint costs more without harm, no later one can win."""
        now, works, rows = cycle.now * 1000.0, outlook.works, candidates.rows
        weighed: list[tuple[int, float, EngineWork]] = []
        best, chosen = inf, order[0]
        for at in order:
            if costs[at] >= best:
                break
            work = works[at if rows is None else rows[at]]
            misses = 0.0
            if work.reading or work.writing:
                misses = expected_misses(outlook, work, float(reading[at]), float(behind[at]), now)
                costs[at] += self._harm * misses
            weighed.append((at, misses, work))
            if costs[at] < best:
                best, chosen = costs[at], at
        if cycle.trace is not None:
            shown = [
                Weighed(
                    candidates[at],
                    float(behind[at]),
                    float(reading[at]),
                    len(work.writing) + len(work.reading),
                    misses,
                    float(costs[at]),
                )
                for at, misses, work in weighed
            ]
            cycle.trace.remarks += (partial(_remark, shown, outlook.ttft_slo_ms),)
        # An endpoint whose harm was not computed may have the score of the best one only if it is idle.
        if isinstance(costs, list):
            scores: Column = [
                1.0 if cost == best and not tokens else 1.0 / (1.0 + (cost - best if cost > best else 0.0) + 1e-6)
                for cost, tokens in zip(costs, context)  # noqa: B905 (of one length)
            ]
        else:
            scores = 1.0 / (1.0 + np.maximum(costs - best, 0.0) + 1e-6)
            scores[(costs == best) & (context == 0.0)] = 1.0
        scores[chosen] = 1.0
        return scores


def expected_misses(outlook: LatencyOutlook, work: EngineWork, own: float, behind: float, now: float) -> float:
    """How many answers of an endpoint miss their objectives because of a prompt that takes `own` ms to read.

    An answer misses its objective if the prompts that are read while it is written take longer, in total, than its
    slack. Slack is a time per token, so long answers can bear more. `longer` gives the probability that an answer is
    long enough.
    """
    longer = outlook.model.lengths.longer
    step, objective = work.step_ms(), outlook.tpot_slo_ms
    slack = max(SLACK * (objective - step), 1.0) * BIN
    pace = step * BIN
    read = work.read_at(now)
    all_read = read + behind
    misses = 0.0
    free, all_and_own = now - read, all_read + own
    for one in work.writing.values():
        if one.tpot_slo != objective:
            objective = one.tpot_slo
            slack = max(SLACK * (objective - step), 1.0) * BIN
        before = one.read
        needs = (all_and_own - before) / slack
        has = (free - one.began + before) / pace
        if needs > has:
            needed = (all_read - before) / slack
            if needed < has:
                needed = has
            if LAST_BIN > needed >= 0.0 <= has:
                more = longer[int(needed)] - (longer[int(needs)] if needs < LAST_BIN else 0.0)
                more /= longer[int(has)]
                misses += LATE_COUNTS * more if one.late else more
    after, due = work.left_ms, now + behind - work.left_ms
    for prompt in work.reading.values():
        after -= prompt.ms
        due += prompt.ms
        if prompt.tpot_slo != objective:
            objective = prompt.tpot_slo
            slack = max(SLACK * (objective - step), 1.0) * BIN
        needed, needs = max(after, 0.0) / slack, (after + own) / slack
        if needed < LAST_BIN:
            more = longer[int(needed)] - (longer[int(needs)] if needs < LAST_BIN else 0.0)
            more /= longer[0]
            misses += LATE_COUNTS * more if due > prompt.due else more
    return misses


def _remark(weighed: Sequence[Weighed], objective: float) -> Reason:
    """The costs that the decision compared, best first."""
    instances = [
        {
            "instance": str(one.endpoint),
            "first_token_ms": one.behind + one.reading,
            "behind_ms": one.behind,
            "reading_ms": one.reading,
            "answers": one.answers,
            "misses": one.misses,
            "cost": one.cost,
        }
        for one in sorted(weighed, key=lambda one: one.cost)[:SHOWN]
    ]
    return Reason("expected-misses", {"ttft_slo_ms": objective, "instances": instances})
