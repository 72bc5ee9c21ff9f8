"""The user's object, made from a recipe: loaded, given its arguments and handles, and configured."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from pointsman.pipeline.context import CURRENT, CallContext
from pointsman.runtimes.handles import Handle, HandleLink
from pointsman.runtimes.model_handles import ModelHandle
from pointsman.runtimes.replica.calling import Calling
from pointsman.runtimes.replica.ingress import Ingress
from pointsman.runtimes.replica.loading import LoadFailed, first_own_frame, load
from pointsman.runtimes.replica.methods import Methods
from pointsman.runtimes.replica.recipe import Recipe, Surroundings, handle_named_by
from pointsman.runtimes.replica.threads import Threads
from pointsman.runtimes.requesting import Requesting
from pointsman.runtimes.wire import HandleAt, SharedMemory, decode_value, encode_value


class Handles:
    """Makes handles to other nodes and to models."""

    def __init__(self, recipe: Recipe, surroundings: Surroundings, shared: SharedMemory | None) -> None:
        self._link = HandleLink(
            Requesting.unix(surroundings.socket, {"x-pointsman-secret": surroundings.secret}),
            asyncio.get_running_loop(),
            lambda value: encode_value(value, shared),
            lambda blob: decode_value(blob, shared),
            recipe.app,
        )

    def __call__(self, to: HandleAt) -> Handle | ModelHandle:
        return ModelHandle(self._link, to.name) if to.model else Handle(self._link, to.name)

    def put_into(self, value: Any) -> Any:
        """A value with handles where they are named in it."""
        if named := handle_named_by(value):
            return self(HandleAt(*named))
        if isinstance(value, dict):
            return {name: self.put_into(inside) for name, inside in value.items()}
        return [self.put_into(inside) for inside in value] if isinstance(value, list) else value


class Target:
    """What is called, once it is there."""

    def __init__(
        self,
        recipe: Recipe,
        handles: Handles,
        calling: Calling,
        threads: Threads,
        shared: SharedMemory | None,
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
        """One config after the other, in the order in which they came."""
        self._methods: Methods | None = None
        self._nobody = CallContext(
            app=recipe.app, node=recipe.node, rank=recipe.rank, shards=recipe.shards, recorder=recorder
        )

    @property
    def methods(self) -> Methods | None:
        """None: it is not there yet."""
        return self._methods

    async def load(self) -> None:
        """Load the code and make the object. Raises `LoadFailed`."""
        made = await self._threads.wait_for(self._made)
        methods = Methods(made, self.recipe.node or self.recipe.code, is_function=self.recipe.kind == "function")
        methods.check()
        self._methods = methods

    async def configure(self, config: Any) -> None:
        """Hand a user config over, if the object takes one."""
        assert self._methods is not None
        method = self._methods.optional("reconfigure")
        if method is not None:
            async with self._configuring:
                CURRENT.set(self._nobody)
                await self._calling.value(method, config)

    async def check_health(self) -> None:
        """Ask the object how it is, if it can say. Raises what it raises. Long calls do not keep it waiting."""
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
            await self._checks.wait_for(check)

    def _made(self) -> Any:
        """In a thread: loading may take long."""
        recipe = self.recipe
        if recipe.kind == "ingress":
            wanted = [code for code in (recipe.preprocessor, recipe.schema) if code]
            found = dict(zip(wanted, load(wanted, recipe.folder), strict=True))
            return Ingress(found.get(recipe.preprocessor), found.get(recipe.schema), self._calling, self._shared)
        (body,) = load([recipe.code], recipe.folder)
        if recipe.kind == "function":
            return body
        args, kwargs = self._handles.put_into(recipe.args), self._handles.put_into(recipe.kwargs)
        CURRENT.set(self._nobody)
        try:
            return body(*args, **kwargs)
        except (Exception, SystemExit) as error:
            file = getattr(inspect.getmodule(body), "__file__", "") or ""
            where = first_own_frame(error, [file])
            raise LoadFailed(f"{where}: {type(error).__name__}: {error}, when {recipe.code} was made") from error
