"""`pointsman lab`: try routing policies on recorded traffic, in simulated time, before they go live."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.options import (
    WrongUsage,
    above_zero,
    add_command,
    at_least_one,
    at_least_zero,
    share,
    time_from_zero,
    time_span,
    write_file,
)

if TYPE_CHECKING:
    from pointsman.lab.traffic import Trial, TrialCache

CALIBRATE_EXAMPLE = """\
The engine must be idle: other work counts as its own time. Its constants are printed as JSON, in the form of
the constants of simulated engines.

examples:
  pointsman lab calibrate http://127.0.0.1:8000
  pointsman lab calibrate http://127.0.0.1:8000 --model llama-8b --max-prompt 2048 --max-batch 4 -o engine.json
"""

RUN_EXAMPLE = """\
examples:
  pointsman lab run requests.jsonl --fleet '16x70B|a100_sxm|vllm|tp8'
  pointsman lab run requests.jsonl --policy policy.yaml --fleet manifest.yaml --speed 2 --json
"""

CAPACITY_EXAMPLE = """\
examples:
  pointsman lab capacity requests.jsonl --policy pending-work --policy mymodule:MyPolicy
  pointsman lab capacity requests.jsonl --policy policy.yaml --first 2000 --seeds 3 --start 2
"""

COMPARE_EXAMPLE = """\
A policy is a YAML file (an EndpointPickerConfig, or a scheduling section), your own class (module:Class), a plugin,
or a name: round-robin, least-requests, least-tokens, published-default, prefix-and-tokens, tokens-times-requests,
pending-work, default, and those of manifests (fifo, power-of-two, ...). Parameters follow it: 'NAME={"target": 4}'.

examples:
  pointsman lab compare requests.jsonl --policy round-robin --policy pending-work --speed 1,2,3 --seeds 5
  pointsman lab compare requests.jsonl --policy a.yaml --policy mymodule:MyPolicy --first 1000 --html report.html
  pointsman lab compare requests.jsonl --policy fifo --policy default --faults faults.yaml
