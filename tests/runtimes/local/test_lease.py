"""Leases of a supervisor: engines run only while a plane renews, whatever the connection does."""

import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from pointsman.runtimes.machine.children import now
from pointsman.runtimes.machine.supervisor import FIRST_VISIT_S, LATE_S, EngineLease
from pointsman.runtimes.machine.supervisor_link import (
    Confused,
    ProcessExited,
    ProcessFailed,
    ProcessStarted,
    SupervisorTerms,
    open_supervisor,
)
from tests.runtimes.local.processes import eventually, is_alive, until
from tests.runtimes.local.test_supervisor import DEAF, SLEEP, Hold, run

LEASE_S = 0.5


def test_a_lease_ends_after_the_stamp_and_not_after_its_delivery() -> None:
    lease = EngineLease(100.0)
    assert not lease.holds(100.0), "nothing is started before it is granted"
    assert lease.ends == 100.0 + FIRST_VISIT_S
    assert lease.renew(101.0, 2.0, at=101.5) == 103.0
    assert lease.holds(102.9)
    assert not lease.holds(103.0)
    assert lease.renew(101.5, 2.0, at=140.0) == 103.5, "it was delivered far too late"
    assert not lease.holds(140.0)
    assert lease.renew(101.2, 2.0, at=140.0) == 103.5, "an earlier one overtaken by a later one takes nothing away"


@pytest.mark.parametrize(
    ("stamp", "lease_s"), [(101.0, 2.0), (math.nan, 2.0), (99.0, math.nan), (99.0, 0.0), (99.0, math.inf)]
)
def test_a_lease_without_sense_is_refused(stamp: float, lease_s: float) -> None:
    lease = EngineLease(100.0)
    with pytest.raises(ValueError, match="no lease"):
        lease.renew(stamp, lease_s, at=100.0)
    assert not lease.is_granted


async def leased(state: Path, stop_grace_s: float = 0.3) -> Hold:
    link, running = await open_supervisor(state, SupervisorTerms(60.0, stop_grace_s, leased=True))
    return Hold(link, running, state)


def renew(hold: Hold, stamp: float, lease_s: float = LEASE_S, epoch: int = 1) -> None:
    hold.link.ask(ask="renew", epoch=epoch, stamp=stamp, lease_s=lease_s)


def test_nothing_is_started_without_a_lease(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state)
        hold.link.start("a", SLEEP, dict(os.environ), "/", hold.log("a"))
        assert "no lease" in (await hold.hear(ProcessFailed, "a")).why
        renew(hold, now(), 60.0)
        await hold.start("a", SLEEP)
        await hold.link.end()

    run(story())


def test_engines_outlive_the_connection_and_end_with_the_lease(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state)
        stamp = now()
        renew(hold, stamp, 1.5)
        pids = [await hold.start("a", SLEEP), await hold.start("b", DEAF)]
        await hold.says("b")
        hold.link.close()
        await hold.link.process.wait()
        assert now() - stamp >= 1.5
        assert not any(map(is_alive, pids)), "one of them ignores SIGTERM"

    run(story())


def test_a_renewal_that_is_delivered_late_keeps_nothing_alive(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state)
        stamp = now()
        renew(hold, stamp)
        pid = await hold.start("a", SLEEP)
        while is_alive(pid):
            renew(hold, stamp)  # always the same stamp: no answer reaches the plane
            time.sleep(0.02)
            assert now() - stamp < 20.0
        assert now() - stamp >= LEASE_S
        await hold.link.gone.wait()
        await hold.link.process.wait()

    run(story())


