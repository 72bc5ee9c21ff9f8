"""Scaling policies on recorded load, compared with a bound that knows the future.

    python -m bench.scaling [--data FOLDER] [--start-up 30 200 600] [--plots FOLDER] [--quick]

Without data the benchmark is skipped. `--quick` leaves out the cross-validation of parameters, and the table with rates
measured as on a running plane.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.scaling import choosing
from bench.scaling.recordings import ARRIVALS, RATES, VARIABLE, Load, folder_of, loads_in
from pointsman.lab.scaling import Reactive, Replay, ReplayOutcome, Setting, clairvoyant, plot, static_peak
from pointsman.render.text import text_table
from pointsman.scaling.policies.predictive import Predictive

HEADS = ("series", "start-up", "policy", "replica-hours", "ratio", "unserved", "changes", "most")
PREDICTIVE = "predictive"


def progress(text: str) -> None:
    print(f"\r{text[:100]:<100}", end="", file=sys.stderr, flush=True)


def outcomes(load: Load, setting: Setting) -> dict[str, ReplayOutcome]:
    """By policy."""
    react_s = 0.0 if setting.at_once else 30.0 + setting.interval_s
    replay = Replay(load.series, setting)
    return {
        "static peak": static_peak(load.series, setting),
        "reactive 1.2": replay.run(Reactive(load.capacity, 1.2)),
        "reactive 1.5": replay.run(Reactive(load.capacity, 1.5)),
        PREDICTIVE: replay.run(Predictive(load.capacity, react_s=react_s)),
        "clairvoyant with start-up": clairvoyant(load.series, setting),
    }


def rows_of(load: Load, setting: Setting, found: dict[str, ReplayOutcome]) -> list[list[str]]:
    return [
        [
            load.short,
            f"{setting.start_up_s:g}",
            name,
            f"{one.hours:.0f}",
            f"{one.ratio:.3f}",
            f"{one.unserved:.2%}",
            str(one.changes),
            str(one.most),
        ]
        for name, one in found.items()
    ]


def main_table(loads: Iterable[Load], start_ups: Sequence[float], plots: Path | None) -> list[list[str]]:
    table = []
    for load in loads:
        for start_up_s in start_ups:
            progress(f"{load.short}, start-up {start_up_s:g} s")
            setting = Setting(capacity=load.capacity, start_up_s=start_up_s, interval_s=load.interval_s)
            found = outcomes(load, setting)
            table += rows_of(load, setting, found)
            if plots is not None:
                picture = plot(load.series, setting, PREDICTIVE, found[PREDICTIVE])
                (plots / f"scaling-{load.short}-{start_up_s:g}.svg").write_text(picture, encoding="utf-8")
    return table


def live_table(loads: Iterable[Load], start_ups: Sequence[float]) -> list[list[str]]:
    """With rates measured over the last 30 s, as on a running plane."""
    table = []
    for load in loads:
        for start_up_s in start_ups:
            progress(f"{load.short}, start-up {start_up_s:g} s, measured over 30 s")
            setting = Setting(
                capacity=load.capacity, start_up_s=start_up_s, interval_s=min(load.interval_s, 30.0), at_once=False
            )
            table += rows_of(load, setting, outcomes(load, setting))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Scaling policies on recorded load.")
    parser.add_argument("--data", type=Path, help=f"folder of {RATES} and others (else ${VARIABLE})")
    parser.add_argument("--start-up", type=float, nargs="+", default=[30.0, 200.0, 600.0], help="seconds")
    parser.add_argument("--plots", type=Path, help="folder for pictures of the predictive policy")
    parser.add_argument("--quick", action="store_true", help="the first table only")
    options = parser.parse_args(arguments)
    folder = folder_of(options.data)
    loads = loads_in(folder) if folder is not None else []
    if not loads:
        looked = f"neither {RATES} nor {' nor '.join(ARRIVALS)} is in {folder}" if folder else "no folder is named"
        print(f"scaling: skipped: {looked}; set it with --data or {VARIABLE}")
        return 0
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    table = main_table(loads, options.start_up, options.plots)
    progress("")
    print(f"\n{text_table(HEADS, table)}")
    if not options.quick:
        # The other recordings are an hour long: too short to choose parameters on.
        long = [load for load in loads if load.series.seconds > 7200]
        live = live_table(long, options.start_up)
        results = choosing.try_all(long, progress)
        progress("")
        print(f"\nRates measured over the last 30 s, a call every 30 s:\n\n{text_table(HEADS, live)}")
        print("\nLeave one out, start-up 600 s:\n")
        print(text_table(choosing.HEADS, choosing.rows([load.short for load in long], results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
