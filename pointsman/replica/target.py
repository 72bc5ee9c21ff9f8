"""The user's object: made from a recipe with its arguments and handles, and configured."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from pointsman.errors import ConfigError
from pointsman.pipeline.context import CURRENT, CallContext
from pointsman.replica.calling import Calling, Threads
from pointsman.replica.handles import GatewayTransport, Handle, HandleLink, ModelHandle
from pointsman.replica.ingress import Ingress
from pointsman.replica.loading import LoadFailed, first_own_frame, load
from pointsman.replica.methods import Methods
from pointsman.wire import HandleAt, SharedBuffers, decode_value, encode_value


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Which code to run, and with what. `pointsman/engines/python.py` explains each field."""

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
        """Whether its object can call other nodes, and may wait for them."""
        return any(map(_is_handle_deep, [*self.args, *self.kwargs.values()]))


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The plane that a replica belongs to."""

    secret: str
    socket: str = ""
    """The gateway's, for calls of other nodes."""
    shared_memory: str = ""
    """A folder; if empty, large values are sent like small ones."""
    user_config: Any = None
    """For `reconfigure`, before the first call."""


def read_environment(environment: Mapping[str, str]) -> tuple[Recipe, Surroundings]:
    """Recipe and surroundings from environment variables. Raises `ConfigError`."""
    try:
        recipe = msgspec.json.decode(environment.get("POINTSMAN_REPLICA", ""), type=Recipe)
        config = msgspec.json.decode(environment.get("POINTSMAN_USER_CONFIG") or "null")
    except msgspec.DecodeError as error:
        raise ConfigError([f"POINTSMAN_REPLICA must say as JSON what to run: {error}"]) from None
    secret = environment.get("POINTSMAN_SECRET", "")
    if not secret:  # a call may contain code
        raise ConfigError(["POINTSMAN_SECRET must be set: calls need it"])
    return recipe, Surroundings(
        secret=secret,
        socket=environment.get("POINTSMAN_SOCKET", ""),
        shared_memory=environment.get("POINTSMAN_SHM", ""),
        user_config=config,
    )


def handle_in(value: Any) -> tuple[str, bool] | None:
    """(name, whether it is a model) if this is a handle as arguments write it; else None."""
    if type(value) is dict and len(value) == 1:
        if type(name := value.get("$handle")) is str:
            return name, False
        if type(name := value.get("$model")) is str:
            return name, True
    return None


def _is_handle_deep(value: Any) -> bool:
    if handle_in(value):
        return True
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_is_handle_deep, inside))


class Handles:
    """Makes handles to other nodes and to models."""

    def __init__(self, recipe: Recipe, surroundings: Surroundings, shared: SharedBuffers | None) -> None:
        self._link = HandleLink(
            GatewayTransport(Path(surroundings.socket), f"x-pointsman-secret: {surroundings.secret}\r\n"),
            asyncio.get_running_loop(),
            lambda value: encode_value(value, shared),
            lambda blob: decode_value(blob, shared),
            recipe.app,
        )

    def __call__(self, to: HandleAt) -> Handle | ModelHandle:
        return ModelHandle(self._link, to.name) if to.model else Handle(self._link, to.name)

    def fill(self, value: Any) -> Any:
        """The value with handles in place of their names."""
        if named := handle_in(value):
            return self(HandleAt(*named))
        if isinstance(value, dict):
            return {name: self.fill(inside) for name, inside in value.items()}
        return [self.fill(inside) for inside in value] if isinstance(value, list) else value


class Target:
    """The object that is called."""

    def __init__(
        self,
        recipe: Recipe,
        handles: Handles,
        calling: Calling,
        threads: Threads,
        shared: SharedBuffers | None,
        recorder: Callable[[str, float], None] | None = None,
    ) -> None:
        self.recipe = recipe
        self._handles = handles
        self._calling = calling
        self._threads = threads
        self._shared = shared
        self._checks = Threads(1, "health")
        self._checking: asyncio.Task[Any] | None = None
        self._configuring = asyncio.Lock()
        """Configs are applied one at a time, in order."""
        self._methods: Methods | None = None
        self._no_call = CallContext(
            app=recipe.app, node=recipe.node, rank=recipe.rank, shards=recipe.shards, recorder=recorder
        )

    @property
    def methods(self) -> Methods | None:
        """None until it is loaded."""
        return self._methods

    async def load(self) -> None:
        """Load the code and make the object. Raises `LoadFailed`."""
        made = await self._threads.result_of(self._made)
        methods = Methods(made, self.recipe.node or self.recipe.code, is_function=self.recipe.kind == "function")
        methods.check()
        self._methods = methods

    async def configure(self, config: Any) -> None:
        """Pass a user config to the object, if it takes one."""
        assert self._methods is not None
        method = self._methods.optional("reconfigure")
        if method is not None:
            async with self._configuring:
                CURRENT.set(self._no_call)
                await self._calling.value(method, config)

    async def check_health(self) -> None:
        """Call the health check of the object, if it has one. Raises what it raises. Long calls do not delay it."""
        if self._methods is None or self.recipe.kind == "ingress":
            return
        method = self._methods.optional("check_health")
        if method is None:
            return
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._checked(method.function))
        await asyncio.shield(self._checking)

    async def _checked(self, check: Any) -> None:
        if inspect.iscoroutinefunction(check):
            await check()
        else:
            await self._checks.result_of(check)

    def _made(self) -> Any:
        """Runs in a thread, since loading may take long."""
        recipe = self.recipe
        if recipe.kind == "ingress":
            wanted = [code for code in (recipe.preprocessor, recipe.schema) if code]
            found = dict(zip(wanted, load(wanted, recipe.folder), strict=True))
            return Ingress(found.get(recipe.preprocessor), found.get(recipe.schema), self._calling, self._shared)
        (body,) = load([recipe.code], recipe.folder)
        if recipe.kind == "function":
            return body
        args, kwargs = self._handles.fill(recipe.args), self._handles.fill(recipe.kwargs)
        CURRENT.set(self._no_call)
        try:
            return body(*args, **kwargs)
        except (Exception, SystemExit) as error:
            file = getattr(inspect.getmodule(body), "__file__", "") or ""
            where = first_own_frame(error, [file])
            raise LoadFailed(f"{where}: {type(error).__name__}: {error}, while {recipe.code} was made") from error
