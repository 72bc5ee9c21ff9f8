"""The user's object: made from a recipe with its arguments and handles, and configured."""

import asyncio
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from zlib import crc32

import msgspec

from pointsman.errors import ConfigError, PointsmanError, did_you_mean
from pointsman.pipeline.context import CURRENT, LOADING, CallContext, LoadedEnough, Loading
from pointsman.replica.calling import Calling, Threads
from pointsman.replica.handles import LOOPBACK, GatewayLink, GatewayTransport, Handle, ModelHandle
from pointsman.replica.ingress import Ingress
from pointsman.replica.methods import Methods
from pointsman.replica.sources import kept_finder
from pointsman.wire import Fetcher, HandleAt, SharedBuffers, decode_value, encode_value

# Loading the user's code: `module:Name` or `path/to/file.py:Name`


class LoadFailed(PointsmanError):
    """Code cannot be loaded, or its object cannot be made; the message says where the error is."""

    def __init__(self, message: str, *, final: bool = True) -> None:
        """`final`: a further try can succeed only after a change of the code, a package or an argument."""
        super().__init__(message)
        self.final = final


def load(codes: Iterable[str], folder: str) -> list[Any]:
    """The classes and functions of these names, in order. Raises `LoadFailed`."""
    if folder:
        _find_from(folder)
    split = [_split(code) for code in codes]
    wanted: dict[str, set[str]] = {}
    for module, name in split:
        wanted.setdefault(module, set()).add(name.partition(".")[0])
    modules = {module: _module(module, Path(folder), frozenset(names)) for module, names in wanted.items()}
    return [_named(modules[module], module, name) for module, name in split]


def first_own_frame(error: BaseException, files: Iterable[str] = ()) -> str:
    """file:line where an error was raised: the innermost frame in these files, else the innermost frame."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    known = [frame for frame in frames if frame.filename in set(files)]
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(known or frames)), "")


def _split(code: str) -> tuple[str, str]:
    module, _, name = code.rpartition(":")
    if not module or not name:
        raise LoadFailed(f'"{code}" names no code; write module:Name or path/to/file.py:Name')
    return module, name


def _module(module: str, folder: Path, wanted: frozenset[str]) -> ModuleType:
    if module.endswith(".py"):
        path = (folder / module).resolve()
        finder = kept_finder()
        if not path.is_file() and (finder is None or str(path) not in finder.sources):
            raise LoadFailed(f"{module} does not exist (looked for {path})")
        _find_from(str(path.parent))
        return _executed(_spec_of_file(path), module, wanted)
    known = sys.modules.get(module)
    if known is not None:
        return known
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # a parent package is missing, or raises
        raise _failed(module, error) from error
    if spec is None or spec.loader is None:
        raise LoadFailed(f"there is no module {module} (looked in {', '.join(sys.path)})")
    loaded = _executed(spec, module, wanted)
    parent, _, last = module.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, loaded)
    return loaded


def _spec_of_file(path: Path) -> ModuleSpec:
    """A spec for a file. Its name is that of an import from the file's own folder, unless another module already has
    that name."""
    name = path.stem
    try:
        own = name.isidentifier() and name not in sys.stdlib_module_names and name != "__main__"
        found = importlib.util.find_spec(name) if own else None
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or Path(found.origin).resolve() != path:
        name = f"_pointsman_{crc32(str(path).encode()):08x}_{path.stem}"
    finder = kept_finder()
    spec = None if finder is None else finder.spec_of(name, path)
    spec = spec or importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    return spec


def _executed(spec: ModuleSpec, where: str, wanted: frozenset[str]) -> ModuleType:
    """The module, executed to its end. If it would run its own pipeline, and all wanted names are already defined, the
    execution stops there."""
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    sys.modules[spec.name] = module
    token = LOADING.set(Loading(where, wanted, vars(module)))
    try:
        spec.loader.exec_module(module)
    except LoadedEnough:
        pass
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise _failed(where, error) from error
    finally:
        LOADING.reset(token)
    return module


def _named(module: ModuleType, where: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [known for known in dir(found) if not known.startswith("__")]
            raise LoadFailed(f'{where} has no "{name}"{did_you_mean(part, public)}') from None
        found = _undecorated(found)
    return found


def _undecorated(found: Any) -> Any:
    """The class or function itself, without the `@deployment` or `@ray.remote` of its program."""
    if hasattr(found, "__pointsman_deployment__"):
        return found.body
    if type(found).__module__ == "ray.remote_function":
        return found._function
    actor = getattr(found, "__ray_metadata__", None)
    return found if actor is None else actor.modified_class.__ray_actor_class__


def _failed(where: str, error: BaseException) -> LoadFailed:
    module_file = getattr(sys.modules.get(where), "__file__", "") or where
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = {name for name in names if Path(name).name == Path(module_file).name}
    if isinstance(error, SystemExit):
        why = f"it called sys.exit({error.code!r}); put that under if __name__ == '__main__'"
    elif isinstance(error, PointsmanError):
        why = str(error)
    else:
        why = f"{type(error).__name__}: {error}"
    final = _is_final(error) or isinstance(error, PointsmanError | SystemExit)
    return LoadFailed(f"{first_own_frame(error, files) or where}: {why}{_missing(error)}", final=final)


def _is_final(error: BaseException) -> bool:
    """Whether the code will raise this error every time, because something is missing or is not valid Python. Other
    errors may come from a server that is down, or from a lack of memory."""
    return isinstance(error, ImportError | SyntaxError | NameError)


def _missing(error: BaseException) -> str:
    """What to do about a package that is not installed."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"; install the package that has {package} in {sys.executable}, or add {package}.py" if package else ""


