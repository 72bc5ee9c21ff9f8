"""Any sequence of events: nothing exceeds its capacity, and what is released is free again."""

from collections.abc import Callable

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pointsman.placement.asks import Ask, Claim
from pointsman.placement.fleet import (
    EXCLUSIVE,
    FREE_BYTES,
    FREE_CPUS,
    FREE_MEMORY,
    FREE_SHARE,
    INSTANCES,
    TENANTS,
    Fleet,
)
from pointsman.placement.fragmentation import Workload
from pointsman.placement.placer import Placed, Placer
from pointsman.types import Worker
from tests.placement.judging import Room, wrong_with
from tests.placement.situations import asks, workers
from tests.properties import examples


def columns(fleet: Fleet) -> dict[str, list[float]]:
    """Every number that placing looks at."""
    return {
        name: [float(value) for value in roster.columns[name]]
        for roster, names in (
            (fleet.gpus, (FREE_BYTES, FREE_SHARE, TENANTS, EXCLUSIVE)),
            (fleet.workers, (FREE_CPUS, FREE_MEMORY, INSTANCES)),
        )
        for name in names
    }


NAMES = [f"w{number}" for number in range(4)]


class AnySequence(RuleBasedStateMachine):
    running = Bundle("running")

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.fleet = Fleet(data.draw(workers(name)) for name in NAMES[:3])
        usual = data.draw(st.lists(asks(), max_size=3))
        self.workload = Workload(usual) if usual else None
        self.placer = Placer(self.fleet, self.workload)
        self.count = 0

    @rule(target=running, ask=asks())
    def place(self, ask: Ask) -> str:
        self.count += 1
        ask = msgspec.structs.replace(ask, instance_id=f"i{self.count}")
        found = self.placer.place(ask)
        if isinstance(found, Placed):
            assert wrong_with(ask, found.place, self.fleet) is None
            self.fleet.claim(ask.instance_id, found.place, ask.deployment, ask.priority)
        else:
            reasons = found.reasons()
            everywhere = reasons.pop("not considered", {})
            hosts = {str(host) for host in self.fleet.workers}
            assert all({*everywhere, *one} == hosts for one in reasons.values() or [{}])
            assert str(found.reason)
        return ask.instance_id

    @rule(ask=asks())
    def same_again(self, ask: Ask) -> None:
        """The same fleet, the same answer: also from a placer that has seen nothing, on a copy."""
        first, second = self.placer.place(ask), self.placer.place(ask, traced=False)
        third = Placer(self.fleet.copy(), self.workload).place(ask)
        for other in (second, third):
            if isinstance(first, Placed):
                assert isinstance(other, Placed)
                assert (first.place, first.score, first.runner_ups) == (other.place, other.score, other.runner_ups)
            else:
                assert not isinstance(other, Placed)
                assert first.reasons() == other.reasons()

    @rule(instance_id=consumes(running))
    def release(self, instance_id: str) -> None:
        had = instance_id in self.fleet.occupants
        assert self.fleet.release(instance_id) is had
        assert self.fleet.release(instance_id) is False

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        if name not in self.fleet:
            return
        here = [one.instance_id for one in self.fleet.occupants.values() if name in one.place.workers]
        left = self.claims_but(here, lambda claim: claim.worker == name)
        assert self.fleet.remove(name) == here
        assert self.claims_but(here) == left

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def come_or_change(self, name: str, data: st.DataObject) -> None:
        worker: Worker = data.draw(workers(name))
        slots = {(name, gpu.index) for gpu in worker.gpus}
        gone = [
            one.instance_id
            for one in self.fleet.occupants.values()
            if any(slot[0] == name and slot not in slots for slot in one.place.gpus)
        ]
        left = self.claims_but(
            gone, lambda claim: claim.gpu is not None and claim.worker == name and (name, claim.gpu) not in slots
        )
        assert self.fleet.put(worker) == gone
        assert self.claims_but(gone) == left

    def claims_but(
        self, instances: list[str], is_gone: Callable[[Claim], bool] = lambda _: False
    ) -> dict[str, list[Claim]]:
        """What these instances have claimed and keep, of those that keep something."""
        places = {name: self.fleet.occupants[name].place for name in instances if name in self.fleet.occupants}
        kept = {name: [one for one in place.claims if not is_gone(one)] for name, place in places.items()}
        return {name: claims for name, claims in kept.items() if claims}

    @invariant()
    def columns_are_what_claims_say(self) -> None:
        if not hasattr(self, "fleet"):
            return
        room, now = Room(self.fleet), columns(self.fleet)
        assert now[FREE_BYTES] == list(room.bytes.values())
        assert now[TENANTS] == list(room.tenants.values())
        assert [value > 0 for value in now[EXCLUSIVE]] == list(room.alone.values())
        assert all(abs(a - b) < 1e-9 for a, b in zip(now[FREE_SHARE], room.share.values(), strict=True))
        assert min(now[FREE_SHARE], default=1.0) > -1e-9
        assert now[FREE_MEMORY] == list(room.memory.values())
        assert all(abs(a - b) < 1e-9 for a, b in zip(now[FREE_CPUS], room.cpus.values(), strict=True))
        on = {str(host): self.fleet.occupants.on(str(host)) for host in self.fleet.workers}
        placed = self.fleet.occupants.values()
        assert on == {name: [one for one in placed if name in one.place.workers] for name in on}
        assert now[INSTANCES] == [len(instances) for instances in on.values()]

    def teardown(self) -> None:
        """After all releases, everything is as at the start."""
        if not hasattr(self, "fleet"):
            return
        for instance_id in list(self.fleet.occupants):
            assert self.fleet.release(instance_id)
        assert columns(self.fleet) == columns(Fleet(host.worker for host in self.fleet.workers))
        assert not self.fleet.occupants.of("d")


AnySequence.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=30)
TestAnySequence = AnySequence.TestCase
