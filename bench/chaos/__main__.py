"""`python -m bench.chaos`: prints the tables; the exit code is 1 if a guarantee was violated."""

import argparse
import sys
import tempfile
from pathlib import Path

from bench.chaos.run import ENGINES, Settings, run

TINY = Path(__file__).parents[2] / "tests" / "models" / "tiny-pydoc-q8_0.gguf"


def main() -> int:
    settings = Settings(**vars(options().parse_args()))
    if settings.engine == "llama.cpp" and not settings.weights:
        settings = settings._replace(weights=str(TINY))
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        outcome = run(settings, Path(folder))
    print(
        f"{settings.instances} x {settings.engine}, {settings.clients} clients, {settings.seconds:g} s, one fault "
        f"every {settings.every_s:g} s (seed {settings.seed}; {outcome.injector.skipped} skipped to keep one instance "
        "healthy)\n"
    )
    print(outcome)
    if outcome.settled_s is not None:
        print(f"\nall instances ready {outcome.settled_s:.1f} s after the end of the load")
    violations = outcome.violations()
    print("\nall guarantees held" if not violations else "\nVIOLATED GUARANTEES\n" + "\n".join(violations))
    return 1 if violations else 0


def options() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="chooses the instances and their faults")
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
