"""A name where one of another kind is expected: the error says what it is, and what belongs to it."""

from typing import Any

import pytest

from pointsman.gateway.lookup import of_another_kind


def deployment(name: str, *models: str, internal: bool = False) -> dict[str, Any]:
    instances = [{"id": f"{name}-1"}, {"id": f"{name}-2"}]
    return {
        "name": name,
        "model": models[0] if models else name,
        "aliases": [],
        "instances": instances,
        "internal": internal,
    }


STATUS = {
    "applications": [{"name": "app", "path": "/app", "nodes": [{"name": "n", "deployments": ["app.n"]}]}],
    "deployments": [deployment("chat", "smollm2"), deployment("app.n", internal=True)],
}


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        ("application", "chat", '"chat" is a deployment, not an application; known: app; see: pointsman status'),
        ("application", "app.n", '"app.n" is a deployment, not an application; use: app'),
        ("application", "chat-1", '"chat-1" is an instance, not an application; known: app; see: pointsman status'),
        ("deployment", "app", '"app" is an application, not a deployment; use: app.n'),
        ("deployment", "chat-2", '"chat-2" is an instance, not a deployment; it belongs to: chat'),
        ("deployment", "smollm2", '"smollm2" is a model, not a deployment; use: chat'),
        ("instance", "chat", '"chat" is a deployment, not an instance; use: chat-1, chat-2'),
        ("instance", "smollm2", '"smollm2" is a model, not an instance; use: chat-1, chat-2'),
        ("instance", "app", '"app" is an application, not an instance; use: app.n-1, app.n-2'),
        ("request", "chat", '"chat" is a deployment, not a request; to list requests: pointsman requests'),
        ("request", "chat-1", '"chat-1" is an instance, not a request; to list requests: pointsman requests'),
        ("instance", "chatt", ""),
        ("instance", "chat-1", ""),
        ("application", "chatt", 'unknown application "chatt"; there is a deployment "chat"'),
        ("application", "appp", ""),
        ("node", "nothing", ""),
    ],
)
def test_what_it_is_the_name_of(kind: str, name: str, told: str) -> None:
    found = of_another_kind(kind, name, STATUS)
    assert found.startswith(told), found  # a state directory may follow a command
    assert bool(found) == bool(told)


def test_without_any_of_the_kind() -> None:
    told = of_another_kind("application", "fleet", {"applications": [], "deployments": [deployment("fleet")]})
    assert told.startswith('"fleet" is a deployment, not an application; there is no application; see: pointsman ')
