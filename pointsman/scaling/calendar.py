"""Time zones and cron expressions. Every moment is an argument: no clock is read."""

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo

_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")


def zone_of(name: str) -> tzinfo:
    """A zone by name, such as Europe/Berlin, UTC or +05:30. Raises ValueError if it is unknown."""
    offset = _OFFSET.fullmatch(name)
    try:
        if offset is not None:
            east = timedelta(hours=int(offset[2]), minutes=int(offset[3]))
            return timezone(east if offset[1] == "+" else -east)
        if name == "UTC":
            return UTC
        from zoneinfo import ZoneInfo  # imported here: it takes memory that most schedules do not need

        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # LookupError: the zone is unknown, or the system has no zone data
        raise ValueError(
            f'there is no time zone "{name}" here; write for example Europe/Berlin, UTC or +05:30 '
            "(names come from the system, or from: pip install tzdata)"
        ) from None


def shown(now: float, zone: tzinfo = UTC) -> datetime:
    return datetime.fromtimestamp(now, zone)


def in_words(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def in_utc(now: float) -> str:
    """2025-03-05T13:00:00Z"""
    return f"{shown(now):%Y-%m-%dT%H:%M:%SZ}"


def month_ends(now: float) -> float:
    """When the next month begins, in UTC."""
    year, month = divmod(shown(now).year * 12 + shown(now).month, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
FIELDS: tuple[tuple[str, int, int, Sequence[str]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, MONTHS),
    ("day of the week", 0, 7, WEEKDAYS),
)
"""Name, lowest and highest value of each of the five fields, and the names of its values."""
MAX_DAYS_OF_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
YEARS_BACK = 8
"""How far back to search: 29 February is at most this many years away."""

_PART = re.compile(r"(?:(?P<all>\*)|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?")


class Cron:
    """A cron expression, such as 0 9 * * mon-fri: five fields with lists, ranges, steps and names."""

    def __init__(self, text: str) -> None:
        self.text = text
        parts = text.split()
        if len(parts) != len(FIELDS):
            raise ValueError(
                f'"{text}" has {len(parts)} fields; a cron expression has five, '
                'such as "30 8 * * mon-fri": minute, hour, day of the month, month, day of the week'
            )
        minutes, hours, self._days, self._months, weekdays = (
            _values(part, *field, text) for part, field in zip(parts, FIELDS, strict=True)
        )
        self._weekdays = {day % 7 for day in weekdays}
        self._times = sorted(time(hour, minute) for hour in hours for minute in minutes)
        # As in every cron: if both kinds of day are restricted, either may match.
        self._either = not parts[2].startswith("*") and not parts[4].startswith("*")
        if not self._either and min(self._days) > max(MAX_DAYS_OF_MONTHS[month - 1] for month in self._months):
            months = " or ".join(MONTHS[month - 1] for month in sorted(self._months))
            raise ValueError(f'"{text}" never comes: there is no day {min(self._days)} in {months}')

    def latest(self, now: float, zone: tzinfo = UTC) -> float | None:
        """The last match at or before `now` in a zone; None if there is none in the last eight years."""
        here = shown(now, zone)
        for back in range(YEARS_BACK * 366):
            day = here.date() - timedelta(days=back)
            if self._on(day):
                past = [moment for moment in self._times if back or moment <= here.time()]
                if past:
                    # An hour that occurs twice counts the first time; an hour that is skipped counts an hour later.
                    return min(datetime.combine(day, past[-1], zone).timestamp(), now)
        return None

    def _on(self, day: date) -> bool:
        if day.month not in self._months:
            return False
        right_day, right_weekday = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        return right_day or right_weekday if self._either else right_day and right_weekday


def _values(part: str, what: str, low: int, high: int, names: Sequence[str], text: str) -> set[int]:
    values: set[int] = set()
    for piece in part.split(","):
        found = _PART.fullmatch(piece)
        if found is None:
            raise ValueError(f'"{piece}" in "{text}" is no {what}; write for example *, 5, 1-5, */15 or 1,3')
        first, last = low, high
        if not found["all"]:
            first = _number(found["first"], what, low, high, names, text)
            last = _number(found["last"], what, low, high, names, text) if found["last"] else first
            if found["step"] and not found["last"]:
                last = high  # 5/15 starts at 5
        if names is WEEKDAYS:  # Sunday is both 0 and 7: it counts once in *, and is the last day in fri-sun
            last = 6 if found["all"] else 7 if last == 0 < first else last
        step = int(found["step"] or 1)
        if first > last or step < 1:
            raise ValueError(f'"{piece}" in "{text}" is empty: from {first} to {last}, every {step}')
        values.update(range(first, last + 1, step))
    return values


def _number(word: str, what: str, low: int, high: int, names: Sequence[str], text: str) -> int:
    if word.lower() in names:
        return low + names.index(word.lower())
    if word.isdecimal() and low <= int(word) <= high:
        return int(word)
    known = f", or {names[0]} to {names[-1]}" if names else ""
    raise ValueError(f'"{word}" in "{text}" is no {what}; it must be from {low} to {high}{known}')
