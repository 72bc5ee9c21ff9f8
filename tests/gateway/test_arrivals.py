"""Requests that arrive in one turn of the loop reach their dispatcher together, and do not affect each other."""

from typing import Any

import pytest

from pointsman.http.pool import FEW
from pointsman.routing.events import Arrived
from tests.gateway.memory import Memory, statuses
from tests.gateway.wire import chat

MANY = FEW + 4


def forwarded(memory: Memory) -> int:
    """Requests that have reached the instance."""
    return sum(bytes(transport.written).count(b"POST ") for _, transport in memory.pool.made)


def test_the_first_requests_are_decided_at_once_and_the_others_together() -> None:
    memory = Memory()
    clients = [memory.client() for _ in range(MANY)]
    for client, _ in clients:
        client.data_received(chat())
    assert forwarded(memory) == FEW
    memory.loop.turn()
    assert forwarded(memory) == MANY
    memory.answer_all()
    assert [statuses(bytes(transport.written)) for _, transport in clients] == [[200]] * MANY
    memory.disconnect_all()


def test_a_client_that_disconnects_in_the_same_turn_is_not_sent() -> None:
    memory = Memory()
    clients = [memory.client() for _ in range(MANY)]
    for client, _ in clients:
        client.data_received(chat())
    leaver, transport = clients[-1]
    leaver.connection_lost(None)
    transport.abort()
    memory.loop.turn()
    assert forwarded(memory) == MANY - 1
    memory.answer_all()
    memory.disconnect_all()


def test_a_request_that_cannot_be_decided_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(memory.loop, "call_exception_handler", reported.append)
    dispatcher = memory.gateway.traffic.lanes["chat"].dispatcher
    handle = dispatcher.handle
    turns = iter(range(MANY))

    def breaks_once(event: Any, now: float) -> Any:
        if isinstance(event, Arrived) and next(turns) == FEW + 1:
            raise RuntimeError("a bug of ours")
        return handle(event, now)

    monkeypatch.setattr(dispatcher, "handle", breaks_once)
    clients = [memory.client() for _ in range(MANY)]
    for client, _ in clients:
        client.data_received(chat())
    memory.loop.turn()
    memory.answer_all()
    found = [statuses(bytes(transport.written)) for _, transport in clients]
    assert sorted(found) == [[200]] * (MANY - 1) + [[500]]
    assert len(reported) == 1
    memory.disconnect_all()
