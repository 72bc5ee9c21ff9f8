"""`pointsman up`: runs a manifest in the foreground, and shows its progress."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from pointsman.cli.manifest import read_manifest
from pointsman.cli.options import add_command, add_state, drop_output_if_unwritable, state_folder

if TYPE_CHECKING:
    from pointsman.config import PointsmanPlan
    from pointsman.config.revision import ManifestText
    from pointsman.gateway.embedded import Embedded

EXAMPLE = """\
example:
  pointsman up examples/smollm2.yaml
  curl http://127.0.0.1:8080/v1/completions -d '{"model": "smollm2", "prompt": "Once upon a time"}'
"""
PROMPT = "Say hello in five words."
MAX_TOKENS = 64
"""Small models do not stop by themselves."""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "up",
        summary="run a manifest here, with a gateway in front",
        description="Start the instances of a manifest, and serve requests until Ctrl-C or SIGTERM. Without FILE, run "
        "what last ran in the state directory. Instances that an earlier plane left running are adopted.",
        example=EXAMPLE,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a manifest, or an application: YAML")
    add_state(parser)
    parser.add_argument("--json", action="store_true", help="print each change of the status as one line of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    import uvloop

    from pointsman.config.revision import ManifestText

    manifest = None
    if args.file is not None:
        written, plan = read_manifest(Path(args.file))
        manifest = ManifestText(**written)
        _warn(plan)
    code = uvloop.run(_up(manifest, args))
    drop_output_if_unwritable()  # everything has stopped in order, whatever became of the output
    return code


async def _up(manifest: "ManifestText | None", args: argparse.Namespace) -> int:
    import asyncio
    import signal

    from pointsman.gateway.embedded import Embedded

    began = time.monotonic()
    embedded = Embedded(state_folder(args.state))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, embedded.ask_to_stop)
    view = JsonView(embedded) if args.json else ProgressView(embedded, began)
    await embedded.start(manifest)
    if manifest is None:
        _warn(embedded.plane.documents.plan_in_force)
    embedded.plane.listeners.append(view.changed)
    view.changed()
    await embedded.until_stopped()
    view.stopping()
    cut_off = await embedded.stop()
    view.stopped(cut_off)
    return 0


def _warn(plan: "PointsmanPlan") -> None:
    for warning in plan.warnings:
        print(warning, file=sys.stderr)


class ProgressView:
    """For people: a line for each change, and the whole status once everything is ready."""

    def __init__(self, embedded: "Embedded", began: float) -> None:
        self._embedded = embedded
        self._began = began
        self._shown: dict[str, str] = {}
        self._was_ready = False

    def changed(self) -> None:
        from pointsman.cli.display import Paint, deployments_of, status_text

        status = self._embedded.status()
        deployments = deployments_of(status)
        for deployment in deployments:
            gist = deployment.gist
            if self._shown.get(deployment.name) != gist:
                self._print(f"{deployment.name}: {deployment.in_words()}")
                self._shown[deployment.name] = gist
        if not self._was_ready and deployments and all(deployment.settled for deployment in deployments):
            self._was_ready = True
            text = status_text(status, Paint(sys.stdout))
            then = "then: pointsman explain REQUEST_ID   (its x-request-id)"
            self._write(f"\nready in {time.monotonic() - self._began:.1f} s\n\n{text}")
            self._write(f"\ntry it:\n\n{_curl(status)}\n\n{then}")

    def stopping(self) -> None:
        in_flight = self._embedded.gateway.in_flight
        self._print(f"stopping: {in_flight} requests in flight; Ctrl-C again to cut them off")

    def stopped(self, cut_off: int) -> None:
        self._print(f"stopped; {cut_off} requests were cut off" if cut_off else "stopped")

    def _print(self, text: str) -> None:
        self._write(f"{time.strftime('%H:%M:%S')} {text}")

    def _write(self, text: str) -> None:
        """A plane outlives its terminal, and a full disk that its output goes to."""
        self._embedded.gateway.tasks.attempt("output", lambda: print(text, flush=True))


class JsonView(ProgressView):
    """For programs: each status as a line of JSON."""

    def __init__(self, embedded: "Embedded") -> None:
        super().__init__(embedded, 0.0)

    def changed(self) -> None:
        self._tell({"event": "status", **self._embedded.status()})

    def stopping(self) -> None:
        self._tell({"event": "stopping", "in_flight": self._embedded.gateway.in_flight})

    def stopped(self, cut_off: int) -> None:
        self._tell({"event": "stopped", "cut_off": cut_off})

    def _tell(self, event: dict[str, Any]) -> None:
        self._write(json.dumps(event, ensure_ascii=False))


def _curl(status: dict[str, Any]) -> str:
    model = next((one["model"] for one in status["deployments"] if not one.get("internal")), "")
    path = next((one["path"] for one in status.get("applications") or ()), "")
    if path and not model:
        return f"curl -i {status['url']}{path} -d '[1, 2, 3]'   (its input, as JSON)"
    message = {"role": "user", "content": PROMPT}
    body = {"model": model, "stream": True, "max_tokens": MAX_TOKENS, "messages": [message]}
    return f"curl -iN {status['url']}/v1/chat/completions -d '{json.dumps(body)}'"
