"""`app.deploy()`: runs an application on a plane inside this process, and returns a handle to it.

Enters: an application. Leaves: a handle, once the application's replicas are ready. The first `deploy` starts the
plane, and the plane ends with this process.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pointsman.config.revision import ManifestText
from pointsman.config.schema import GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.embedded import Embedded
from pointsman.parameters import host_and_port
from pointsman.pipeline.application import Application
from pointsman.pipeline.graph import NodeKind
from pointsman.replica.handles import Response, Stream, Transport
from pointsman.runtimes.choosing import RuntimeChoice
from pointsman.wire import ARGUMENTS, BLOB, PieceReader, Unsendable, decode_value, encode_plain, raised_by

T = TypeVar("T")
POLL_S = 0.02
MAX_RESTARTS = 3
"""After this many failed starts of a replica, `deploy` fails."""


class ApplicationHandle:
    """An application: `handle.remote(1, 2).result()`, `await handle.remote(1, 2)`, `for piece in handle.stream(1)`.

    Arguments are plain data: None, bool, numbers, text, bytes, lists, mappings, arrays. The result is the value that
    the last node returned.
    """

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, transport: Transport, url: str, close: Callable[[], None]
    ) -> None:
        self.name = name
        self.url = f"{url}/{name}"
        """The URL to which HTTP clients send requests."""
        self._loop = loop
        self._transport = transport
        self.close = close
        """Stop the plane that `deploy` started in this process, with everything that it runs."""

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """Call the application. The call starts at once."""
        return Response.to(self._answer(_encoded(args, kwargs)), self._loop)

    __call__ = remote

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Call the application, and receive its answer piece by piece."""
        return Stream(self._pieces(_encoded(args, kwargs)), self._loop)

    async def _answer(self, body: bytes) -> Any:
        headers = {"content-type": ARGUMENTS, "accept": BLOB}
        async with self._transport.post(f"/{self.name}", body, headers) as answer:
            result = await answer.read()
        if answer.status != 200:
            raise raised_by(answer.status, result)
        return decode_value(result)

    async def _pieces(self, body: bytes) -> AsyncIterator[Any]:
        headers = {"content-type": ARGUMENTS, "accept": f"{BLOB}; pieces"}
        async with self._transport.post(f"/{self.name}", body, headers) as answer:
            if answer.status != 200:
                raise raised_by(answer.status, await answer.read())
            reader = PieceReader()
            async for data in answer.pieces():
                for piece in reader.feed(data):
                    yield decode_value(piece)

    def __repr__(self) -> str:
        return f"<application {self.name} at {self.url}>"


def _encoded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The arguments, encoded as the gateway reads them. Raises `Unsendable`."""
    try:
        return encode_plain({"args": list(args), "kwargs": kwargs})
    except Unsendable as error:
        raise Unsendable(f"{error}; pass plain data to an application") from None


def deploy(
    application: Application,
    runtime: str = "local",
    *,
    manifest: Path | str | None = None,
    wait_s: float = 120.0,
    address: str = "",
    storage: str = "",
) -> ApplicationHandle:
    """Run an application, and wait until its replicas are ready. `manifest` is a file with the models that the
    application uses. `address` and `storage` belong to a Ray cluster; the default is the cluster that this program
    uses, or else a new one."""
    choice = RuntimeChoice(runtime, address, storage)
    plane = background_plane("" if manifest is None else str(Path(manifest).absolute()), choice)
    text = ManifestText(application.to_yaml(), str(application.folder.absolute()), f"<{application.name}>")
    plane.run(plane.embedded.plane.documents.deploy(text))
    plane.wait_until_ready(application, wait_s)
    transport = plane.embedded.plane.runtime.admin.dial()
    return ApplicationHandle(application.name, plane.loop, transport, plane.embedded.url, close_background_planes)


_PLANES: dict[tuple[str, RuntimeChoice], "BackgroundPlane"] = {}
"""The planes of this process, by manifest and runtime. Applications with the same manifest share a plane."""


def background_plane(manifest: str, runtime: RuntimeChoice) -> "BackgroundPlane":
    """The plane of this process with this manifest. The first call starts it."""
    if (manifest, runtime) not in _PLANES:
        _PLANES[manifest, runtime] = BackgroundPlane(manifest, runtime)
    return _PLANES[manifest, runtime]


def close_background_planes() -> None:
    """Stop the planes of this process. The next `deploy` starts a new plane."""
    while _PLANES:
        _PLANES.popitem()[1].stop()


class BackgroundPlane:
    """A plane and its gateway on a thread of their own. They end with this process, and leave no files."""

    embedded: Embedded

    def __init__(self, manifest: str, runtime: RuntimeChoice) -> None:
        import uvloop

        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pointsman", daemon=True)
        self._thread.start()
        # This runs before atexit: a plane on Ray needs threads to end, and at exit no thread can be started.
        threading._register_atexit(self.stop)  # type: ignore[attr-defined]
        text = Path(manifest).read_text(encoding="utf-8") if manifest else _empty_manifest()
        folder = str(Path(manifest).parent if manifest else Path.cwd())
        try:
            self.run(self._start(ManifestText(text, folder, manifest), runtime))
        except BaseException:
            self.stop()
            raise

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _start(self, manifest: ManifestText, runtime: RuntimeChoice) -> None:
        self.embedded = Embedded(None, runtime)
        await self.embedded.start(manifest)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def wait_until_ready(self, application: Application, seconds: float) -> None:
        """Wait until the nodes of an application, and the models that it uses, have all their replicas."""
        until = time.monotonic() + seconds
        while True:
            missing = self.run(self._missing(application))
            if not missing:
                return
            if time.monotonic() > until or any(has_failed for _, has_failed in missing):
                details = "; ".join(text for text, _ in missing)
                raise PointsmanError(f'application "{application.name}" is not ready: {details}')
            time.sleep(POLL_S)

    async def _missing(self, application: Application) -> list[tuple[str, bool]]:
        """The parts of an application that are not ready, each as (name, whether it failed too often)."""
        models = {node.code for node in application.graph.nodes if node.kind is NodeKind.MODEL}
        found = []
        for one in self.embedded.plane.status()["deployments"]:
            if one["name"].startswith(f"{application.name}.") or models & {one["model"], *one["aliases"]}:
                instances = one["instances"]
                unready = [instance for instance in instances if instance["phase"] != "ready"]
                if unready or len(instances) != one["desired"]:
                    text = f"{one['name']} has {one['ready']} of {one['desired']} replicas"
                    reasons = [instance["reason"] for instance in unready if instance["reason"]]
                    has_failed = any(instance["restarts"] >= MAX_RESTARTS for instance in unready)
                    found.append((f"{text} ({reasons[0]})" if reasons else text, has_failed))
        return found

    def stop(self) -> None:
        if self._thread.is_alive():
            if hasattr(self, "embedded"):
                self.embedded.ask_to_stop()
                self.embedded.ask_to_stop()  # stop at once: the program that waits for answers is ending
                self.run(self.embedded.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


def _empty_manifest() -> str:
    """A manifest with only a gateway, at a free port of the default address."""
    host, _ = host_and_port(GatewaySpec().listen)
    return f"kind: Pointsman\ngateway: {{listen: '{host}:0'}}\n"
