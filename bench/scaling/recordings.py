"""The recorded loads that are available."""

import os
from pathlib import Path

import msgspec

from pointsman.lab.scaling import Series, arrivals_of, rates_of

VARIABLE = "POINTSMAN_TRACES"
RATES = "servegen_rate_10min.csv"
ARRIVALS = ("azure2023_code.jsonl", "azure2023_conv.jsonl")
ARRIVALS_BIN_S = 10.0
REPLICAS_AT_MEAN = 40
"""The capacity of a replica is chosen so that the mean load keeps this many busy..."""
KNOWN_CAPACITY = {"language/m-large": 5.0}
"""...unless results are known: then it is the capacity that they were made with."""


class Load(msgspec.Struct, frozen=True):
    """A series, what one replica of it serves per second, and how often policies are called."""

    series: Series
    capacity: float
    interval_s: float

    @property
    def short(self) -> str:
        """Without the family of the model."""
        return self.series.name.rpartition("/")[2]


def folder_of(given: Path | None) -> Path | None:
    """The folder of the data: as given, or from the environment."""
    named = os.environ.get(VARIABLE)
    return given or (Path(named) if named else None)


def loads_in(folder: Path) -> list[Load]:
    """Every recording that is found."""
    found = []
    if (folder / RATES).is_file():
        with (folder / RATES).open(encoding="utf-8") as lines:
            found += [_load(series, 60.0) for series in rates_of(lines)]
    for name in ARRIVALS:
        if (folder / name).is_file():
            with (folder / name).open(encoding="utf-8") as lines:
                found.append(_load(arrivals_of(name.removesuffix(".jsonl"), lines, ARRIVALS_BIN_S), ARRIVALS_BIN_S))
    return found


def _load(series: Series, interval_s: float) -> Load:
    mean = series.requests / series.seconds / REPLICAS_AT_MEAN
    return Load(series, KNOWN_CAPACITY.get(series.name, mean), interval_s)
