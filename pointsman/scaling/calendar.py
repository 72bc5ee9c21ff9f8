"""What clocks on walls show at a moment, and where they hang. The moment is always given: no clock is asked."""

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo

_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")


def zone_of(name: str) -> tzinfo:
    """Europe/Berlin, with its summer time; UTC; or +05:30, which is always that. Raises ValueError for others."""
    offset = _OFFSET.fullmatch(name)
    try:
        if offset is not None:
            east = timedelta(hours=int(offset[2]), minutes=int(offset[3]))
            return timezone(east if offset[1] == "+" else -east)
        if name == "UTC":
            return UTC
        from zoneinfo import ZoneInfo  # here, as it takes memory, and most schedules need none

        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # the last: no such zone, or no zones at all
        raise ValueError(
            f'there is no time zone "{name}" here; write for example Europe/Berlin, UTC or +05:30 '
            "(names come from the system, or from: pip install tzdata)"
        ) from None


def shown(now: float, zone: tzinfo = UTC) -> datetime:
    """What a clock shows there."""
    return datetime.fromtimestamp(now, zone)


def in_words(moment: datetime) -> str:
    """To the minute."""
    return f"{moment:%Y-%m-%d %H:%M}"


def in_utc(now: float) -> str:
    """2025-03-05T13:00:00Z: what is written down; whoever shows it may show it on another clock."""
    return f"{shown(now):%Y-%m-%dT%H:%M:%SZ}"


def month_ends(now: float) -> float:
    """When the next month begins, in UTC."""
    year, month = divmod(shown(now).year * 12 + shown(now).month, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()
