"""Thousands of workers on virtual time: what is wanted comes up, moves when racks are lost, and never overflows."""

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from pointsman.control import Desired, DesiredDeployment, DesiredEndpoint, DesiredEngine, Lifecycle, Phase
from pointsman.control.events import ControllerEvent, Exited, Launch, Launched, LaunchFailed, PlaneStopping
from pointsman.errors import PointsmanError, UnknownName
from pointsman.placement import Ask, EngineAbility, Need, Place
from pointsman.runtimes.simulation.fleet import SimulatedFleet
from pointsman.runtimes.simulation.processes import Failure
from pointsman.types import Gpu, Worker

GIB = 1 << 30
GPU = 80 * GIB
RACK = 16


def worker(number: int, gpus: int = 8) -> Worker:
    devices = tuple(Gpu(index=index, memory_bytes=GPU) for index in range(gpus))
    rack = {"rack": f"r{number // RACK}"}
    return Worker(name=f"w{number}", cpus=128, memory_bytes=1024 * GIB, gpus=devices, labels=rack)


def deployment(name: str, replicas: int, size: int = 60, **limits: Any) -> DesiredDeployment:
    """Instances that need so much of one GPU each."""
    ask = Ask(instance_id="", deployment=name, need=Need.fixed(size * GIB), engine=EngineAbility())
    lifecycle = Lifecycle(**({"probe_interval_s": 10.0} | limits))
    return DesiredDeployment(
        name=name, model=name, replicas=replicas, engine=DesiredEngine("any"), ask=ask, lifecycle=lifecycle
    )


def wish(*deployments: DesiredDeployment) -> Desired:
    return Desired({one.name: one for one in deployments})


class Book:
    """Writes down what happens, and that the processes on a GPU never need more than it has."""

    def __init__(self) -> None:
        self.log: list[tuple[float, ControllerEvent]] = []
        self.used: Counter[tuple[str, int | None]] = Counter()
        self._places: dict[str, Place] = {}

    def launch(self, launch: Launch) -> None:
        assert launch.place is not None
        self._places[launch.instance_id] = launch.place
        for claim in launch.place.claims:
            self.used[claim.worker, claim.gpu] += claim.gpu_bytes
            assert self.used[claim.worker, claim.gpu] <= GPU

    def note(self, now: float, event: ControllerEvent) -> None:
        self.log.append((now, event))
        if isinstance(event, Exited | LaunchFailed):
            for claim in self._places.pop(event.instance_id).claims:
                self.used[claim.worker, claim.gpu] -= claim.gpu_bytes


def workers_in_use(fleet: SimulatedFleet) -> set[str]:
    return {name for one in fleet.instances() if one.place is not None for name in one.place.workers}


def test_thousands_of_workers() -> None:
    """A thousand instances come up, a rack is lost and they go elsewhere; of too many, the right ones go."""
    book = Book()
    fleet = SimulatedFleet(map(worker, range(2_000)), start_up_s=5.0, stop_s=3.0, fails=book.launch, watch=book.note)
    small = deployment("small", 200, size=20)
    fleet.apply(wish(deployment("chat", 800), small))
    fleet.run_until(4.9)
    assert not fleet.in_service
    fleet.run_until(6.0)
    assert len(fleet.in_service) == 1_000
    assert len(workers_in_use(fleet)) == 100, "the small ones are beside the large ones"

    lost = [f"w{number}" for number in range(RACK)]
    hit = {one.id for one in fleet.instances() if one.place is not None and set(lost) & set(one.place.workers)}
    assert len(hit) > 8 * RACK
    for name in lost:
        fleet.lose(name, "no power in rack r0")
    assert fleet.in_service.keys() == {one.id for one in fleet.instances()} - hit
    reasons = {str(one.reason) for one in fleet.instances() if one.id in hit}
    assert reasons == {f'worker "{name}" is lost: no power in rack r0' for name in lost}
    fleet.run_until(13.0)
    assert len(fleet.in_service) == 1_000
    assert not set(lost) & workers_in_use(fleet)
    assert {one.host for one in fleet.in_service.values()} == workers_in_use(fleet)

    fleet.apply(wish(deployment("chat", 640), small))
    fleet.run_until(20.0)
    assert Counter(one.deployment for one in fleet.instances()) == {"chat": 640, "small": 200}
    assert len(workers_in_use(fleet)) == 80, "those go that leave whole workers behind"
    assert sum(book.used.values()) == (640 * 60 + 200 * 20) * GIB


