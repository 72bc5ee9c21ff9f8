"""Recorded load in files: rates in a CSV, or arrivals as JSON lines.

Enters: lines. Leaves: series in bins of equal length. The one rule: what cannot be meant is an error that says where it
is, and never a guess.
"""

import csv
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import NamedTuple

from pointsman.errors import PointsmanError, UnknownName
from pointsman.scaling.view import Rate

# Recorded load: requests per second in bins of equal length.


class Series:
    """Rates in bins of equal length. Within a bin the rate is constant: nothing finer was recorded."""

    def __init__(self, name: str, bin_s: float, rates: Sequence[float], began: float = 0.0) -> None:
        if not rates or bin_s <= 0:
            raise ValueError(f"{name}: a series has bins of more than 0 s, and at least one")
        self.name, self.bin_s, self.rates = name, bin_s, tuple(float(rate) for rate in rates)
        self.began = began
        """The first bin, in seconds since the epoch; 0: nobody said."""
        self._before = [0.0, *accumulate(rate * bin_s for rate in self.rates)]
        """Requests before each bin."""

    @property
    def seconds(self) -> float:
        return self.bin_s * len(self.rates)

    @property
    def requests(self) -> float:
        return self._before[-1]

    def rate(self, at: float) -> float:
        """At a moment, counted from the beginning."""
        return self.rates[min(max(int(at / self.bin_s + 1e-9), 0), len(self.rates) - 1)]

    def mean(self, start: float, end: float) -> float:
        """Requests per second between two moments; before the beginning there was nothing to measure."""
        start, end = max(start, 0.0), min(end, self.seconds)
        return (self._until(end) - self._until(start)) / (end - start) if end > start else self.rate(start)

    def needed(self, capacity: float) -> list[int]:
        """The fewest replicas that serve each bin."""
        return [math.ceil(rate / capacity - 1e-9) for rate in self.rates]

    def bins_before(self, at: float) -> int:
        """How many are over by then."""
        return min(int(at / self.bin_s + 1e-9), len(self.rates))

    def history(self, began: float) -> tuple[Rate, ...]:
        """All bins, on a clock on which the first began then."""
        return tuple(Rate(began + place * self.bin_s, rate) for place, rate in enumerate(self.rates))

    def _until(self, at: float) -> float:
        place = min(int(at / self.bin_s), len(self.rates) - 1)
        return self._before[place] + self.rates[place] * (at - place * self.bin_s)


TIMES = ("t_s", "time", "timestamp")
RATES = ("rps", "rate", "per_second", "requests_per_second")
NAMES = ("model", "name", "series", "deployment")
EQUAL = 0.01
"""Of a bin: so far from its place a row may be."""
MOST_BINS = 1_000_000
MILLISECONDS = 1e11
"""Seconds since the epoch do not come to so much for 3,000 years: these are milliseconds."""


class UnreadableLoad(PointsmanError, ValueError):
    """A recording in which something is missing or wrong."""


class Row(NamedTuple):
    """A bin, as it stands in a file."""

    at: float
    rate: float
    line: int


def rates_of(lines: Iterable[str], name: str = "load") -> list[Series]:
    """Of a CSV with a header: times, as seconds or ISO 8601, rates, in requests per second, and names if there are
    several series (`name`: if there are none). What is missing between two rows counts as nothing."""
    reader = csv.DictReader(lines)
    try:
        header = reader.fieldnames or ()
        when = _column(header, TIMES, "times, in seconds or as 2026-11-16T05:20:00Z")
        rate = _column(header, RATES, "rates, in requests per second")
        who = next((one for one in header if one.strip().lower() in NAMES), None)
        found: dict[str, list[Row]] = {}
        for row in reader:
            line = reader.line_num
            read = Row(_time(row[when] or "", line), _rate(row[rate] or "", line), line)
            found.setdefault((row[who] or "") if who else name, []).append(read)
    except csv.Error as error:
        raise UnreadableLoad(f"line {reader.line_num}: this is not CSV: {error}") from None
    if not found:
        raise UnreadableLoad("there is nothing below the header; each row is one bin")
    return [_series(one, rows) for one, rows in found.items()]


