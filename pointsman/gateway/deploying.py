"""`app.deploy()`: an application on a plane of this machine, and a handle to it.

Enters: an application. Leaves: a handle, once its replicas are ready. Where a plane runs already in the state directory
that is named, it takes the application; else one is started inside this process, and ends with it.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pointsman.config.revision import ManifestText
from pointsman.config.schema import GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.embedded import Embedded
from pointsman.gateway.pipelines.results import ARGUMENTS
from pointsman.parameters import host_and_port
from pointsman.pipeline.application import Application
from pointsman.pipeline.graph import NodeKind
from pointsman.replica.handles import Response, Stream, Transport
from pointsman.wire import BLOB, CallFailed, Unsendable, decode_value, encode_plain

# A handle to an application that runs: called from a program outside, over the socket of its plane.


class ApplicationHandle:
    """An application: `handle.remote(1, 2).result()`, `await handle.remote(1, 2)`, `for piece in handle.stream(1)`.

    Arguments are plain data: None, bool, numbers, text, bytes, lists, mappings, arrays. Results are whatever the last
    node returned.
    """

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, transport: Transport, url: str, close: Callable[[], None]
    ) -> None:
        self.name = name
        self.url = f"{url}/{name}"
        """Where clients over HTTP send their requests."""
        self._loop = loop
        self._transport = transport
        self.close = close
        """Stop the plane that was started for it in this process, with everything that runs there."""

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """Call it; the answer is under way."""
        return Response(self._answer(_encoded(args, kwargs)), self._loop)

    __call__ = remote

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Its answer piece by piece."""
        return Stream(self._pieces(_encoded(args, kwargs)), self._loop)

    async def _answer(self, body: bytes) -> Any:
        headers = {"content-type": ARGUMENTS.decode(), "accept": BLOB}
        async with self._transport.post(f"/{self.name}", body, headers) as answer:
            said = await answer.read()
        if answer.status != 200:
            raise CallFailed.from_answer(answer.status, said)
        return decode_value(said)

    async def _pieces(self, body: bytes) -> AsyncIterator[Any]:
        headers = {"content-type": ARGUMENTS.decode(), "accept": f"{BLOB}; pieces"}
        async with self._transport.post(f"/{self.name}", body, headers) as answer:
            if answer.status != 200:
                raise CallFailed.from_answer(answer.status, await answer.read())
            held = b""
            async for data in answer.pieces():
                held += data
                while len(held) >= 4 and len(held) >= (end := 4 + int.from_bytes(held[:4], "little")):
                    yield decode_value(held[4:end])
                    held = held[end:]

    def __repr__(self) -> str:
        return f"<application {self.name} at {self.url}>"


def _encoded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Arguments as the gateway reads them. Raises `Unsendable`."""
    try:
        return encode_plain({"args": list(args), "kwargs": kwargs})
    except Unsendable as error:
        raise Unsendable(f"{error}; hand plain data to an application") from None


T = TypeVar("T")
LOOK_S = 0.02
HOPELESS = 3
"""A replica that has failed to start so often will not."""


def deploy(
    application: Application,
    runtime: str = "local",
    *,
    manifest: Path | str | None = None,
    wait_s: float = 120.0,
) -> ApplicationHandle:
    """Run an application, and wait until its replicas are ready. `manifest`: models that it uses are in this file."""
    plane = background_plane("" if manifest is None else str(Path(manifest).absolute()), runtime)
    text = ManifestText(application.to_yaml(), str(application.folder.absolute()), f"<{application.name}>")
    plane.run(plane.embedded.plane.documents.deploy(text))
    plane.wait_until_ready(application, wait_s)
    transport = plane.embedded.plane.runtime.admin.dial()
    return ApplicationHandle(application.name, plane.loop, transport, plane.embedded.url, close_background_planes)


_PLANES: dict[tuple[str, str], "BackgroundPlane"] = {}
"""Of this process, by manifest and runtime: programs deploy one application after the other into the same one."""


def background_plane(manifest: str, runtime: str = "local") -> "BackgroundPlane":
    """The plane of this process with this manifest: started the first time that somebody wants it."""
    if (manifest, runtime) not in _PLANES:
        _PLANES[manifest, runtime] = BackgroundPlane(manifest, runtime)
    return _PLANES[manifest, runtime]


def close_background_planes() -> None:
    """Stop the planes of this process. The next `deploy` starts another."""
    while _PLANES:
        _PLANES.popitem()[1].stop()


class BackgroundPlane:
    """A plane and its gateway on a thread of their own. They end with the process, and leave nothing behind."""

    embedded: Embedded

    def __init__(self, manifest: str, runtime: str) -> None:
        import uvloop

        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pointsman", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
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

    async def _start(self, manifest: ManifestText, runtime: str) -> None:
        self.embedded = Embedded(None, runtime)
        await self.embedded.start(manifest)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have something done on its thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def wait_until_ready(self, application: Application, seconds: float) -> None:
        """Until every node of an application has as many replicas as it should, and so have the models it uses."""
        until = time.monotonic() + seconds
        while True:
            waiting = self.run(self._waiting_for(application))
            if not waiting:
                return
            if time.monotonic() > until or any(stopped for _, stopped in waiting):
                told = "; ".join(words for words, _ in waiting)
                raise PointsmanError(f'application "{application.name}" is not ready: {told}')
            time.sleep(LOOK_S)

    async def _waiting_for(self, application: Application) -> list[tuple[str, bool]]:
        """(what is not ready, whether there is no hope) of an application."""
        models = {node.code for node in application.graph.nodes if node.kind is NodeKind.MODEL}
        found = []
        for told in self.embedded.plane.status()["deployments"]:
            if told["name"].startswith(f"{application.name}.") or models & {told["model"], *told["aliases"]}:
                instances = told["instances"]
                others = [one for one in instances if one["phase"] != "ready"]
                if others or len(instances) != told["desired"]:
                    words = f"{told['name']} has {told['ready']} of {told['desired']} replicas"
                    reasons = [one["reason"] for one in others if one["reason"]]
                    hopeless = any(one["restarts"] >= HOPELESS for one in others)
                    found.append((f"{words} ({reasons[0]})" if reasons else words, hopeless))
        return found

    def stop(self) -> None:
        """End everything."""
        atexit.unregister(self.stop)
        if self._thread.is_alive():
            if hasattr(self, "embedded"):
                self.embedded.ask_to_stop()
                self.embedded.ask_to_stop()  # nobody waits for answers any more
                self.run(self.embedded.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


def _empty_manifest() -> str:
    """Nothing but a gateway, at any free port of the usual address."""
    host, _ = host_and_port(GatewaySpec().listen)
    return f"kind: Pointsman\ngateway: {{listen: '{host}:0'}}\n"
