"""`python -m bench.gateway`: starts the peers, measures them in turn, prints the tables, stops everything."""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.gateway import traffic
from bench.gateway.cpu import busy_s, cpu_ns, resident_mb
from bench.gateway.measuring import DIRECT, Bench, Figures, Proxy, post
from bench.gateway.peers import Peer, Pointsman, PointsmanBefore, peers
from bench.gateway.processes import Process, free_port
from bench.gateway.report import tables
from bench.gateway.results import MeasuredProxy, Results
from bench.gateway.scenarios import ALL, Scenario
from bench.gateway.tools import Tools
from bench.gateway.warm_start import WEIGHTS, warm_start

ENDPOINTS = 8
START_S = 30.0
ENVIRONMENT = Path(__file__).parents[2] / ".venv-bench"


class Pace(msgspec.Struct, frozen=True):
    """Durations and repetitions of a run."""

    rounds: int
    seconds: float
    warm_s: float
    idle_s: float
    starts: int
    budget_s: float
    """No round starts that would end after this."""


FULL = Pace(rounds=5, seconds=2.0, warm_s=0.3, idle_s=5.0, starts=4, budget_s=480.0)
QUICK = Pace(rounds=3, seconds=0.4, warm_s=0.15, idle_s=2.0, starts=2, budget_s=95.0)


class Run:
    """One run over the proxies that could be started."""

    def __init__(self, bench: Bench, proxies: Sequence[Proxy], results: Results, pace: Pace) -> None:
        self._bench, self._proxies, self._results, self._pace = bench, proxies, results, pace

    def all(self, scenarios: Sequence[Scenario], core: int) -> None:
        """All rounds, and the share of the proxies' core that other processes used meanwhile."""
        begun, busy, ours = time.monotonic(), busy_s(core), self._spent_s()
        self._rounds(scenarios)
        other_s = busy_s(core) - busy - (self._spent_s() - ours)
        self._results.other_share = max(0.0, other_s / (time.monotonic() - begun))

    def _rounds(self, scenarios: Sequence[Scenario]) -> None:
        """Measure every scenario on all proxies in turn, in rounds, after a short warm-up that is discarded."""
        begun = time.monotonic()
        for scenario in scenarios:
            for proxy in self._proxies:
                self._measured(proxy, scenario, self._pace.warm_s, 0.0)
        for number in range(self._pace.rounds):
            start = time.monotonic()
            for scenario in scenarios:
                progress(f"round {number + 1} of {self._pace.rounds}: {scenario.name}")
                for proxy in self._proxies:
                    if proxy.process or scenario.direct:
                        figures = self._measured(proxy, scenario, self._pace.seconds, self._pace.warm_s)
                        self._results.add(scenario.name, proxy.name, figures)
            now = time.monotonic()
            if now - begun + (now - start) > self._pace.budget_s and number + 1 < self._pace.rounds:
                progress(f"stopping after {number + 1} rounds: another would exceed the time budget")
                return

    def memory(self) -> None:
        for proxy in self._proxies:
            if proxy.process:
                progress(f"memory: {proxy.name}")
                try:
                    self._results.memory[proxy.name] = self._bench.memory(proxy)
                except (RuntimeError, BrokenPipeError) as error:
                    progress(f"{proxy.name}, open streams: {error}")

    def after(self) -> None:
        """Memory after all rounds, and CPU time without requests."""
        progress("idle")
        running = [proxy for proxy in self._proxies if proxy.process]
        self._results.after_mb = {proxy.name: resident_mb(proxy.pids()) for proxy in running}
        self._results.idle_ms = dict(self._bench.idle(running, self._pace.idle_s))

    def _spent_s(self) -> float:
        return sum(cpu_ns(proxy.pids()) for proxy in self._proxies) / 1e9

    def _measured(self, proxy: Proxy, scenario: Scenario, seconds: float, warm_s: float) -> Figures:
        try:
            return self._bench.measure(proxy, scenario, seconds, warm_s)
        except (RuntimeError, BrokenPipeError) as error:
            progress(f"{proxy.name}, {scenario.name}: {error}")
            return Figures(0.0, 0, 0, 1.0, 1, str(error), 0.0, 0.0, 0.0, 0.0)


