"""The dispatchers that manifests make: which requests wait, and which are refused."""

import pytest

from pointsman.config import ConfigWarning, load_manifest
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import Metrics
from pointsman.routing.events import Arrived, Ended, Joined, Measured, Outcome, Refuse, Send
from pointsman.routing.events import DispatcherCommand as Told
from pointsman.routing.routes import DispatcherSettings
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.config.test_manifest import SIMULATED, deployment

# Requests wait


class Desk:
    """The dispatcher of a deployment with instances of one slot each."""

    def __init__(self, scheduling: str, *instances: str) -> None:
        self.dispatcher = Dispatcher(
            deployment(SIMULATED + scheduling).dispatch_plan(), DispatcherSettings(keep_records=3)
        )
        for name in instances:
            one = ExecutionInstance(instance_id=name, model_name="m", max_concurrency=1)
            self.dispatcher.handle(Joined(one), 0.0)
            self.dispatcher.handle(Measured(name, Metrics()), 0.0)

    def arrive(self, *names: str, priority: int = 0) -> list[Told]:
        requests = (RequestMetadata(name, "hello", model_name="m", priority=priority) for name in names)
        return self.dispatcher.handle(Arrived(tuple(requests)), 0.0)


def went(commands: list[Told]) -> list[str]:
    return [command.request.request_id for command in commands if isinstance(command, Send)]


@pytest.mark.parametrize(
    "scheduling",
    [
        "",
        "  scheduling: {config: {plugins: [{type: queue-scorer}]}}\n",
        "  scheduling: {config: {featureGates: [flowControl]}}\n",
        "  scheduling: {policy: fifo}\n",
    ],
    ids=["default", "picker", "flow control", "policy"],
)
def test_requests_that_cannot_be_sent_wait_under_any_scheduling(scheduling: str) -> None:
    desk = Desk(scheduling, "i", "j")
    assert went(desk.arrive("a", "b", "c")) == ["a", "b"]
    desk.arrive("low", priority=-1)
    assert {one.request_id for one in desk.dispatcher.waiting()} == {"c", "low"}
    assert went(desk.dispatcher.handle(Ended("a"), 0.1)) == ["c"]
    assert len(desk.dispatcher.records) == 3, "as many records as were asked for"


def test_requests_wait_for_a_first_instance() -> None:
    desk = Desk("")
    assert not any(isinstance(command, Refuse | Send) for command in desk.arrive("a"))
    joined = Joined(ExecutionInstance(instance_id="i", model_name="m"))
    assert went(desk.dispatcher.handle(joined, 30.0)) == ["a"]


def test_the_queue_is_bounded() -> None:
    desk = Desk("", "i")
    refused = [one for one in desk.arrive(*map(str, range(5_010))) if isinstance(one, Refuse)]
    assert [one.refusal.outcome for one in refused] == [Outcome.REJECTED_CAPACITY] * 10


# Without flow control, negative priorities are shed


CONCURRENCY = """\
  scheduling:
    config:
      plugins:
      - {type: concurrency-detector, parameters: {maxConcurrency: 2}}
      saturationDetector: {pluginRef: concurrency-detector}
"""


def refused(commands: list[Told]) -> list[str]:
    return [command.request.request_id for command in commands if isinstance(command, Refuse)]


@pytest.mark.parametrize("scheduling", ["", "  scheduling: {config: {plugins: [{type: queue-scorer}]}}\n"])
def test_negative_priority_is_refused_while_engines_report_full_queues(scheduling: str) -> None:
    desk = Desk(scheduling, "i")
    desk.dispatcher.handle(Measured("i", Metrics(waiting_queue_size=4.0)), 0.0)
    assert refused(desk.arrive("fits", priority=-1)) == []
    desk.dispatcher.handle(Measured("i", Metrics(waiting_queue_size=5.0)), 0.0)
    [told] = [one for one in desk.arrive("shed", priority=-1) if isinstance(one, Refuse)]
    assert (told.refusal.outcome, told.refusal.reason.code) == (Outcome.REJECTED_ADMISSION, "shed-by-priority")
    assert refused(desk.arrive("normal")) == []


def test_the_detector_of_the_document_says_what_is_full() -> None:
    desk = Desk(CONCURRENCY, "i", "j")
    assert went(desk.arrive("a", "b")) == ["a", "b"]
    assert refused(desk.arrive("fits", priority=-1)) == []
    desk = Desk(CONCURRENCY.replace("maxConcurrency: 2", "maxConcurrency: 1"), "i", "j")
    desk.arrive("a", "b")
    assert refused(desk.arrive("shed", priority=-1)) == ["shed"]


def test_what_was_never_measured_sheds_nothing() -> None:
    desk = Desk("")
    assert refused(desk.arrive("before there is an instance", priority=-1)) == []
    one = ExecutionInstance(instance_id="silent", model_name="m", max_concurrency=1)
    assert went(desk.dispatcher.handle(Joined(one), 0.0)) == ["before there is an instance"]
    assert refused(desk.arrive("while it says nothing of its load", priority=-1)) == []


def test_metrics_of_the_usual_age_are_not_saturation() -> None:
    desk = Desk("  scheduling: {config: {plugins: [{type: utilization-detector}]}}\n", "i")
    batch = (RequestMetadata("batch", "hello", model_name="m", priority=-1),)
    assert went(desk.dispatcher.handle(Arrived(batch), 1.0)) == ["batch"]
    late = (RequestMetadata("late", "hello", model_name="m", priority=-1),)
    assert refused(desk.dispatcher.handle(Arrived(late), 4.0)) == ["late"], "stale numbers count as full"


def test_a_detector_with_a_short_staleness_threshold_gives_a_warning() -> None:
    def warnings(parameters: str) -> tuple[ConfigWarning, ...]:
        detector = f"{{type: utilization-detector, parameters: {parameters}}}"
        how = f"{{config: {{featureGates: [flowControl], plugins: [{detector}]}}}}"
        return load_manifest(f"deployments:\n- name: a\n  model: m\n{SIMULATED}  scheduling: {how}\n").warnings

    [warning] = warnings("{metricsStalenessThreshold: 200ms}")
    assert warning.message.startswith("is 3s here")
    assert warnings("{}") == warnings("{metricsStalenessThreshold: 3s}") == ()
