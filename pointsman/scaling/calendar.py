"""Dates by arithmetic: the time of day is a number like any other, and no clock is asked.

The Gregorian calendar in days since 1 January 1970, in eras of 400 years that begin in March, so that the leap day is
the last day of a year.
"""

import msgspec

DAY_S = 86400
DAYS_PER_ERA = 146097
EPOCH = 719468
"""1 January 1970, in days since 1 March of the year 0."""


class Moment(msgspec.Struct, frozen=True):
    """A minute, as on a wall."""

    year: int
    month: int
    day: int
    weekday: int
    """0: Sunday, as cron counts."""
    hour: int
    minute: int

    def __str__(self) -> str:
        return f"{self.year:04}-{self.month:02}-{self.day:02} {self.hour:02}:{self.minute:02}"


def date_of(days: int) -> tuple[int, int, int]:
    """(year, month, day) of a day since 1 January 1970."""
    era, of_era = divmod(days + EPOCH, DAYS_PER_ERA)
    year = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    from_march = (5 * of_year + 2) // 153
    day = of_year - (153 * from_march + 2) // 5 + 1
    month = from_march + 3 if from_march < 10 else from_march - 9
    return year + era * 400 + (month <= 2), month, day


def days_of(year: int, month: int, day: int) -> int:
    """Days since 1 January 1970."""
    era, of_era = divmod(year - (month <= 2), 400)
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * DAYS_PER_ERA + of_era * 365 + of_era // 4 - of_era // 100 + of_year - EPOCH


def weekday_of(days: int) -> int:
    """0: Sunday. The first of January 1970 was a Thursday."""
    return (days + 4) % 7


def moment_of(now: float, utc_offset_s: float = 0.0) -> Moment:
    """What a wall clock shows, so far east of Greenwich."""
    days, seconds = divmod(int((now + utc_offset_s) // 1), DAY_S)
    return Moment(*date_of(days), weekday_of(days), seconds // 3600, seconds // 60 % 60)


def month_ends(now: float) -> float:
    """When the next month begins, in UTC."""
    shown = moment_of(now)
    year, month = divmod(shown.year * 12 + shown.month, 12)
    return float(days_of(year, month + 1, 1) * DAY_S)
