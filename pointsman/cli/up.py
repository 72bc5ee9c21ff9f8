"""`pointsman up`: runs a manifest in the foreground, and shows its progress."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.manifest import read_manifest
from pointsman.cli.options import SOCKET, add_command, add_state, drop_output_if_unwritable, state_folder
from pointsman.errors import PointsmanError

if TYPE_CHECKING:
    from pointsman.cli.display import Condition
    from pointsman.config import PointsmanPlan
    from pointsman.config.machines import RuntimeSpec
    from pointsman.config.revision import ManifestText
    from pointsman.gateway.embedded import Embedded
    from pointsman.reasons import Reason
    from pointsman.runtimes.choosing import RuntimeChoice

EXAMPLE = """\
example:
  pointsman up examples/smollm2.yaml
  curl http://127.0.0.1:8080/v1/completions -H 'content-type: application/json' \
       -d '{"model": "smollm2", "prompt": "Once upon a time"}'
"""
RUNTIMES = ("local", "ray")
SCHEMA_S = 5.0
"""Maximum time to wait for the schema of an application's input."""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "up",
        summary="run a manifest here, with a gateway in front",
        description="Start the instances of a manifest, and serve requests until Ctrl-C or SIGTERM. Without FILE, run "
        "what last ran in the state directory. Instances that an earlier plane left running are adopted. The exit code "
        "is 1 if nothing can start, or if an address of the gateway is in use.",
        example=EXAMPLE,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a manifest, or an application: YAML")
    add_state(parser)
    parser.add_argument("--runtime", choices=RUNTIMES, help="local (default): this machine; ray: a cluster")
    parser.add_argument(
        "--address", default="", metavar="HOST:PORT", help="address of the Ray cluster; default: start one here"
    )
    parser.add_argument(
        "--host", default="", metavar="HOST", help="address of this machine in the cluster; default: Ray's choice"
    )
    parser.add_argument(
        "--storage", default="", metavar="FOLDER", help="folder for the state, which all Ray nodes must reach"
    )
    parser.add_argument("--namespace", default="", metavar="NAME", help="namespace of this plane in the cluster")
    parser.add_argument("--json", action="store_true", help="print each change of the status as one line of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from pointsman.config.machines import RuntimeSpec
    from pointsman.config.revision import ManifestText

    manifest, wanted = None, RuntimeSpec()
    if args.file is not None:
        written, plan = read_manifest(Path(args.file))
        manifest = ManifestText(**written)
        _warn(plan)
        wanted = plan.runtime
    code = uvloop.run(_up(manifest, args, runtime_choice(args, wanted)))
    drop_output_if_unwritable()  # lost output is not an error here: everything has stopped in order
    return code


def runtime_choice(args: argparse.Namespace, wanted: "RuntimeSpec") -> "RuntimeChoice":
    """The runtime that the command line names. If it names none, the runtime that the manifest names."""
    from pointsman.runtimes.choosing import RuntimeChoice

    name = args.runtime or wanted.type
    if name != "ray" and (args.address or args.storage or args.host or args.namespace):
        raise PointsmanError("--address, --host, --namespace and --storage are for a Ray cluster; add: --runtime ray")
    if args.host and not (args.address or wanted.address):
        raise PointsmanError("--host is the address of this machine in an existing cluster; add: --address HOST:PORT")
    return RuntimeChoice(
        name,
        args.address or wanted.address,
        args.storage or wanted.storage,
        args.host,
        args.namespace or wanted.namespace,
        wanted.lease,
        wanted.orphan_grace,
    )


async def _up(manifest: "ManifestText | None", args: argparse.Namespace, runtime: "RuntimeChoice") -> int:
    import asyncio
    import signal

    from pointsman.gateway.embedded import Embedded

    began = time.monotonic()
    state = state_folder(args.state)
    embedded = Embedded(state, runtime)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, embedded.ask_to_stop)
    view = JsonView(embedded) if args.json else ProgressView(embedded, began, state)
    await embedded.start(manifest)
    if manifest is None:
        _warn(embedded.plane.documents.plan_in_force)
    futility = Futility(embedded)
    embedded.plane.listeners += [view.changed, futility.look]
    view.changed()
    futility.look()
    await embedded.until_stopped()
    view.stopping()
    cut_off = await embedded.stop()
    view.stopped(cut_off)
    if futility.reasons:
        raise PointsmanError("\n".join(["nothing can start:", *(f"  {why}" for why in futility.reasons)]))
    return 0


