"""`python -m bench.beside FOLDER`: this checkout beside another one, in turns of a few milliseconds.

`--python PATH` runs the other side with another interpreter of the same version; FOLDER may then be this checkout.
Each checkout runs the measurements of this checkout's `bench/` in its own process. They take turns, so that other
load on the machine slows both alike. A figure is the median over the turns of CPU time, a ratio that of the ratios.
"""

import argparse
import asyncio
import gc
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import msgspec
import uvloop

OURS = Path(__file__).parents[1]


class Case(msgspec.Struct):
    """A measurement: a call of `work` does `units` of it."""

    work: Callable[[], object]
    units: int


class Checkout:
    """The process that measures one checkout."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        argv = [python, "-P", __file__, "--serve", str(folder)]
        environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.cases: list[str] = msgspec.json.decode(self._answer())

    def us(self, case: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a checkout ended with {self._process.wait()}")
        return line

    def stop(self) -> None:
        self._process.communicate()


async def serve(folder: str) -> None:
    """Run the requested measurements, with the package of this folder."""
    sys.path.insert(0, folder)
    import pointsman

    assert Path(pointsman.__file__).is_relative_to(folder), pointsman.__file__
    sys.path.insert(0, str(OURS))
    from bench import request_path, scheduling

    cases: Mapping[str, Case] = {**request_path.cases(), **scheduling.cases()}
    for case in cases.values():
        case.work()
    gc.collect()
    gc.freeze()
    print(msgspec.json.encode(list(cases)).decode(), flush=True)
    for line in sys.stdin:
        case = cases[line.rstrip("\n")]
        case.work()  # otherwise the caches are those of the other checkout
        start = time.process_time()
        case.work()
        print((time.process_time() - start) / case.units * 1e6, flush=True)
        await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description=__doc__)
    parser.add_argument("folder", type=Path, help="the other checkout")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the other side")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with one of these words in them")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(str(options.folder)))
        return
    before, after = Checkout(options.folder.resolve(), options.python), Checkout(OURS)
    only = options.only
    cases = [case for case in after.cases if not only or any(word in case for word in only)]
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(options.turns):
        for case in cases:
            if turn % 2:
                us = before.us(case)
                found[case].append((us, after.us(case)))
            else:
                us = after.us(case)
                found[case].append((before.us(case), us))
    for checkout in (before, after):
        checkout.stop()
    from pointsman.render.text import text_table  # not before a checkout is chosen

    rows = [[case, *_row(found[case])] for case in cases]
    print(text_table(["us of CPU", "before", "after", "ratio", "95 % of its median"], rows))


def _row(pairs: list[tuple[float, float]]) -> list[str]:
    ratios = [after / before for before, after in pairs]
    chance = random.Random(0)
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(400))
    before, after = (median(side) for side in zip(*pairs, strict=True))
    return [f"{before:.2f}", f"{after:.2f}", f"{median(ratios):.3f}", f"{medians[10]:.3f} to {medians[389]:.3f}"]


if __name__ == "__main__":
    main()