def rough_day(workers: int = 40) -> list[tuple[float, ControllerEvent]]:
    """Start-ups of all lengths, a GPU that breaks what is put on it, crashes, and workers that come and go."""
    book = Book()

    def fails(launch: Launch) -> Failure | None:
        book.launch(launch)
        if launch.place is not None and ("w1", 3) in launch.place.gpus:
            return Failure("CUDA error: uncorrectable ECC error", after_s=0.5)
        number = int(launch.instance_id.rpartition("-")[2])
        return Failure("no such image") if number % 17 == 0 and book.log[-1][0] < 5.0 else None

    fleet = SimulatedFleet(
        map(worker, range(workers)),
        start_up_s=lambda name: 1.0 + len(name) + int(name[-1]) / 7,
        stop_s=1.5,
        fails=fails,
        watch=book.note,
    )
    chat, small = deployment("chat", 60, start_timeout_s=30.0), deployment("small", 30, size=20)
    fleet.apply(wish(chat, small))
    fleet.run_until(12.0)
    for name in ("chat-3", "small-7", "chat-20"):
        fleet.crash(name)
    fleet.lose("w0", "no heartbeat")
    fleet.lose("w2", "no heartbeat")
    fleet.run_until(20.0)
    fleet.see(worker(0))
    fleet.apply(wish(deployment("chat", 40), small, deployment("more", 20, size=40)))
    fleet.run_until(60.0)
    fleet.tell(PlaneStopping())
    fleet.run_until(80.0)
    assert not fleet.instances()
    assert not +book.used
    return book.log


def test_the_same_run_gives_the_same_events() -> None:
    assert rough_day() == rough_day()


