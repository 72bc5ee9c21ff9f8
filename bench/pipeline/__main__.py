"""`python -m bench.pipeline`: starts each server in turn, measures it, stops it, and prints the tables."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench.pipeline.inprocess import copying, in_process
from bench.pipeline.load import PATIENCE_S, Loaded
from bench.pipeline.report import CLIENTS, OURS, tables
from bench.pipeline.request_client import CHAIN, DIAMOND, Asker
from bench.pipeline.results import Diamond, Handing, Results, Round
from bench.pipeline.servers import servers
from bench.pipeline.serving import Server, Serving

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(sys.prefix)
IN_PROCESS = "in one process"


class Pace(msgspec.Struct, frozen=True):
    """Durations of measurements."""

    rounds: int
    seconds: float
    warm_s: float
    arrays: int
    budget_s: float
    """A round that would end after this does not begin."""


FULL = Pace(rounds=3, seconds=5.0, warm_s=2.0, arrays=30, budget_s=600.0)
QUICK = Pace(rounds=1, seconds=2.0, warm_s=1.5, arrays=10, budget_s=300.0)


class Run:
    """All rounds over the servers that can be started."""

    def __init__(
        self,
        taking_part: list[Server],
        results: Results,
        pace: Pace,
        folder: Path,
        apps: Sequence[str] = (DIAMOND, CHAIN),
    ) -> None:
        self._servers, self._results, self._pace, self._folder = taking_part, results, pace, folder
        self._apps = apps

    def all(self) -> None:
        begun = time.monotonic()
        for number in range(1, self._pace.rounds + 1):
            start = time.monotonic()
            self._results.rounds.append(self._round(number))
            now = time.monotonic()
            if now - begun + (now - start) > self._pace.budget_s and number < self._pace.rounds:
                progress(f"{number} rounds must do: a further one would take too long")
                return

    def _round(self, number: int) -> Round:
        found = Round(copying())
        # Every other round in reverse order, so that a machine that slows down favours no system.
        for server in self._servers if number % 2 else reversed(self._servers):
            for app in self._apps:
                progress(f"round {number} of {self._pace.rounds}: {app} on {server.name}")
                folder = (
                    self._folder / f"{number}{app[0]}{len(list(self._folder.iterdir()))}"
                )  # sockets need short paths
                try:
                    with server.serving(app, folder) as serving:
                        (self._diamond if app == DIAMOND else self._chain)(server.name, serving, found)
                except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                    progress(f"{server.name}, {app}: {error}")
                    self._results.missing[f"{server.name}, {app}"] = str(error)
        return found

    def _diamond(self, name: str, serving: Serving, found: Round) -> None:
        found.idle_share[name] = serving.calm_down()
        for clients in CLIENTS:
            before = serving.cpu_s()
            loaded = self._load(serving, clients)
            cpu_ms = (serving.cpu_s() - before) * 1e3 / max(1, loaded.asked)
            found.diamonds.setdefault(name, {})[clients] = Diamond(loaded, cpu_ms)
        found.resident_mb[name] = serving.resident_mb()

    def _load(self, serving: Serving, clients: int) -> Loaded:
        figures = [serving.port, serving.path, clients, self._pace.warm_s, self._pace.seconds]
        command = [sys.executable, "-m", "bench.pipeline.load", *map(str, figures)]
        patience = self._pace.warm_s + self._pace.seconds + 2 * PATIENCE_S + 10
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience)
        if done.returncode:
            raise RuntimeError(f"{clients} clients: {done.stderr.strip().rpartition(chr(10))[2]}")
        return msgspec.json.decode(done.stdout, type=Loaded)

    def _chain(self, name: str, serving: Serving, found: Round) -> None:
        serving.calm_down()
        with Asker(serving.port, serving.path) as asker:
            ways = [asker.hand_over(1.0 + number) for number in range(5 + self._pace.arrays)][5:]
        handed, read = ([way[part] * 1e3 for way in ways] for part in (0, 1))
        found.handings[name] = Handing(median(handed), median(read))


def that_can_run(given: Iterable[Server], results: Results) -> list[Server]:
    """The servers that can be started here; results say why the others cannot."""
    taking_part = []
    for server in given:
        missing = server.missing()
        if missing:
            progress(f"{server.name}: {missing}")
            results.missing[server.name] = missing
        else:
            results.versions[server.name] = server.version()
            taking_part.append(server)
    return taking_part


def measure(options: argparse.Namespace, pace: Pace, folder: Path) -> Results:
    results = Results(versions={})
    wanted = [one for one in servers(options.peers.absolute()) if not options.only or one.name in options.only]
    taking_part = that_can_run(wanted, results)
    if not options.only or OURS in options.only:
        try:
            results.in_process = in_process()
        except RuntimeError as error:
            results.missing[IN_PROCESS] = str(error)
    Run(taking_part, results, pace, folder).all()
    return results


def progress(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, with more noise")
    parser.add_argument("--rounds", type=int, help="how often each server has its turn")
    known = [server.name for server in servers(ENVIRONMENT)]
    parser.add_argument("--only", nargs="+", metavar="SERVER", choices=known, help=f"of {'; '.join(known)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure of every round")
    parser.add_argument("--peers", type=Path, default=ENVIRONMENT, metavar="VENV", help="where Ray is installed")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pace = QUICK if options.quick else FULL
    if options.rounds:
        pace = msgspec.structs.replace(pace, rounds=options.rounds)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bp-", ignore_cleanup_errors=True) as folder:
        try:
            results = measure(options, pace, Path(folder))
        except KeyboardInterrupt:
            return 130
    print(f"\n{tables(results)}")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    progress(f"done in {time.monotonic() - begun:.0f} s on {len(os.sched_getaffinity(0))} cores")
    ours_missing = any(name.startswith((OURS, IN_PROCESS)) for name in results.missing)
    return 1 if results.complaints() or ours_missing else 0


if __name__ == "__main__":
    sys.exit(main())