def arrivals_of(name: str, lines: Iterable[str], bin_s: float, model: str | None = None) -> Series:
    """Of a recording: JSON lines with a `timestamp` in milliseconds. A last bin that is cut short is left out. `model`:
    only its requests."""
    requests = list(_arrivals(lines))
    times = sorted(at for at, of in requests if model in (None, of))
    if not times:
        models = {of for _, of in requests} - {""}
        if model is not None and models:
            raise UnknownName("model", model, models)
        raise UnreadableLoad("there is no request in it" if model is None else "its requests do not name their model")
    if times[-1] - times[0] < bin_s:
        lasts = f"its requests came within {times[-1] - times[0]:.4g} s"
        raise UnreadableLoad(f"{lasts}, and that is not one whole bin of {bin_s:g} s; choose shorter bins")
    bins = int((times[-1] - times[0]) / bin_s)
    _check_number(bins, bin_s)
    before = [bisect_left(times, times[0] + bin_s * place) for place in range(bins + 1)]
    return Series(name, bin_s, [(after - first) / bin_s for first, after in pairwise(before)], times[0])


def chosen(series: Sequence[Series], name: str | None) -> Series:
    """The one of this name; None: the only one. Raises with those that there are."""
    by_name = {one.name: one for one in series}
    if name is not None:
        if name not in by_name:
            raise UnknownName("series", name, by_name)
        return by_name[name]
    if len(series) > 1:
        raise UnreadableLoad(f"there are {len(series)} series: {', '.join(by_name)}; choose one")
    return series[0]


def _column(header: Sequence[str], names: Sequence[str], what: str) -> str:
    found = [column for name in names for column in header if column.strip().lower() == name]
    if not found:
        there = ", ".join(column.strip() for column in header) or "nothing"
        raise UnreadableLoad(f"there is no column of {what}; call it {' or '.join(names)}; the header has {there}")
    return found[0]


def _time(text: str, line: int) -> float:
    try:
        at = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text.strip())
        except ValueError:
            wanted = "a time: seconds, or as 2026-11-16T05:20:00Z"
            raise UnreadableLoad(f'line {line}: "{text}" is not {wanted}') from None
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(at) or abs(at) >= MILLISECONDS:
        hint = "; these are milliseconds, divide them by 1000" if math.isfinite(at) else ""
        raise UnreadableLoad(f'line {line}: "{text}" is not a time in seconds{hint}')
    return at


def _rate(text: str, line: int) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise UnreadableLoad(f'line {line}: "{text}" is not a rate: a number of requests per second, 0 or more')
    return rate


def _series(name: str, rows: list[Row]) -> Series:
    rows.sort()
    first = rows[0].at
    if len(rows) < 2:
        raise UnreadableLoad(f"{name} has one row; it takes two to tell how long a bin is")
    bin_s = min(after.at - before.at for before, after in pairwise(rows))
    if bin_s <= 0:
        twice = next(after for before, after in pairwise(rows) if after.at == before.at)
        raise UnreadableLoad(f"line {twice.line}: {name} has this time twice; is there a column that tells them apart?")
    _check_number(round((rows[-1].at - first) / bin_s) + 1, bin_s)
    rates = [0.0] * (round((rows[-1].at - first) / bin_s) + 1)
    for before, (at, rate, line) in zip([rows[0], *rows], rows, strict=False):
        place = (at - first) / bin_s
        if abs(place - round(place)) > EQUAL:
            after = f"comes {at - before.at:g} s after the row before it in time"
            raise UnreadableLoad(
                f"line {line}: bins must be equal; those of {name} are {bin_s:g} s, and this one {after}"
            )
        rates[round(place)] = rate
    return Series(name, bin_s, rates, first)


def _arrivals(lines: Iterable[str]) -> Iterator[tuple[float, str]]:
    """(seconds, model) of each request."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            at, model = request["timestamp"] / 1000, request.get("model") or ""
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            wanted = 'a request, such as {"timestamp": 1200} in milliseconds'
            raise UnreadableLoad(f"line {number}: {line.strip()[:60]} is not {wanted}") from None
        if not math.isfinite(at):
            raise UnreadableLoad(f"line {number}: its timestamp is no moment")
        yield at, str(model)


def _check_number(bins: int, bin_s: float) -> None:
    if bins > MOST_BINS:
        raise UnreadableLoad(f"these are {bins:,} bins of {bin_s:g} s; {MOST_BINS:,} is the most")