def start(peer: Peer, endpoints: Sequence[int], core: int, folder: Path, stack: ExitStack) -> Proxy:
    """Start a proxy and wait until it serves a request. Raises RuntimeError if it does not."""
    folder.mkdir()
    port = free_port()
    launch = peer.launch(port, endpoints, folder)
    log = folder / "output.log"
    process = stack.enter_context(Process(launch.argv, cores={core}, log=log, env=launch.env))
    deadline = time.monotonic() + START_S
    problem = "it does not listen"
    while process.running and time.monotonic() < deadline:
        try:
            if not peer.has_all_endpoints(log):
                raise OSError("it has not discovered all endpoints")
            post(port, traffic.small()[0])
            return Proxy(peer.name, peer.selection, peer.version(), port, process)
        except ConnectionRefusedError:
            pass
        except OSError as error:
            problem = str(error)
        time.sleep(0.1)
    if not process.running:
        problem = process.log_tail()
    process.stop()
    raise RuntimeError(f"it does not serve: {problem}")


def measure(options: argparse.Namespace, pace: Pace, cores: Sequence[int], folder: Path) -> Results:
    proxy_core, other_core = cores[0], cores[1]
    os.sched_setaffinity(0, {other_core})
    tools = Tools(folder, other_core, native=not options.python)
    results = Results(kind=tools.kind)
    with ExitStack() as stack:
        backend = stack.enter_context(tools.backend(ENDPOINTS))
        endpoints = [int(port) for port in backend.read_line().split()]
        bench = Bench(tools, endpoints, folder)
        proxies = [Proxy(DIRECT, "", "", endpoints[0])]
        for peer in peers(options.peers, options.before):
            if options.only and peer.name not in (*options.only, PointsmanBefore.name):
                continue
            problem = peer.unavailable()
            try:
                if not problem:
                    proxy = start(peer, endpoints, proxy_core, folder / peer.name, stack)
                    progress(f"{peer.name}: {bench.check(proxy)}")
                    proxies.append(proxy)
            except (RuntimeError, OSError, ValueError) as error:
                problem = str(error)
            if problem:
                progress(f"{peer.name}: {problem}")
                results.unavailable[peer.name] = problem
        results.proxies = [MeasuredProxy(proxy.name, proxy.selection, proxy.version) for proxy in proxies]
        run = Run(bench, proxies, results, pace)
        run.memory()
        chosen = [scenario for scenario in ALL if not options.scenarios or scenario.name in options.scenarios]
        run.all(chosen, proxy_core)
        run.after()
    os.sched_setaffinity(0, set(cores))
    if (
        Pointsman.name not in results.unavailable
        and (not options.only or Pointsman.name in options.only)
        and not options.before
    ):
        start_warm(results, pace.starts, folder)
    return results


def start_warm(results: Results, starts: int, folder: Path) -> None:
    """Measure warm starts. The first one fills the caches and is discarded."""
    if not WEIGHTS.exists():
        results.unavailable["warm start"] = f"no weights at {WEIGHTS}"
        return
    for number in range(starts):
        progress(f"warm start {number} of {starts - 1}")
        try:
            found = warm_start(folder, number)
        except RuntimeError as error:
            results.unavailable["warm start"] = f"no token: {error}"
            return
        if number:
            results.warm_starts.append(found)


def progress(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes, with more noise")
    parser.add_argument("--rounds", type=int, help="number of rounds")
    known = [peer.name for peer in peers(ENVIRONMENT)]
    parser.add_argument(
        "--only", nargs="+", metavar="PROXY", choices=known, help=f"proxies to measure: {', '.join(known)}"
    )
    names = [scenario.name for scenario in ALL]
    parser.add_argument(
        "--scenarios", nargs="+", metavar="SCENARIO", choices=names, help=f"scenarios to run: {', '.join(names)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round to this file")
    parser.add_argument(
        "--before",
        type=Path,
        metavar="EXECUTABLE",
        help="the pointsman of another checkout, to measure beside this one",
    )
    parser.add_argument("--peers", type=Path, default=ENVIRONMENT, metavar="VENV", help="environment with the peers")
    parser.add_argument(
        "--python", action="store_true", help="use the Python load generator and backend even if there is a compiler"
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("needs two cores: one for the proxy, one for the load generator and the backend", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pace = QUICK if options.quick else FULL
    if options.rounds:
        pace = msgspec.structs.replace(pace, rounds=options.rounds)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        try:
            results = measure(options, pace, cores, Path(folder))
        except KeyboardInterrupt:
            return 130
    print(f"\n{tables(results)}")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    progress(f"done in {time.monotonic() - begun:.0f} s")
    return 1 if results.first_errors() or Pointsman.name in results.unavailable else 0


if __name__ == "__main__":
    sys.exit(main())
