"""Recorded load from a CSV with rates, from JSON lines with requests, or from the history of a running plane.

Enters: lines, or an answer from the admin API. Leaves: rates in bins of equal length. The one rule: ambiguous input is
an error that names its line. The lab never guesses.
"""

import csv
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pointsman.errors import PointsmanError, UnknownName, UnusableFile
from pointsman.parameters import duration_text
from pointsman.scaling.limits import ScalingLimits
from pointsman.scaling.policy import Rate

TIME_COLUMNS = ("t_s", "time", "timestamp")
RATE_COLUMNS = ("rps", "rate", "per_second", "requests_per_second")
NAME_COLUMNS = ("model", "name", "series", "deployment")
TOLERANCE = 0.01
"""Maximum distance between a row's time and the start of its bin, as a share of the bin."""
MAX_BINS = 1_000_000
MILLISECONDS = 1e11
"""Larger timestamps are in milliseconds. As seconds, they would be 3,000 years in the future."""

REQUEST_FILES = (".jsonl", ".ndjson")
"""Suffixes of files with one request per line."""
DEFAULT_BIN_S = 60.0
"""Default width of the bins for a file with one request per line."""
MIN_HISTORY_BINS = 6
"""If a plane's history has fewer bins than this, the last hour is replayed in finer bins."""
MIN_INTERVAL_S = 30.0
"""Minimum time between calls of the policy on a plane's history. Within a bin of the history the rate is constant, so
more calls would only take time."""


class Series:
    """Rates in bins of equal length. Within a bin, the rate is constant, because nothing finer was recorded."""

    def __init__(self, name: str, bin_s: float, rates: Sequence[float], began: float = 0.0) -> None:
        if not rates or bin_s <= 0:
            raise ValueError(f"{name}: a series has bins of more than 0 s, and at least one")
        self.name, self.bin_s, self.rates = name, bin_s, tuple(float(rate) for rate in rates)
        self.began = began
        """The start of the first bin, in seconds since the epoch. 0 if it is unknown."""
        self._before = [0.0, *accumulate(rate * bin_s for rate in self.rates)]
        """Number of requests before each bin."""

    @property
    def seconds(self) -> float:
        return self.bin_s * len(self.rates)

    @property
    def requests(self) -> float:
        return self._before[-1]

    def rate(self, at: float) -> float:
        """The rate at a time in seconds since the beginning."""
        return self.rates[min(max(int(at / self.bin_s + 1e-9), 0), len(self.rates) - 1)]

    def mean(self, start: float, end: float) -> float:
        """Mean rate between two times. Time before the beginning does not count."""
        start, end = max(start, 0.0), min(end, self.seconds)
        return (self._until(end) - self._until(start)) / (end - start) if end > start else self.rate(start)

    def needed(self, capacity: float) -> list[int]:
        """For each bin, the smallest number of replicas that can serve it."""
        return [math.ceil(rate / capacity - 1e-9) for rate in self.rates]

    def bins_before(self, at: float) -> int:
        """Number of bins that have ended by this time."""
        return min(int(at / self.bin_s + 1e-9), len(self.rates))

    def history(self, began: float) -> tuple[Rate, ...]:
        """All bins, on a clock on which the first bin begins at `began`."""
        return tuple(Rate(began + index * self.bin_s, rate) for index, rate in enumerate(self.rates))

    def _until(self, at: float) -> float:
        index = min(int(at / self.bin_s), len(self.rates) - 1)
        return self._before[index] + self.rates[index] * (at - index * self.bin_s)


class UnreadableLoad(PointsmanError, ValueError):
    """A recording in which something is missing or wrong."""


class Row(NamedTuple):
    at: float
    rate: float
    line: int


class NamedPolicy(NamedTuple):
    name: str
    parameters: dict[str, Any] | None = None
    """None if the policy has no parameters of its own."""


class RecordedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load to replay, and the defaults for the replay that are known."""

    series: Series
    capacity: float | None = None
    why_no_capacity: str = ""
    start_up_s: float = 600.0
    interval_s: float = 60.0
    request_s: float = 1.0
    cost_per_replica_hour: float | None = None
    limits: ScalingLimits | None = None
    policy: NamedPolicy | None = None
    """The policy in force."""
    notes: Mapping[str, str] = {}
    """For each option of the command line, where its default comes from."""


def load_of_file(file: Path, name: str | None = None, bin_s: float | None = None) -> RecordedLoad:
    """The load from a CSV with rates, or from JSON lines with requests. `name` chooses a series or a model."""
    requests = file.suffix.lower() in REQUEST_FILES
    if bin_s is not None and not requests:
        raise PointsmanError(
            f"--bin goes with requests, one per line ({' or '.join(REQUEST_FILES)}); {file} has bins already"
        )
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            if requests:
                series = arrivals_of(name or file.stem, lines, DEFAULT_BIN_S if bin_s is None else bin_s, name)
            else:
                series = chosen(rates_of(lines, file.stem), name)
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(file, error) from error
    except (UnreadableLoad, UnknownName) as error:
        raise PointsmanError(f"{file}: {error}") from None
    return RecordedLoad(series=series)


def load_of_plane(history: Mapping[str, Any]) -> RecordedLoad:
    """The load of a deployment as a running plane has measured it. `history` is the answer from the admin API.

    If the history is short, the load consists of the finer bins of the last hour.
    """
    name, seen, notes = history["deployment"], history, {}
    if len(history["bins"]) < MIN_HISTORY_BINS and len(history["recent"]["bins"]) > len(history["bins"]):
        seen = history["recent"]
    bins, bin_s = seen["bins"], seen["bin_s"]
    if not bins:
        wait = duration_text(history["recent"]["bin_s"])
        raise PointsmanError(
            f'the plane has not seen "{name}" for long enough; try again in {wait}, or give a recording with --load'
        )
    if len(history["bins"]) < MIN_HISTORY_BINS:
        lasts = duration_text(len(bins) * bin_s)
        notes["load"] = f'the plane has seen {lasts} of "{name}" so far; a longer history says more'
    limits = msgspec.convert(history["limits"], ScalingLimits)
    series = Series(name, bin_s, [one["per_second"] for one in bins], bins[0]["began"])
    load = RecordedLoad(
        series=series,
        interval_s=min(max(limits.interval_s, MIN_INTERVAL_S), series.seconds),
        cost_per_replica_hour=history["cost_per_replica_hour"],
        limits=limits,
        policy=None if history["parameters"] is None else NamedPolicy(history["policy"], history["parameters"]),
        notes=notes,
    )
    return _with_measurements(load, history)


def _with_measurements(load: RecordedLoad, history: Mapping[str, Any]) -> RecordedLoad:
    """The load, with the start-up time and the capacity if the plane has measured them."""
    start_up_s, request_s, at_once = history["start_up_s"], history["request_s"], history["max_concurrency"]
    measured: dict[str, Any] = {} if start_up_s is None else {"start_up_s": start_up_s}
    notes = dict(load.notes)
    if start_up_s is None:
        notes["start_up"] = f"no start of an instance was measured; {load.start_up_s:g} s is a guess (--start-up)"
    if request_s is not None:
        measured["request_s"] = request_s
    if request_s is not None and at_once:
        measured["capacity"] = at_once / request_s
        notes["capacity"] = f"a replica takes {at_once} at once, and a recent request {request_s:.3g} s (--capacity)"
    why = "no request has come in the last hour" if request_s is None else "its maximum concurrency is not known"
    return msgspec.structs.replace(load, **measured, notes=notes, why_no_capacity=why)


def rates_of(lines: Iterable[str], name: str = "load") -> list[Series]:
    """The series in a CSV with a header. Its columns are times (seconds or ISO 8601), rates (requests per second), and
    names if there are several series. Without names, the series is called `name`. A missing row counts as 0."""
    reader = csv.DictReader(lines)
    try:
        header = reader.fieldnames or ()
        when = _column(header, TIME_COLUMNS, "times, in seconds or as 2026-11-16T05:20:00Z")
        rate = _column(header, RATE_COLUMNS, "rates, in requests per second")
        named = next((one for one in header if one.strip().lower() in NAME_COLUMNS), None)
        found: dict[str, list[Row]] = {}
        for row in reader:
            line = reader.line_num
            read = Row(_time(row[when] or "", line), _rate(row[rate] or "", line), line)
            found.setdefault((row[named] or "") if named else name, []).append(read)
    except csv.Error as error:
        raise UnreadableLoad(f"line {reader.line_num}: this is not CSV: {error}") from None
    if not found:
        raise UnreadableLoad("there is nothing below the header; each row is one bin")
    return [_series(one, rows) for one, rows in found.items()]


def arrivals_of(name: str, lines: Iterable[str], bin_s: float, model: str | None = None) -> Series:
    """The series from JSON lines with a `timestamp` in milliseconds. An incomplete last bin is left out.

    With a `model`, only its requests count.
    """
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
    before = [bisect_left(times, times[0] + bin_s * index) for index in range(bins + 1)]
    return Series(name, bin_s, [(after - first) / bin_s for first, after in pairwise(before)], times[0])


def chosen(series: Sequence[Series], name: str | None) -> Series:
    """The series of this name. With None, the only series. If it is not found, the error lists the known names."""
    by_name = {one.name: one for one in series}
    if name is not None:
        if name not in by_name:
            raise UnknownName("series", name, by_name)
        return by_name[name]
    if len(series) > 1:
        raise UnreadableLoad(f"there are {len(series)} series: {', '.join(by_name)}; choose one with --series NAME")
    return series[0]


def _column(header: Sequence[str], names: Sequence[str], what: str) -> str:
    found = [column for name in names for column in header if column.strip().lower() == name]
    if not found:
        if any("\0" in column for column in header):
            raise UnreadableLoad("it is a binary file, not text")
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
        raise UnreadableLoad(f"{name} has one row; at least two are needed to determine the length of a bin")
    bin_s = min(after.at - before.at for before, after in pairwise(rows))
    if bin_s <= 0:
        twice = next(after for before, after in pairwise(rows) if after.at == before.at)
        raise UnreadableLoad(f"line {twice.line}: {name} has this time twice; is there a column of names?")
    _check_number(round((rows[-1].at - first) / bin_s) + 1, bin_s)
    rates = [0.0] * (round((rows[-1].at - first) / bin_s) + 1)
    for before, (at, rate, line) in zip([rows[0], *rows], rows, strict=False):
        position = (at - first) / bin_s
        if abs(position - round(position)) > TOLERANCE:
            after = f"comes {at - before.at:g} s after the row before it in time"
            raise UnreadableLoad(
                f"line {line}: bins must be equal; those of {name} are {bin_s:g} s, and this one {after}"
            )
        rates[round(position)] = rate
    return Series(name, bin_s, rates, first)


def _arrivals(lines: Iterable[str]) -> Iterator[tuple[float, str]]:
    """The time in seconds and the model of each request."""
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
            raise UnreadableLoad(f"line {number}: its timestamp is not a finite number")
        yield at, str(model)


def _check_number(bins: int, bin_s: float) -> None:
    if bins > MAX_BINS:
        raise UnreadableLoad(f"these are {bins:,} bins of {bin_s:g} s; the maximum is {MAX_BINS:,}")