class Futility:
    """Stops a plane if nothing on it can start."""

    def __init__(self, embedded: "Embedded") -> None:
        self._embedded = embedded
        self.reasons: list[Reason] = []

    def look(self) -> None:
        if not self.reasons:
            self.reasons = self._embedded.plane.beginning.futile()
            if self.reasons:
                self._embedded.ask_to_stop()


def _warn(plan: "PointsmanPlan") -> None:
    for warning in plan.warnings:
        print(warning, file=sys.stderr)


class ProgressView:
    """Output for people: a line for each change, and the whole status once everything is ready."""

    def __init__(self, embedded: "Embedded", began: float, state: Path) -> None:
        self._embedded = embedded
        self._state = state
        self._began = began
        self._shown: dict[str, Condition] = {}
        self._was_ready = False

    def changed(self) -> None:
        from pointsman.cli.display import Paint, deployments_of, status_text

        status = self._embedded.status()
        deployments = deployments_of(status)
        for deployment in deployments:
            condition = deployment.condition
            if self._shown.get(deployment.name) != condition:
                self._print(f"{deployment.name}: {deployment.in_words()}")
                self._shown[deployment.name] = condition
        decided = deployments and all(deployment.settled or deployment.stopped for deployment in deployments)
        if not self._was_ready and decided and any(deployment.ready for deployment in deployments):
            self._was_ready = True
            text = status_text(status, Paint(sys.stdout))
            ready = "ready" if all(deployment.settled for deployment in deployments) else "partly ready"
            self._write(f"\n{ready} in {time.monotonic() - self._began:.1f} s\n\n{text}")
            self._embedded.gateway.tasks.complete("suggestions", lambda: self._suggest(status))

    async def _suggest(self, status: dict[str, Any]) -> None:
        """Print commands to try the plane. This may have to request the first application's input schema."""
        from pointsman.cli.suggestions import suggestions

        inputs = {one["name"]: await self._input_of(one["path"]) for one in status["applications"][:1]}
        text = suggestions(status, inputs, needs_key=bool(self._embedded.gateway.settings.keys))
        if text:
            self._write(f"\n{text}")

    async def _input_of(self, path: str) -> dict[str, Any]:
        """The JSON schema of an application's input. Empty if the schema is unknown."""
        from pointsman.http.client import NoResponse, fetch
        from pointsman.http.pool import UnixSocket

        try:
            target = UnixSocket(self._state / SOCKET)
            status, body = await fetch(target, "GET", f"{path}/openapi.json", timeout_s=SCHEMA_S)
        except NoResponse:
            return {}
        request = json.loads(body)["paths"][path]["post"]["requestBody"] if status == 200 else {"content": {}}
        schema: dict[str, Any] = request["content"].get("application/json", {}).get("schema", {})
        return schema

    def stopping(self) -> None:
        in_flight = self._embedded.in_flight
        self._print(f"stopping: {in_flight} requests in flight; Ctrl-C again to cut them off")

    def stopped(self, cut_off: int) -> None:
        self._print(f"stopped; {cut_off} requests were cut off" if cut_off else "stopped")

    def _print(self, text: str) -> None:
        self._write(f"{time.strftime('%H:%M:%S')} {text}")

    def _write(self, text: str) -> None:
        """Write a line if possible. If the terminal is gone or the disk is full, the plane keeps running."""
        self._embedded.gateway.tasks.attempt("output", lambda: print(text, flush=True))


class JsonView(ProgressView):
    """Output for programs: each status as a line of JSON."""

    def __init__(self, embedded: "Embedded") -> None:
        super().__init__(embedded, 0.0, Path())

    def changed(self) -> None:
        self._tell({"event": "status", **self._embedded.status()})

    def stopping(self) -> None:
        self._tell({"event": "stopping", "in_flight": self._embedded.in_flight})

    def stopped(self, cut_off: int) -> None:
        self._tell({"event": "stopped", "cut_off": cut_off})

    def _tell(self, event: dict[str, Any]) -> None:
        self._write(json.dumps(event, ensure_ascii=False))