def _find_from(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The code to run, with its arguments and settings. `pointsman/engines/python.py` explains each field."""

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
        """Whether the object gets handles. If so, it can call other nodes, and may wait for them."""
        return any(map(_is_handle_deep, [*self.args, *self.kwargs.values()]))


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The plane that a replica belongs to."""

    secret: str
    socket: str = ""
    """The socket of the gateway, for calls to other nodes."""
    gateway: str = ""
    """A file with the address of the gateway (host:port). It replaces the socket if the gateway may be on another
    machine."""
    host: str = ""
    """The address of this machine; empty if there are no other machines."""
    shared_memory: str = ""
    """The folder of shared memory; empty if large values are sent in the same way as small ones."""
    memory_home: str = ""
    """A file with the home of this node; empty if all replicas are on one node."""
    user_config: Any = None
    """The argument with which `reconfigure` is called before the first call."""


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
        gateway=environment.get("POINTSMAN_GATEWAY", ""),
        host=environment.get("POINTSMAN_HOST", ""),
        shared_memory=environment.get("POINTSMAN_SHM", ""),
        memory_home=environment.get("POINTSMAN_MEMORY", ""),
        user_config=config,
    )


def handle_in(value: Any) -> tuple[str, bool] | None:
    """If this value stands for a handle in arguments: its name, and whether it is a model. Otherwise None."""
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

    def __init__(
        self, recipe: Recipe, surroundings: Surroundings, shared: SharedBuffers | None, fetcher: Fetcher | None
    ) -> None:
        async def decode(blob: bytes) -> Any:
            away = [] if fetcher is None else fetcher.elsewhere([blob])
            return decode_value(blob, await fetcher.source(away) if fetcher is not None and away else shared)

        self._link = GatewayLink(
            GatewayTransport(
                Path(surroundings.gateway or surroundings.socket),
                f"x-pointsman-secret: {surroundings.secret}\r\n",
                is_file=bool(surroundings.gateway),
                host=surroundings.host or LOOPBACK,
            ),
            asyncio.get_running_loop(),
            lambda value: encode_value(value, shared),
            decode,
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


async def instance_of(body: Any, args: Any, kwargs: Any, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> Any:
    """An object of a class. `run` calls the class if `__init__` is plain; an async `__init__` is awaited here."""
    if not inspect.iscoroutinefunction(getattr(body, "__init__", None)):
        return await run(lambda: body(*args, **kwargs))
    made = body.__new__(body, *args, **kwargs) if body.__new__ is not object.__new__ else body.__new__(body)
    await body.__init__(made, *args, **kwargs)
    return made


class Target:
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
        """Makes sure that configs are applied one at a time, in order."""
        self.methods: Methods | None = None
        """The methods of the object; None until the object is loaded."""
        self._no_call = CallContext(
            app=recipe.app, node=recipe.node, rank=recipe.rank, shards=recipe.shards, recorder=recorder
        )

    async def load(self) -> None:
        """Load the code and make the object. Raises `LoadFailed`."""
        made = await self._made()
        methods = Methods(made, self.recipe.node or self.recipe.code, is_function=self.recipe.kind == "function")
        try:
            methods.check()
        except PointsmanError as error:
            raise LoadFailed(str(error)) from None
        self.methods = methods

    async def configure(self, config: Any) -> None:
        """Pass a user config to the object, if the object accepts one."""
        assert self.methods is not None
        method = self.methods.optional("reconfigure")
        if method is not None:
            async with self._configuring:
                CURRENT.set(self._no_call)
                await self._calling.value(method, config)

    async def check_health(self) -> None:
        """Call the health check of the object, if it has one, and raise the check's errors. Long calls do not delay the
        check."""
        if self.methods is None or self.recipe.kind == "ingress":
            return
        method = self.methods.optional("check_health")
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

    async def _made(self) -> Any:
        """The object. A thread loads its code, because loading may take long."""
        recipe = self.recipe
        if recipe.kind == "ingress":
            wanted = [code for code in (recipe.preprocessor, recipe.schema) if code]
            loaded = await self._threads.result_of(lambda: load(wanted, recipe.folder))
            found = dict(zip(wanted, loaded, strict=True))
            return Ingress(found.get(recipe.preprocessor), found.get(recipe.schema), self._calling, self._shared)
        (body,) = await self._threads.result_of(lambda: load([recipe.code], recipe.folder))
        if recipe.kind == "function":
            return body
        args, kwargs = self._handles.fill(recipe.args), self._handles.fill(recipe.kwargs)
        CURRENT.set(self._no_call)
        try:
            return await instance_of(body, args, kwargs, self._in_thread)
        except (Exception, SystemExit) as error:
            file = getattr(inspect.getmodule(body), "__file__", "") or ""
            misfits = _misfits(body, args, kwargs)
            where = recipe.code if misfits else first_own_frame(error, [file])
            message = f"{where}: {type(error).__name__}: {error}, while {recipe.code} was made{_missing(error)}"
            raise LoadFailed(message, final=misfits or _is_final(error)) from error

    async def _in_thread(self, job: Callable[[], Any]) -> Any:
        def run() -> Any:
            CURRENT.set(self._no_call)
            return job()

        return await self._threads.result_of(run)


def _misfits(body: Any, args: Any, kwargs: Any) -> bool:
    """Whether a class cannot be called with these arguments."""
    try:
        inspect.signature(body).bind(*args, **kwargs)
    except TypeError:
        return True
    except ValueError:  # the class has no known signature
        pass
    return False
