"""The scorer with the producer that it reads, driven through a dispatcher on virtual time."""

from random import Random

import pytest

from pointsman.reasons import Reason
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.events import Arrived, Cancelled, Ended, Failed, FirstToken, Joined, Left, Send, Shared
from pointsman.routing.producers import ApproxPrefixCacheProducer, InflightLoadProducer, PredictedLatencyProducer
from pointsman.routing.queue import FlowControl
from pointsman.routing.routes import ConfiguredRoute, DispatchPlan
from pointsman.routing.scorers import SloMissScorer
from pointsman.selection import MaxScorePicker, Profile, Scheduler
from pointsman.types import ExecutionInstance, RequestMetadata


class Plane:
    """A dispatcher with the default policy, and engines that read prompts one after the other."""

    def __init__(self, instances: int, per_token_ms: list[float] | None = None) -> None:
        producers = (ApproxPrefixCacheProducer(), InflightLoadProducer(), PredictedLatencyProducer())
        self.predictor = producers[2]
        scorer = SloMissScorer()
        scheduler = Scheduler([Profile("default", scorer, MaxScorePicker())], producers=producers)
        plan = DispatchPlan(ConfiguredRoute(scheduler), lambda: FlowControl([]), plugins=(*producers, scorer))
        self.dispatcher = Dispatcher(plan)
        self.per_token = per_token_ms or [0.1] * instances
        for number in range(instances):
            self.dispatcher.handle(Joined(ExecutionInstance(instance_id=str(number))), 0.0)
        self.free = [0.0] * instances
        self.due: list[tuple[float, str, bool]] = []
        self.number = 0

    def send(
        self, now: float, prompt: bytes | None = None, tokens: int = 4000, *, streams: bool = True, **more: object
    ) -> int:
        """The number of the instance that a request goes to."""
        self.number += 1
        body = prompt if prompt is not None else self.number.to_bytes(8, "little") * (tokens // 2)
        request = RequestMetadata(f"r{self.number}", body, arrival_time=now, streams=streams, **more)  # type: ignore[arg-type]
        [command] = self.dispatcher.handle(Arrived((request,)), now)
        assert isinstance(command, Send)
        return int(str(command.endpoint))

    def serve(self, now: float, tokens: int = 4000, answer: int = 20, *, streams: bool = True) -> int:
        """Send a request, and schedule what its engine does."""
        at = self.send(now, tokens=tokens, streams=streams)
        self.free[at] = max(self.free[at], now) + self.per_token[at] * tokens / 1000
        if streams:
            self.due.append((self.free[at], f"r{self.number}", True))
        self.due.append((self.free[at] + 0.02 * answer, f"r{self.number}", False))
        return at

    def run_until(self, now: float) -> None:
        self.due.sort()
        while self.due and self.due[0][0] <= now:
            at, request_id, first = self.due.pop(0)
            self.dispatcher.handle(FirstToken(request_id) if first else Ended(request_id, 20), at)


def test_a_request_goes_where_its_prefix_is_while_that_pays() -> None:
    plane, prompt = Plane(4), b"0123456789abcdef" * 1000
    first = plane.send(0.0, prompt)
    plane.dispatcher.handle(FirstToken("r1"), 1.0)
    plane.dispatcher.handle(Ended("r1", 100), 2.0)
    assert plane.send(3.0, prompt + b"more" * 50) == first
    for number in range(8):  # its engine is far behind now
        plane.dispatcher.handle(Shared({str(first): (1.0, 20_000.0 * number)}), 3.0)
    assert plane.send(3.1, prompt + b"other" * 50) != first


def test_long_prompts_avoid_the_instance_that_writes_new_answers() -> None:
    plane = Plane(2)
    writing = plane.send(0.0, tokens=200)
    plane.dispatcher.handle(FirstToken("r1"), 0.1)
    assert plane.send(0.2, tokens=20_000) != writing


def test_the_first_hundred_requests_are_spread() -> None:
    plane, counts = Plane(8), [0] * 8
    for number in range(100):
        now = number * 0.1
        plane.run_until(now)
        counts[plane.serve(now)] += 1
    assert max(counts) <= 2 * min(counts) + 4


@pytest.mark.parametrize("streams", [True, False])
def test_slow_instances_get_less(streams: bool) -> None:
    plane, counts = Plane(4, [0.06, 0.06, 0.18, 0.18]), [0.0] * 4
    rng = Random(1)
    for number in range(400):
        now = number * 0.15
        plane.run_until(now)
        tokens = rng.randrange(1000, 9000)
        at = plane.serve(now, tokens, streams=streams)
        if number >= 100:
            counts[at] += tokens
    share = (counts[2] + counts[3]) / sum(counts)
    assert share < (0.38 if streams else 0.47)


def test_predictions_come_true_and_their_error_is_counted() -> None:
    plane = Plane(4, [0.12] * 4)
    for number in range(300):
        plane.run_until(number * 0.2)
        plane.serve(number * 0.2)
    plane.predictor.errors.sums["ttft"][:] = [0.0] * 4
    for number in range(300, 400):
        plane.run_until(number * 0.2)
        plane.serve(number * 0.2)
    plane.run_until(1000.0)
    error = plane.predictor.errors.share("ttft")
    assert error is not None
    assert error < 0.1
    record = plane.dispatcher.records.get("r400")
    assert record is not None
    assert record.predicted is not None
    assert "predicted" in str(record)
    assert record.as_dict()["predicted"]["ttft_ms"] == record.predicted[0]


def test_what_leaves_without_an_answer_leaves_no_work() -> None:
    plane = Plane(3)
    targets = [plane.send(0.0) for _ in range(6)]
    plane.dispatcher.handle(FirstToken("r1"), 0.1)
    plane.dispatcher.handle(Cancelled("r1"), 0.2)
    plane.dispatcher.handle(Cancelled("r2"), 0.2)
    plane.dispatcher.handle(Failed("r3", Reason("reset")), 0.2)  # it is sent again
    plane.dispatcher.handle(Left(str(targets[3])), 0.3)
    for number in range(1, 7):
        plane.dispatcher.handle(Ended(f"r{number}", 3), 1.0)
    left = [(work.reading, work.writing, work.left_ms, work.context) for work in plane.predictor.works.values()]
    assert left == [({}, {}, 0.0, 0.0)] * 2


def test_the_reason_says_what_was_weighed() -> None:
    plane = Plane(2)
    plane.send(0.0, tokens=2000)
    plane.send(0.1, tokens=2000)
    plane.send(0.2, tokens=9000)
    record = plane.dispatcher.records.get("r3")
    assert record is not None
    assert record.trace is not None
    [note] = record.trace.notes
    assert note.code == "expected-misses"
    assert note.facts["instances"][0]["instance"] == record.instance
    assert "first token in about" in str(note)


def test_objectives_of_a_request_count() -> None:
    tight, loose = Plane(1), Plane(1)
    tight.send(0.0, headers={"x-slo-ttft-ms": "200", "x-llm-d-slo-tpot-ms": "50"})
    loose.send(0.0)
    facts = [plane.dispatcher.records.get("r1").trace.notes[0].facts for plane in (tight, loose)]  # type: ignore[union-attr]
    assert [fact["ttft_slo_ms"] for fact in facts] == [200.0, 5000.0]


@pytest.mark.parametrize("parameter", ["harm_weight", "work_weight", "wait_weight", "context_weight"])
def test_weights_are_not_negative(parameter: str) -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        SloMissScorer(**{parameter: -1.0})


@pytest.mark.parametrize("instances", [8, 80])
def test_idle_instances_are_chosen_at_random(instances: int) -> None:
    plane, chosen = Plane(instances), set()
    for number in range(40):
        chosen.add(plane.send(float(number), tokens=500))
        plane.dispatcher.handle(Ended(f"r{number + 1}", 3), number + 0.5)
    assert len(chosen) > 5


def test_lists_and_arrays_choose_alike() -> None:
    """On a fleet of 80, most of it busy, as on one of 8."""
    for instances in (8, 80):
        plane, idle = Plane(instances), 3
        for number in range(instances):
            if number != idle:
                plane.dispatcher.handle(Shared({str(number): (5.0, 40_000.0)}), 0.0)
        assert plane.send(0.1) == idle
