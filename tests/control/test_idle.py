"""Probes of many idle instances: their rate is bounded, and a request brings an instance back to the usual interval."""

from collections import Counter

import pytest

from pointsman.control.desired import DesiredEndpoint
from pointsman.control.events import Answered, ControllerCommand, ControllerTimer, GotRequest, Probe, Silent, WentIdle
from pointsman.control.instances import IDLE_PROBES_PER_S, spread
from tests.control.worlds import QUICK, World, server, servers

MANY = 500
GAP_S = MANY / IDLE_PROBES_PER_S


class IdleWorld(World):
    """Servers that answer every probe at once and have no requests, unless they are in `busy`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.busy: set[str] = set()
        self.idle: set[str] = set()
        """Those that the controller was told of."""
        self.hung: set[str] = set()
        self.probed: list[tuple[float, str]] = []
        """(time, instance) of each probe of health."""
        endpoints: list[DesiredEndpoint] = [server(f"gpu-{number}", port=number + 1) for number in range(count)]
        self.apply(servers(*endpoints))

    def _probe(self, command: Probe) -> None:
        name = command.instance_id
        self.of_others.add(name)
        self.probes[name] = command
        if not command.readiness:
            self.probed.append((self.now, name))
            if name not in self.busy | self.idle:
                self.idle.add(name)
                self.pending.append(WentIdle(name))
        self.pending.append(Silent(name, "hung") if name in self.hung else Answered(name, command.readiness))

    def times(self, name: str) -> list[float]:
        return [at for at, probed in self.probed if probed == name]


@pytest.fixture(scope="module")
def rested() -> IdleWorld:
    """After a minute without requests."""
    world = IdleWorld(MANY)
    world.behave(60.0)
    assert len(world.ready()) == MANY
    return world


def test_the_rate_of_probes_is_bounded_and_they_are_spread(rested: IdleWorld) -> None:
    last = [at for at, _ in rested.probed if at > 60.0 - 2 * GAP_S]
    assert len(last) / (2 * GAP_S) <= IDLE_PROBES_PER_S * 1.01
    per_tenth = Counter(int(at * 10) for at in last)
    assert max(per_tenth.values()) < 10 * IDLE_PROBES_PER_S / 10
    assert {name for at, name in rested.probed if at >= 60.0 - GAP_S - 0.01} == set(rested.ready()), "each has its turn"


def test_few_instances_are_probed_as_often_as_busy_ones() -> None:
    world = IdleWorld(20)
    world.behave(20.0)
    gaps = [later - earlier for earlier, later in zip(world.times("gpu-3"), world.times("gpu-3")[1:], strict=False)]
    assert set(gaps) == {QUICK.probe_interval_s}


def test_a_request_brings_the_usual_interval_back() -> None:
    world = IdleWorld(MANY)
    world.behave(40.0)
    name = max(world.ready(), key=lambda one: world.times(one)[-1])
    before = world.times(name)[-1]
    world.behave(QUICK.probe_interval_s)  # by now a busy instance would be due
    assert world.times(name)[-1] == before
    world.busy.add(name)
    world.idle.remove(name)
    world.tell(GotRequest(name))
    world.behave(10.0)
    gaps = [later - earlier for earlier, later in zip(world.times(name), world.times(name)[1:], strict=False)]
    assert world.times(name)[-1] > before
    assert gaps[-4:] == [QUICK.probe_interval_s] * 4
    world.busy.remove(name)
    world.behave(60.0)
    assert world.times(name)[-1] - world.times(name)[-2] == pytest.approx(GAP_S), "and it rests again"


def test_an_idle_instance_that_fails_a_probe_is_probed_again_soon() -> None:
    world = IdleWorld(MANY)
    world.behave(40.0)
    name = min(world.ready(), key=lambda one: world.times(one)[-1])
    world.hung.add(name)
    world.behave(GAP_S)
    assert name not in world.ready()
    first, second = world.times(name)[-2:]
    assert second - first == QUICK.probe_interval_s


def test_probes_that_change_nothing_are_not_announced() -> None:
    """Whatever shows the status need not look at hundreds of instances for each probe."""
    world = IdleWorld(3)
    world.behave(5.0)
    controller = world.controller
    controller.instances()
    before = controller.changes
    world.behave(60.0)
    assert len(world.probed) > 80
    assert controller.changes == before
    world.tell(Silent("gpu-0", "late"))
    assert controller.changes == before
    world.hung.add("gpu-0")
    world.behave(10.0)
    assert controller.changes > before
    assert world.status("gpu-0").phase.value == "unhealthy"


def test_the_cost_of_an_event_does_not_grow_with_the_fleet() -> None:
    """Counted in comparisons of due times, which a scan of all instances would need."""

    class Counted(float):
        compared = 0

        def __le__(self, other: float) -> bool:
            Counted.compared += 1
            return float(self) <= other

        def __lt__(self, other: float) -> bool:
            Counted.compared += 1
            return float(self) < other

    world = IdleWorld(MANY)
    world.behave(40.0)
    commands: list[ControllerCommand] = []
    for at in (50.1, 50.2, 50.3):
        world.wake_at = None
        Counted.compared = 0
        commands += world.controller.handle(ControllerTimer(), Counted(at))
        due = sum(isinstance(command, Probe) for command in commands)
        assert Counted.compared <= 40 * (due + 10)


def test_instances_are_spread_over_an_interval() -> None:
    tenths = Counter(int(spread(f"127.0.0.1:{8000 + number}") * 10) for number in range(1000))
    assert set(tenths) == set(range(10))
    assert max(tenths.values()) < 200
