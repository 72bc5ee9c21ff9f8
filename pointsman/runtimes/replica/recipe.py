"""What a replica is told when it is started: the parameters of the engine type `python`, and where its plane is."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pointsman.errors import ConfigError


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Which code to run, and with what. `pointsman/engines/python.py` says what each is."""

    app: str = ""
    node: str = ""
    kind: Literal["class", "function", "ingress"]
    code: str = ""
    folder: str = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    version: str = ""
    threads: int = 1
    rank: int | None = None
    shards: int = 1
    preprocessor: str = ""
    schema: str = ""
    env: dict[str, str] = {}

    @property
    def holds_handles(self) -> bool:
        """Whether its object can call other nodes, and so may wait for them."""
        return any(map(_is_handle_deep, [*self.args, *self.kwargs.values()]))


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The plane that a replica belongs to."""

    secret: str
    socket: str = ""
    """The gateway's, for calls of other nodes."""
    shared_memory: str = ""
    """A folder; empty: large values travel like small ones."""
    user_config: Any = None
    """For `reconfigure`, before the first call."""


def read_environment(environment: Mapping[str, str]) -> tuple[Recipe, Surroundings]:
    """What the variables say. Raises `ConfigError`."""
    try:
        recipe = msgspec.json.decode(environment.get("POINTSMAN_REPLICA", ""), type=Recipe)
        config = msgspec.json.decode(environment.get("POINTSMAN_USER_CONFIG") or "null")
    except msgspec.DecodeError as error:
        raise ConfigError([f"POINTSMAN_REPLICA must say as JSON what to run: {error}"]) from None
    secret = environment.get("POINTSMAN_SECRET", "")
    if not secret:  # calls may hold anything, also code
        raise ConfigError(["POINTSMAN_SECRET must be set: only those who know it may call"])
    return recipe, Surroundings(
        secret=secret,
        socket=environment.get("POINTSMAN_SOCKET", ""),
        shared_memory=environment.get("POINTSMAN_SHM", ""),
        user_config=config,
    )


def handle_named_by(value: Any) -> tuple[str, bool] | None:
    """(name, whether it is a model) if this is how arguments write a handle."""
    if type(value) is dict and len(value) == 1:
        if type(name := value.get("$handle")) is str:
            return name, False
        if type(name := value.get("$model")) is str:
            return name, True
    return None


def _is_handle_deep(value: Any) -> bool:
    if handle_named_by(value):
        return True
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_is_handle_deep, inside))
