"""The keeper of a cluster's state, without Ray: it is a plain object that an actor wraps."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pointsman.errors import PointsmanError
from pointsman.runtimes.ray import keeper as module
from pointsman.runtimes.ray.keeper import Keeper, PlaneRuns
from pointsman.runtimes.ray.node import NodeAnswer
from tests.runtimes.local.processes import eventually


class Agent:
    """A node that answers polls of a keeper, with a clock of its own."""

    def __init__(self) -> None:
        self.polls: list[tuple[int, float | None]] = []
        self.poll = SimpleNamespace(remote=self._poll)

    async def _poll(self, epoch: int, stamp: float | None, lease_s: float, after: int | None) -> NodeAnswer:
        assert after is None, "reports are for the plane"
        self.polls.append((epoch, stamp))
        return NodeAnswer(100.0 + len(self.polls), ())


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.1)
    monkeypatch.setattr(module, "TAKEN_S", 0.3)
    monkeypatch.setattr(module, "POLL_S", 0.01)


def made(storage: Path | None = None, orphan_grace_s: float = 60.0, **agents: Agent) -> Keeper:
    """`agents`: that a keeper finds by their names."""

    def find(namespace: str, name: str) -> Agent:
        if name not in agents:
            raise ValueError(f"no actor {namespace}/{name}")
        return agents[name]

    return Keeper("" if storage is None else str(storage), orphan_grace_s, 3.0, 1.0, "pointsman", find)


def test_a_second_plane_is_refused_while_the_first_lives() -> None:
    async def story() -> None:
        keeper = made()
        first = (await keeper.take("a, pid 1")).epoch
        with pytest.raises(PlaneRuns, match="a, pid 1"):
            await keeper.take("b, pid 2")
        await asyncio.sleep(0.4)  # the first is silent
        second = (await keeper.take("b, pid 2")).epoch
        assert second > first
        with pytest.raises(PlaneRuns, match="no longer that of the cluster"):
            await keeper.beat(first, "a, pid 1", {})
        with pytest.raises(PlaneRuns):
            await keeper.save(first, 1, b"old")

    run(story())


def test_state_secret_and_epoch_survive_the_keeper(tmp_path: Path) -> None:
    async def story() -> None:
        keeper = made(tmp_path / "storage")
        before = await keeper.take("a")
        await keeper.save(before.epoch, 2, b"image")
        await keeper.save(before.epoch, 1, b"an earlier one that was overtaken")
        with pytest.raises(PlaneRuns):
            await made(tmp_path / "storage").take("b")
        after = await made(tmp_path / "storage").take("a")
        assert (after.image, after.secret) == (b"image", before.secret)
        assert after.epoch > before.epoch
        assert (tmp_path / "storage/pointsman.state").stat().st_mode & 0o777 == 0o600

    run(story())


def test_a_keeper_that_is_restarted_goes_on_with_the_nodes_of_its_checkpoint(tmp_path: Path) -> None:
    async def story() -> None:
        first = made(tmp_path, 5.0)
        epoch = (await first.take("a")).epoch
        await first.beat(epoch, "a", {"n1": Agent(), "n2": Agent()})
        first._keeping.cancel()  # it is killed, and so is the plane
        agent = Agent()
        again = made(tmp_path, 5.0, n1=agent)
        await eventually(lambda: len(agent.polls) > 2, "renewals by the next keeper, of the node that is left")
        assert {one for one, _ in agent.polls} == {epoch}
        await asyncio.sleep(module.TAKEN_S)
        after = await again.take("b")
        assert after.epoch > epoch
        await again.leave(after.epoch)
        known = len(agent.polls)
        later = made(tmp_path, 5.0, n1=agent)
        await asyncio.sleep(0.3)
        assert len(agent.polls) == known, "a plane that has left leaves nothing to keep"
        later._keeping.cancel()

    run(story())


def test_a_keeper_that_is_restarted_long_after_the_plane_died_keeps_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        first = made(tmp_path, 5.0)
        epoch = (await first.take("a")).epoch
        await first.beat(epoch, "a", {"n1": Agent()})
        first._keeping.cancel()
        (tmp_path / "pointsman.beat").write_text(repr(time.time() - 60.0))
        agent = Agent()
        made(tmp_path, 5.0, n1=agent)
        await asyncio.sleep(0.3)
        assert agent.polls == []

    run(story())


def test_a_storage_that_cannot_be_written_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PointsmanError, match="cannot be written"):
            await made(tmp_path / "file/storage").take("a")
        (tmp_path / "storage").mkdir()
        (tmp_path / "storage/pointsman.state").write_text("nonsense")
        with pytest.raises(PointsmanError, match="move it away"):
            made(tmp_path / "storage")

    run(story())


def test_nodes_are_kept_while_the_plane_is_silent_and_not_longer_than_that() -> None:
    async def story() -> None:
        keeper, agent = made(orphan_grace_s=0.6), Agent()
        epoch = (await keeper.take("a")).epoch
        for _ in range(10):
            await keeper.beat(epoch, "a", {"n1": agent})
            await asyncio.sleep(0.02)
        assert agent.polls == [], "a plane that lives grants leases itself"
        assert await keeper.release(epoch, "n1") == 0.0
        await keeper.beat(epoch, "a", {"n1": agent})
        await eventually(lambda: len(agent.polls) > 2, "renewals")
        assert agent.polls[:3] == [(epoch, None), (epoch, 101.0), (epoch, 102.0)], "each echoes the stamp before"
        assert 0.0 < await keeper.release(epoch, "n1") <= 3.0 + 1.0 + 0.5
        known = len(agent.polls)
        await asyncio.sleep(0.1)
        assert len(agent.polls) == known, "it was released"
        await keeper.beat(epoch, "a", {"n1": agent})
        await eventually(lambda: len(agent.polls) > known, "renewals")
        await asyncio.sleep(0.8)
        known = len(agent.polls)
        await asyncio.sleep(0.1)
        assert len(agent.polls) == known, "no plane came within the grace time"

    run(story())