def test_the_same_events_in_every_process() -> None:
    """Nothing goes by the order of a set, which differs from process to process."""
    program = f"from {__name__} import rough_day; print([e for e in rough_day() if 'Applied' not in repr(e)])"
    told = [
        subprocess.check_output([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert told[0].count(b"chat-1") > 10
    assert told[0] == told[1]


def test_a_fleet_that_is_too_small_reports_unplaced_instances_and_serves_when_it_grows() -> None:
    fleet = SimulatedFleet([worker(0)])
    fleet.apply(wish(deployment("chat", 20)))
    fleet.run_until(10.0)
    assert len(fleet.in_service) == 8
    unplaced = [one for one in fleet.instances() if one.unplaced]
    assert len(unplaced) == 12
    assert all("no place: no room on one GPU: needs" in str(one.reason) for one in unplaced)
    for number in (1, 2):
        fleet.see(worker(number))
    fleet.run_until(12.0)
    assert len(fleet.in_service) == 20
    assert workers_in_use(fleet) == {"w0", "w1", "w2"}


# A single instance


def phases(fleet: SimulatedFleet) -> dict[str, Phase]:
    return {one.id: one.phase for one in fleet.instances()}


def test_time_jumps_from_event_to_event() -> None:
    """A year of probes takes as many events as there are probes."""
    seen: list[float] = []
    fleet = SimulatedFleet([worker(0)], start_up_s=2.0, watch=lambda now, _: seen.append(now))
    fleet.apply(wish(deployment("m", 1, probe_interval_s=86_400.0)))
    fleet.run_until(365 * 86_400.0)
    assert fleet.now == 365 * 86_400.0
    assert list(fleet.in_service) == ["m-1"]
    assert 2 * 364 <= len([now for now in seen if now > 10.0]) <= 2 * 366
    assert seen == sorted(seen)


def test_failed_launches_are_retried() -> None:
    tries: list[Launch] = []

    def fails(launch: Launch) -> Failure | None:
        tries.append(launch)
        return [Failure("no such image"), Failure("exit code 1: out of memory", after_s=0.2), None][len(tries) - 1]

    book = Book()
    fleet = SimulatedFleet([worker(0)], fails=fails, watch=lambda now, event: book.log.append((now, event)))
    fleet.apply(wish(deployment("m", 1, backoff_s=1.0)))
    fleet.run_until(0.5)
    assert [str(one.reason) for one in fleet.instances()] == ["could not be started: no such image"]
    fleet.run_until(2.0)
    assert [str(one.reason) for one in fleet.instances()] == ["exit code 1: out of memory"]
    fleet.run_until(10.0)
    assert list(fleet.in_service) == ["m-1"]
    ends = [event for _, event in book.log if isinstance(event, Launched | LaunchFailed | Exited)]
    assert [type(event) for event in ends] == [LaunchFailed, Launched, Exited, Launched]


@pytest.mark.parametrize(("stop_s", "gone_at"), [(3.0, 3.0), (30.0, 10.0)])
def test_a_process_that_does_not_stop_in_time_is_killed(stop_s: float, gone_at: float) -> None:
    fleet = SimulatedFleet([worker(0)], stop_s=stop_s)
    fleet.apply(wish(deployment("m", 1, stop_grace_s=10.0)))
    fleet.run_until(100.0)
    fleet.apply(wish())
    fleet.run_until(100.0 + gone_at - 0.1)
    assert not fleet.in_service, "it is drained at once, because there are no requests"
    assert phases(fleet) == {"m-1": Phase.STOPPING}
    fleet.run_until(100.0 + gone_at)
    assert not fleet.instances()


def test_a_start_up_that_takes_too_long() -> None:
    fleet = SimulatedFleet([worker(0)], start_up_s=100.0)
    fleet.apply(wish(deployment("m", 1, start_timeout_s=50.0)))
    fleet.run_until(50.2)
    [status] = fleet.instances()
    assert str(status.reason) == "not ready 50 s after its launch: it does not listen yet"
    assert status.phase is Phase.BACKING_OFF


def test_an_instance_that_is_no_longer_wanted_at_the_same_moment() -> None:
    """What is no longer wanted before its process is there is ended as soon as it is."""
    book = Book()
    fleet = SimulatedFleet([worker(0)], fails=book.launch, watch=book.note)
    fleet.apply(wish(deployment("m", 1)))
    fleet.apply(wish())
    fleet.run_until(0.0)
    assert not fleet.instances()
    assert [type(event) for _, event in book.log][-2:] == [Launched, Exited]


def test_a_worker_that_is_lost_before_anything_runs_there() -> None:
    book = Book()
    fleet = SimulatedFleet([worker(0), worker(1)], watch=lambda now, event: book.log.append((now, event)))
    fleet.apply(wish(deployment("m", 1)))
    [first] = workers_in_use(fleet)
    fleet.lose(first, "no heartbeat")
    assert not any(isinstance(event, Launched) for _, event in book.log)
    fleet.run_until(10.0)
    assert list(fleet.in_service) == ["m-1"]
    assert first not in workers_in_use(fleet)


def test_a_worker_that_is_lost_while_one_that_has_lost_its_gpu_stops_there() -> None:
    """Its claim is gone before its process is, and still the process ends with the worker."""
    fleet = SimulatedFleet([worker(0, gpus=1)], stop_s=5.0)
    fleet.apply(wish(deployment("m", 1)))
    fleet.run_until(10.0)
    fleet.see(worker(0, gpus=0))
    assert phases(fleet) == {"m-1": Phase.STOPPING}
    fleet.lose("w0", "no heartbeat")
    assert phases(fleet) == {"m-1": Phase.BACKING_OFF}
    fleet.see(worker(1))
    fleet.run_until(20.0)
    assert list(fleet.in_service) == ["m-1"]


def test_external_servers_answer() -> None:
    fleet = SimulatedFleet()
    server = DesiredEndpoint(name="gpu", url="http://gpu:8000")
    fleet.apply(wish(DesiredDeployment(name="m", model="m", replicas=0, endpoints=(server,))))
    fleet.run_until(1.0)
    assert fleet.in_service["gpu"].host == "gpu"


def test_invalid_calls_are_errors() -> None:
    fleet = SimulatedFleet([worker(10)])
    fleet.run_until(5.0)
    for time in (4.0, float("inf"), float("nan")):
        with pytest.raises(PointsmanError, match="it is 5 s now"):
            fleet.run_until(time)
    with pytest.raises(UnknownName, match='worker "w1"; did you mean "w10"'):
        fleet.lose("w1", "no heartbeat")
    with pytest.raises(UnknownName, match='unknown process of instance "m-1"'):
        fleet.crash("m-1")
