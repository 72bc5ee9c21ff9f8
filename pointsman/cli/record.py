"""`pointsman record FILE`: write live traffic as a recording, without its texts."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from pointsman.cli.options import add_command, add_connection, time_span
from pointsman.errors import PointsmanError, system_reason

EXAMPLE = """\
examples:
  pointsman record traffic.jsonl --for 10m
  pointsman record chat.jsonl --model llama-8b
"""
POLL_S = 1.0


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "record",
        summary="write live traffic as a recording: lengths and hashes, never text",
        description="Write the requests of a running plane as Mooncake JSON lines: when each arrived, its lengths in "
        "tokens, hashes of its blocks of 512 tokens, and session, tenant, priority, deadline and model. Texts are not "
        "written; hashes and names are salted with a secret that is never stored. It ends after --for, or with Ctrl-C.",
        example=EXAMPLE,
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--for", dest="for_s", type=time_span, metavar="TIME", help="default: until Ctrl-C")
    parser.add_argument("--model", metavar="MODEL", help="record only requests for this model")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import NoPlane, PlaneRefused, client_of

    client, began = client_of(args), time.monotonic()
    told = client.post("recording", body={"model": args.model or ""})
    run_id, counts, ended = told["id"], {"left_out": 0, "dropped": 0, "unfinished": 0}, ""
    try:
        with args.file.open("w", encoding="utf-8") as out:
            written = _write(out, told, counts)
            while args.for_s is None or time.monotonic() - began < args.for_s:
                try:
                    left_s = POLL_S if args.for_s is None else began + args.for_s - time.monotonic()
                    time.sleep(max(min(POLL_S, left_s), 0.0))
                    written += _write(out, client.post("recording", body={"id": run_id}), counts)
                except KeyboardInterrupt:
                    break
                except (NoPlane, PlaneRefused) as error:
                    ended = f"; the plane was stopped or started again, which ended it: {error}"
                    break
                if sys.stderr.isatty() and not args.json:
                    print(f"\r\x1b[K{written} requests", end="", file=sys.stderr, flush=True)
            if not ended:
                written += _write(out, client.post("recording", body={"id": run_id, "stop": True}), counts)
        _sort(args.file)
    except OSError as error:
        raise PointsmanError(f"cannot write {args.file}: {system_reason(error)}") from error
    if args.json:
        print(json.dumps({"file": str(args.file), "requests": written, **counts}))
    else:
        left = f"left out: {counts['left_out']} that failed or have unknown lengths, {counts['unfinished']} unfinished"
        lost = f", {counts['dropped']} not read in time" if counts["dropped"] else ""
        print(f"{args.file}: {written} requests; {left}{lost}{ended}")
    return 1 if ended else 0


def _write(out: Any, told: dict[str, Any], counts: dict[str, int]) -> int:
    for name in counts:
        counts[name] += told[name]
    for line in told["lines"]:
        out.write(json.dumps(line, separators=(",", ":")) + "\n")
    return len(told["lines"])


def _sort(file: Path) -> None:
    """Sort the requests by arrival. They were written in the order in which they ended."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: line["timestamp"])
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")
