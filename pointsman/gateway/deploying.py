"""`app.deploy()`: an application on a plane of this machine, and a handle to it.

Enters: an application. Leaves: a handle, once its replicas are ready. Where a plane runs already in the state directory
that is named, it takes the application; else one is started inside this process, and ends with it.
"""

import asyncio
import atexit
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pointsman.errors import PointsmanError, UnknownName
from pointsman.gateway.application_handle import ApplicationHandle
from pointsman.gateway.embedded import Embedded
from pointsman.pipeline.application import Application
from pointsman.pipeline.graph import NodeKind
from pointsman.runtimes.local import ManifestText
from pointsman.runtimes.local.shared import SOCKET

T = TypeVar("T")
EMPTY = "kind: Pointsman\ngateway: {listen: '127.0.0.1:0'}\n"
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
    if runtime != "local":
        raise UnknownName("runtime", runtime, ["local"])
    plane = background_plane("" if manifest is None else str(Path(manifest).absolute()))
    text = ManifestText(application.to_yaml(), str(application.folder.absolute()), f"<{application.name}>")
    plane.run(plane.embedded.deploy(text))
    plane.wait_until_ready(application, wait_s)
    return ApplicationHandle(application.name, plane.loop, plane.socket, plane.embedded.url, close_background_planes)


_PLANES: dict[str, "BackgroundPlane"] = {}
"""Of this process, by the manifest that they run: programs deploy one application after the other into the same one."""


def background_plane(manifest: str) -> "BackgroundPlane":
    """The plane of this process with this manifest: started the first time that somebody wants it."""
    if manifest not in _PLANES:
        _PLANES[manifest] = BackgroundPlane(manifest)
    return _PLANES[manifest]


def close_background_planes() -> None:
    """Stop the planes of this process. The next `deploy` starts another."""
    while _PLANES:
        _PLANES.popitem()[1].stop()


class BackgroundPlane:
    """A plane and its gateway on a thread of their own. They end with the process, and leave nothing behind."""

    embedded: Embedded

    def __init__(self, manifest: str) -> None:
        import uvloop

        self._folder = Path(tempfile.mkdtemp(prefix="pointsman-"))
        self.socket = self._folder / SOCKET
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pointsman", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        text = Path(manifest).read_text(encoding="utf-8") if manifest else EMPTY
        folder = str(Path(manifest).parent if manifest else Path.cwd())
        try:
            self.run(self._start(ManifestText(text, folder, manifest)))
        except BaseException:
            self.stop()
            raise

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _start(self, manifest: ManifestText) -> None:
        self.embedded = Embedded(self._folder)
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
        shutil.rmtree(self._folder, ignore_errors=True)