def test_a_supervisor_that_was_frozen_beyond_its_lease_ends_its_engines_first(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state, stop_grace_s=20.0)
        stamp = now()
        renew(hold, stamp)
        pid = await hold.start("a", SLEEP)
        os.kill(hold.link.process.pid, signal.SIGSTOP)
        until(lambda: now() - stamp > 2 * LEASE_S)
        renew(hold, stamp)
        hold.link.start("b", SLEEP, dict(os.environ), "/", hold.log("b"))
        os.kill(hold.link.process.pid, signal.SIGCONT)
        await hold.hear(ProcessFailed, "b")
        assert (await hold.hear(ProcessExited, "a")).signal == signal.SIGTERM
        assert not is_alive(pid)
        await hold.link.gone.wait()
        await hold.link.process.wait()

    run(story())


@pytest.mark.skipif(sys.platform != "linux", reason="a timer of Linux")
def test_a_supervisor_that_stays_frozen_is_killed_by_the_kernel_and_its_engines_with_it(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state)
        stamp = now()
        renew(hold, stamp, 2.5)
        engine = await hold.start("a", DEAF)
        os.kill(hold.link.process.pid, signal.SIGSTOP)
        await hold.link.gone.wait()
        assert now() - stamp >= 2.5 + 0.3
        assert not hold.link.process.lives
        await eventually(lambda: not is_alive(engine), "its engine dies with it")

    run(story())


@pytest.mark.skipif(sys.platform != "linux", reason="a timer of Linux")
def test_a_frozen_supervisor_whose_engines_have_all_ended_is_left_alone(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state)
        stamp = now()
        renew(hold, stamp, 1.0)
        hold.link.start("gateway", SLEEP, dict(os.environ), "/", hold.log("gateway"), outlives_s=60.0)
        gateway = (await hold.hear(ProcessStarted, "gateway")).pid
        await hold.start("a", SLEEP)
        hold.link.signal("a", signal.SIGTERM)
        await hold.hear(ProcessExited, "a")
        os.kill(hold.link.process.pid, signal.SIGSTOP)
        until(lambda: now() - stamp > 1.0 + 0.3 + 2 * LATE_S)
        os.kill(hold.link.process.pid, signal.SIGCONT)
        renew(hold, now(), 60.0)
        await hold.start("b", SLEEP)
        assert is_alive(gateway)
        await hold.link.end()

    run(story())


def test_a_process_that_may_outlive_the_lease_does_and_another_lease_is_taken(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state)
        renew(hold, now())
        hold.link.start("gateway", SLEEP, dict(os.environ), "/", hold.log("gateway"), outlives_s=60.0)
        gateway = (await hold.hear(ProcessStarted, "gateway")).pid
        engine = await hold.start("deaf", DEAF)
        await hold.says("deaf")
        assert (await hold.hear(ProcessExited, "deaf")).signal == signal.SIGKILL
        assert not is_alive(engine)
        assert is_alive(gateway)
        renew(hold, now(), 60.0)
        await hold.start("deaf", SLEEP)
        assert is_alive(gateway)
        await hold.link.end()
        assert not is_alive(gateway)

    run(story())


def test_what_outlives_the_lease_ends_in_its_time_and_the_supervisor_with_it(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state)
        stamp = now()
        renew(hold, stamp)
        hold.link.start("gateway", SLEEP, dict(os.environ), "/", hold.log("gateway"), outlives_s=0.7)
        gateway = (await hold.hear(ProcessStarted, "gateway")).pid
        hold.link.close()
        await hold.link.process.wait()
        assert now() - stamp >= LEASE_S + 0.7
        assert not is_alive(gateway)

    run(story())


def test_a_newer_plane_outrules_an_older_one(state: Path) -> None:
    async def story() -> None:
        hold = await leased(state)
        renew(hold, now(), 60.0, epoch=7)
        pid = await hold.start("a", SLEEP)
        renew(hold, now(), 60.0, epoch=6)
        hold.link.ask(ask="signal", id="a", number=int(signal.SIGKILL), epoch=6)
        await eventually(lambda: len([one for one in hold.heard if isinstance(one, Confused)]) == 2, "two refusals")
        assert is_alive(pid)
        await hold.link.end()

    run(story())
