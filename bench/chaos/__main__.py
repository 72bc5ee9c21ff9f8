"""`python -m bench.chaos`: prints the table; the exit code is 1 if a promise was broken."""

import argparse
import sys
import tempfile
from pathlib import Path

from bench.chaos.run import ENGINES, Settings, run

TINY = Path(__file__).parents[2] / "tests" / "models" / "tiny-pydoc-q8_0.gguf"


def main() -> int:
    """1 if a promise was broken."""
    settings = Settings(**vars(options().parse_args()))
    if settings.engine == "llama.cpp" and not settings.weights:
        settings = settings._replace(weights=str(TINY))
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        outcome = run(settings, Path(folder))
    print(
        f"{settings.instances} x {settings.engine}, {settings.clients} clients, {settings.seconds:g} s, one instance "
        f"struck every {settings.every_s:g} s (seed {settings.seed}; {outcome.mischief.passed_over} times nobody, as "
        "one must live)\n"
    )
    print(outcome)
    if outcome.settled_s is not None:
        print(f"\nall instances ready {outcome.settled_s:.1f} s after the end of the load")
    broken = outcome.broken_promises()
    print("\nevery promise was kept" if not broken else "\nBROKEN PROMISES\n" + "\n".join(broken))
    return 1 if broken else 0


def options() -> argparse.ArgumentParser:
    """The command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the dice: who is struck, and how")
    parser.add_argument("--every", dest="every_s", type=float, default=defaults.every_s, help="seconds between strikes")
    parser.add_argument("--instances", type=int, default=defaults.instances)
    parser.add_argument("--clients", type=int, default=defaults.clients)
    parser.add_argument("--engine", choices=list(ENGINES), default=defaults.engine)
    parser.add_argument("--weights", default="", help="of llama.cpp: a GGUF file; the tests' tiny one by default")
    parser.add_argument("--policy", default="", help="who decides, as in a manifest; the default profile if left out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
