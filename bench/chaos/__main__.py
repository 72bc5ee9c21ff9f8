"""`python -m bench.chaos`: prints the tables; the exit code is 1 if a guarantee was violated."""

import argparse
import sys
import tempfile
from pathlib import Path

from bench.chaos.report import refusals, table
from bench.chaos.run import ENGINES, run
from bench.chaos.scenarios import SCENARIOS, Settings

TINY = Path(__file__).parents[2] / "tests" / "models" / "tiny-pydoc-q8_0.gguf"


def main() -> int:
    given = vars(options().parse_args())
    names = given.pop("only") or list(SCENARIOS)
    settings = Settings(**given)
    if settings.engine == "llama.cpp" and not settings.weights:
        settings = settings._replace(weights=str(TINY))
    print(
        f"{settings.instances} x {settings.engine}, {settings.clients} clients, {settings.seconds:g} s per fault, "
        f"seed {settings.seed}\n"
    )
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for name in names:
            print(f"{name}: {SCENARIOS[name].what}", file=sys.stderr)
            outcomes.append(run(name, settings, Path(folder) / name))
    print(f"{table(outcomes)}\n\n{refusals(outcomes)}")
    violations = [violation for one in outcomes for violation in one.violations()]
    print("\nall guarantees held" if not violations else "\nVIOLATED GUARANTEES\n" + "\n".join(violations))
    return 1 if violations else 0


def options() -> argparse.ArgumentParser:
    defaults = Settings()
    faults = "\n".join(f"  {name:16} {kind.what}" for name, kind in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.chaos",
        description=__doc__,
        epilog=f"faults:\n{faults}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), metavar="FAULT", help="default: all")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="per fault")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the load and of the fault `instances`")
    parser.add_argument("--every", dest="every_s", type=float, default=defaults.every_s, help="seconds between faults")
    parser.add_argument("--instances", type=int, default=defaults.instances)
    parser.add_argument("--clients", type=int, default=defaults.clients)
    parser.add_argument("--engine", choices=list(ENGINES), default=defaults.engine)
    parser.add_argument("--weights", default="", help="GGUF file for llama.cpp (default: the tiny model of the tests)")
    parser.add_argument(
        "--policy", default="", help="scheduling policy, as in a manifest (default: the default profile)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