"""


def add(commands: Any) -> None:
    from pointsman.cli import lab_questions

    group = commands.add_parser("lab", help="try routing policies on recorded traffic")
    subjects = group.add_subparsers(title="what to do", metavar="WHAT", required=True)
    _add_run(subjects)
    _add_compare(subjects)
    _add_capacity(subjects)
    _add_calibrate(subjects)
    lab_questions.add_whatif(subjects)
    lab_questions.add_regret(subjects)


def _add_run(commands: Any) -> None:
    parser = add_command(
        commands,
        "run",
        summary="replay a recording with one policy",
        description="Replay recorded requests on simulated engines, through the dispatcher and the policy that would "
        "run live, and print the outcomes.",
        example=RUN_EXAMPLE,
    )
    _add_setting(parser)
    parser.add_argument(
        "--policy", metavar="POLICY", help="policy to replay (default: that of the manifest, or default)"
    )
    parser.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="speed-up of the recording")
    parser.add_argument(
        "--seed", type=at_least_zero, default=0, metavar="N", help="seed of arrivals and choices (default 0)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="what lab regret needs to replay it")
    parser.set_defaults(run=_run)


def _add_compare(commands: Any) -> None:
    parser = add_command(
        commands,
        "compare",
        summary="replay a recording with several policies",
        description="Replay recorded requests with each policy at each speed, with several seeds, on all cores. Print "
        "the means and, against the first policy, differences with 95 %% confidence intervals.",
        example=COMPARE_EXAMPLE,
    )
    _add_setting(parser)
    parser.add_argument("--policy", action="append", required=True, metavar="POLICY", help="repeat it for each policy")
    parser.add_argument("--speed", type=_speeds, default=[1.0], metavar="X,X", help="speed-ups (default 1)")
    parser.add_argument(
        "--seeds", type=at_least_one, default=1, metavar="N", help="seeds per policy and speed (default 1)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with tables and plots")
    parser.set_defaults(run=_compare)


def _add_capacity(commands: Any) -> None:
    parser = add_command(
        commands,
        "capacity",
        summary="the load at which a policy still meets objectives",
        description="Find the largest speed-up of a recording at which 90 %% of all requests meet their objectives. "
        "A rejected one is a miss. The 99th percentile of the time to the first token stands beside it: a policy "
        "can gain capacity by delaying hopeless requests.",
        example=CAPACITY_EXAMPLE,
    )
    _add_setting(parser)
    parser.add_argument("--policy", action="append", required=True, metavar="POLICY", help="repeat it for each policy")
    parser.add_argument("--seeds", type=at_least_one, default=1, metavar="N", help="seeds per speed (default 1)")
    parser.add_argument("--share", type=share, default=0.9, metavar="SHARE", help="share of all requests (default 0.9)")
    parser.add_argument("--start", type=above_zero, default=1.0, metavar="X", help="the first speed (default 1)")
    parser.add_argument(
        "--tolerance", type=share, default=0.02, metavar="SHARE", help="accuracy of the speed (default 0.02)"
    )
    parser.add_argument(
        "--longest-wait",
        type=time_span,
        default=60.0,
        metavar="TIME",
        help="longest wait of the second bound (default 60s)",
    )
    parser.set_defaults(run=_capacity)


def _add_setting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", metavar="FILE", help="Mooncake JSON lines, Azure CSV, or generate:NAME?rate=5")
    parser.add_argument("--first", type=at_least_one, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--fleet", default="16x70B|a100_sxm|vllm|tp8", metavar="FLEET",
        help="COUNTxHARDWARE, or a manifest (default 16x70B|a100_sxm|vllm|tp8)",
    )  # fmt: skip
    parser.add_argument("--of", default="", metavar="DEPLOYMENT", help="the one whose policy is tried")
    parser.add_argument("--clients", action="store_true", help="speed up by more clients, not by compressing time")
    parser.add_argument("--closed", action="store_true", help="turns of a session wait for the previous answer")
    parser.add_argument("--keep-ticks", action="store_true", help="do not spread requests within coarse timestamps")
    parser.add_argument(
        "--scrape", type=time_span, default=0.5, metavar="TIME", help="interval of metrics (default 0.5s)"
    )
    parser.add_argument("--faults", type=Path, metavar="FILE", help="faults during the replay, as YAML")
    parser.add_argument("--gpu-price", type=above_zero, default=2.0, metavar="PRICE", help="per GPU hour (default 2)")
    add_replays(parser)
    add_objectives(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_objectives(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ttft", type=time_span, default=5.0, metavar="TIME", help="objective (default 5s)")
    parser.add_argument("--tpot", type=time_span, default=0.1, metavar="TIME", help="objective, mean (default 100ms)")


def add_replays(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-up", type=time_from_zero, default=1.0, metavar="TIME", help="start-up time of an instance (default 1s)"
    )
    parser.add_argument("--processes", type=at_least_one, metavar="N", help="parallel replays (default: one per core)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep results here (default ~/.cache/pointsman/lab)")
    parser.add_argument("--no-cache", action="store_true", help="neither read nor keep results")


def _speeds(text: str) -> list[float]:
    return [above_zero(part) for part in text.split(",")]


def base_trial(args: argparse.Namespace, speed: float = 1.0) -> "Trial":
    from pointsman.lab.traffic import Objectives, ReplayLoad, ReplaySetting, Trial, faults_of, fleet_of

    load = ReplayLoad(speed=speed, clients=args.clients, spread=not args.keep_ticks, closed=args.closed)
    setting = ReplaySetting(
        fleet=fleet_of(args.fleet),
        load=load,
        deployment=args.of,
        scrape_interval_s=args.scrape,
        start_up_s=args.start_up,
        faults=None if args.faults is None else faults_of(args.faults),
    )
    return Trial(
        source=args.recording,
        first=args.first,
        policy=None,
        setting=setting,
        objectives=Objectives(args.ttft, args.tpot),
        gpu_price=args.gpu_price,
    )


def cache_of(args: argparse.Namespace) -> "TrialCache":
    from pointsman.lab.traffic import TrialCache, default_cache

    return TrialCache(None if args.no_cache else args.cache or default_cache())


BAR = 24
"""Number of characters in a progress bar."""


class TrialProgress:
    """A progress bar on standard error, if standard error is a terminal."""

    def __init__(self) -> None:
        self._visible = sys.stderr.isatty()
        self._since: tuple[float, float] | None = None
        """The time of the first call of `show`, and the number of replays that were finished then. These came from the
        cache and took no time, so the estimate of the remaining time leaves them out."""

    def show(self, done: float, total: int, label: str) -> None:
        if not self._visible:
            return
        now = time.monotonic()
        began, before = self._since = self._since or (now, done)
        left = f"{(now - began) / (done - before) * (total - done):.0f} s left" if done > before else ""
        bar = "#" * int(BAR * done / total)
        text = f"[{bar:<{BAR}}] {int(done)} of {total} replays, {label[:30]} {left}"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._visible:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _run(args: argparse.Namespace) -> int:
    import msgspec

    from pointsman.lab.traffic import TrafficComparison, policy_of, run_trials

    trial = msgspec.structs.replace(
        base_trial(args, args.speed), policy=None if args.policy is None else policy_of(args.policy), seed=args.seed
    )
    if args.save is not None:
        here = args.recording.startswith("generate:")
        kept = trial if here else msgspec.structs.replace(trial, source=str(Path(args.recording).absolute()))
        write_file(args.save, msgspec.json.encode(kept).decode())
    progress = TrialProgress()
    finished = run_trials([trial], cache_of(args), 1, progress.show)
    progress.clear()
    if args.json:
        print(json.dumps(msgspec.to_builtins(finished[0].figures) | {"cached": finished[0].cached}, indent=2))
    else:
        print(TrafficComparison(finished).as_text())
    return 0


def _compare(args: argparse.Namespace) -> int:
    from pointsman.lab.traffic import (
        TrafficComparison,
        bounds_of,
        distinct,
        grid,
        page,
        policy_of,
        recording_of,
        run_trials,
    )

    policies = distinct([policy_of(one) for one in args.policy])
    base = base_trial(args)
    trials = grid(base, policies, args.speed, args.seeds)
    progress = TrialProgress()
    finished = run_trials(trials, cache_of(args), args.processes, progress.show)
    progress.clear()
    compared = TrafficComparison(finished, bounds_of(base, args.speed))
    if args.html is not None:
        survey = recording_of(args.recording, args.first).survey()
        write_file(args.html, page(compared, survey, base.setting.fleet.text, base.objectives))
    print(json.dumps(compared.as_dict(), indent=2) if args.json else compared.as_text())
    return 0


def _capacity(args: argparse.Namespace) -> int:
    import msgspec

    from pointsman.lab.traffic import (
        bound_capacity,
        bounds_of,
        capacities,
        capacity_table,
        distinct,
        policy_of,
        recording_of,
    )

    base, progress = base_trial(args), TrialProgress()
    found = capacities(
        base,
        distinct([policy_of(one) for one in args.policy]),
        cache_of(args),
        seeds=args.seeds,
        share=args.share,
        start=args.start,
        tolerance=args.tolerance,
        processes=args.processes,
        progress=progress.show,
    )
    progress.clear()
    best = limited = None
    bounds = {} if args.clients else bounds_of(base, [1.0])
    if bounds:
        recording, setting = recording_of(args.recording, args.first), base.setting
        best, limited = (
            bound_capacity(recording, setting.load, setting.fleet, base.objectives, limit_s, args.share)
            for limit_s in (float("inf"), args.longest_wait)
        )
    if args.json:
        document = {"policies": msgspec.to_builtins(found), "bound": best, "bound_with_longest_wait": limited}
        print(json.dumps(document | {"serve_all": bounds[1.0].serve_all if bounds else None}, indent=2))
        return 0
    print(capacity_table(found, best))
    if bounds:
        print(f"bound: {best:.2f}x if late requests may wait without limit, {limited:.2f}x if none waits longer than "
              f"{args.longest_wait:g} s; {bounds[1.0].serve_all:.2f}x if all work is done as it comes")  # fmt: skip
    return 0


def _add_calibrate(commands: Any) -> None:
    parser = add_command(
        commands,
        "calibrate",
        summary="fit the engine model to a live engine",
        description="Send an engine prompts of several lengths, alone and together, and fit the constants of the "
        "engine model to the times of its tokens.",
        example=CALIBRATE_EXAMPLE,
    )
    parser.add_argument("url", metavar="URL", help="the engine, with an OpenAI-compatible API")
    parser.add_argument("--model", default="", help="the engine's name of the model (default: the first that it lists)")
    parser.add_argument("--max-prompt", type=at_least_one, default=6144, metavar="TOKENS", help="default 6144")
    parser.add_argument("--max-batch", type=at_least_one, default=16, metavar="N", help="answers at once (default 16)")
    parser.add_argument(
        "--repeat", type=at_least_one, default=5, metavar="N", help="repetitions of each measurement (default 5)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the constants to a file")
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    import asyncio
    from urllib.parse import urlsplit

    from pointsman.cli.lab_timings import timings_of
    from pointsman.control.desired import Address
    from pointsman.lab.calibrate import calibrate

    url = urlsplit(options.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise WrongUsage(f"{options.url!r} is not the URL of a server, such as http://127.0.0.1:8000")
    address = Address(url.hostname, url.port or (443 if url.scheme == "https" else 80), url.scheme == "https")
    found = calibrate(
        asyncio.run(timings_of(address, options.model, options.repeat, options.max_prompt, options.max_batch))
    )
    constants = {name: float(f"{value:.6g}") for name, value in found.hardware._asdict().items() if name != "kv_tokens"}
    text = json.dumps(constants, indent=1)
    if options.output:
        write_file(options.output, text + "\n")
    print(text)
    print(f"error {found.error:.1%}, at most {found.worst:.1%}", file=sys.stderr)
    return 0
