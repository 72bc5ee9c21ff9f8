"""Cron expressions mean what they mean everywhere, on the clocks of any place."""

import re
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pointsman.scaling.calendar import Cron, in_utc, month_ends, shown, zone_of

MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2400, 1, 1))
EPOCH = datetime(1970, 1, 1)


@given(MOMENTS)
@example(datetime(2025, 12, 31, 23, 59, 59))
def test_the_end_of_a_month(when: datetime) -> None:
    end = datetime(when.year + when.month // 12, when.month % 12 + 1, 1)
    assert month_ends((when - EPOCH).total_seconds()) == (end - EPOCH).total_seconds()


def at(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("cron", "now", "latest"),
    [
        ("0 9 * * *", "2025-03-05 09:00", "2025-03-05 09:00"),
        ("0 9 * * *", "2025-03-05 08:59", "2025-03-04 09:00"),
        ("*/15 * * * *", "2025-03-05 08:59", "2025-03-05 08:45"),
        ("5/20 8-9 * * *", "2025-03-05 12:00", "2025-03-05 09:45"),
        ("0 9 * * mon-fri", "2025-03-09 12:00", "2025-03-07 09:00"),
        ("0 9 * * 1-5", "2025-03-09 12:00", "2025-03-07 09:00"),
        ("0 9 * * FRI-SUN", "2025-03-13 12:00", "2025-03-09 09:00"),
        ("0 9 * * 7", "2025-03-13 12:00", "2025-03-09 09:00"),
        ("0 9 * * 0", "2025-03-13 12:00", "2025-03-09 09:00"),
        ("30 6,18 1 jan,jul *", "2025-03-05 09:00", "2025-01-01 18:30"),
        ("0 23 1 12 *", "2025-03-05 09:00", "2024-12-01 23:00"),
        ("0 0 29 2 *", "2027-03-05 09:00", "2024-02-29 00:00"),
        ("0 0 29 2 *", "2104-02-28 23:59", "2096-02-29 00:00"),  # 2100 has none
        ("0 0 13 * fri", "2025-03-05 09:00", "2025-02-28 00:00"),  # either of them
        ("0 0 */2 * mon", "2025-03-05 09:00", "2025-03-03 00:00"),  # both: */2 is not a restriction of its own
    ],
)
def test_the_latest_match(cron: str, now: str, latest: str) -> None:
    assert Cron(cron).latest(at(now)) == at(latest)


@pytest.mark.parametrize(
    ("cron", "zone", "now", "latest"),
    [
        ("0 9 * * *", "Asia/Tokyo", "2025-03-05 03:00", "2025-03-05 00:00"),
        ("0 9 * * *", "+0900", "2025-03-05 03:00", "2025-03-05 00:00"),
        ("0 9 * * *", "-05:30", "2025-03-05 15:00", "2025-03-05 14:30"),
        ("0 9 * * *", "Europe/Berlin", "2025-03-29 12:00", "2025-03-29 08:00"),
        ("0 9 * * *", "Europe/Berlin", "2025-03-30 12:00", "2025-03-30 07:00"),  # summer time since the night
        ("0 9 * * *", "Europe/Berlin", "2025-03-30 06:59", "2025-03-29 08:00"),
        ("0 0 1 * *", "America/New_York", "2025-03-31 23:00", "2025-03-01 05:00"),
        ("30 2 * * *", "Europe/Berlin", "2025-03-30 02:00", "2025-03-30 01:30"),  # there was no half past two
        ("30 2 * * *", "Europe/Berlin", "2025-10-26 02:00", "2025-10-26 00:30"),  # there were two
    ],
)
def test_the_latest_match_in_a_time_zone(cron: str, zone: str, now: str, latest: str) -> None:
    assert Cron(cron).latest(at(now), zone_of(zone)) == at(latest)


@given(MOMENTS, st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "+05:45"]))
def test_the_latest_match_is_never_in_the_future(when: datetime, zone: str) -> None:
    now = (when - EPOCH).total_seconds()
    latest = Cron("*/10 * * * *").latest(now, zone_of(zone))
    assert latest is not None
    assert 0 <= now - latest <= 2 * 3600, "an hour that comes twice counts once"


@pytest.mark.parametrize("name", ["Berlin", "", "../etc/passwd", "+25:00", "+5"])
def test_an_unknown_time_zone_is_an_error(name: str) -> None:
    with pytest.raises(
        ValueError, match=f'there is no time zone "{re.escape(name)}" here; write for example Europe/Berlin'
    ):
        zone_of(name)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0 8 31 2 *", "there is no day 31 in feb"),
        ("0 8 30 feb *", "there is no day 30 in feb"),
        ("0 8 31 2,4,6,9,11 *", "there is no day 31 in feb or apr or jun or sep or nov"),
    ],
)
def test_a_date_that_never_comes_is_an_error(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f'"{re.escape(text)}" never comes: {why}'):
        Cron(text)


@pytest.mark.parametrize("text", ["0 0 29 2 *", "0 0 30,29 2 *", "0 0 31 2,3 *", "0 0 31 2 mon"])
def test_a_rare_date_is_allowed(text: str) -> None:
    assert Cron(text).latest(at("2025-03-05 09:00")) is not None


def test_matches_older_than_eight_years_are_ignored() -> None:
    first_of_february_and_monday = Cron("0 0 */31 2 mon")
    assert first_of_february_and_monday.latest(at("2027-02-01 09:00")) == at("2027-02-01 00:00")
    assert first_of_february_and_monday.latest(at("2037-03-05 09:00")) is None


@given(MOMENTS, st.sampled_from(["* * * * *", "*/7 3-20/4 * * *", "0 9 * * 1-5", "15 2 1,15 * *", "1 1 13 * 5"]))
def test_matches_agree_with_a_naive_reading(when: datetime, text: str) -> None:
    """A minute is one of its moments exactly if it is the latest one at that minute."""
    cron, minute, hour, day, _, weekday = Cron(text), *text.split()
    now = ((when - EPOCH).total_seconds() // 60) * 60
    clock = shown(now)
    latest = cron.latest(now)
    assert latest is not None
    assert latest <= now
    right_time = matches(minute, clock.minute) and matches(hour, clock.hour)
    if day != "*" and weekday != "*":
        right_day = matches(day, clock.day) or matches(weekday, clock.isoweekday() % 7)
    else:
        right_day = matches(day, clock.day) and matches(weekday, clock.isoweekday() % 7)
    assert (latest == now) == (right_time and right_day)
    assert now - latest < 8 * 366 * 86400


def matches(field: str, value: int) -> bool:
    """A naive reading of what the expressions above use."""
    if field == "*":
        return True
    span, _, step = field.partition("/")
    numbers = [int(number) for number in span.replace("*", "0").replace("-", ",").split(",")]
    if "-" in span or span == "*":
        last = numbers[1] if "-" in span else 59
        return value in range(numbers[0], last + 1, int(step or 1))
    return value in numbers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 9 * *", "has 4 fields; a cron expression has five"),
        ("60 9 * * *", '"60" in "60 9 * * *" is no minute; it must be from 0 to 59'),
        ("0 9 * * mond", '"mond" in "0 9 * * mond" is no day of the week; it must be from 0 to 7, or sun to sat'),
        ("0 24 * * *", "is no hour; it must be from 0 to 23"),
        ("0 9 0 * *", "is no day of the month; it must be from 1 to 31"),
        ("0 9 32 * *", "is no day of the month; it must be from 1 to 31"),
        ("0 9 * 13 *", "is no month; it must be from 1 to 12, or jan to dec"),
        ("0 9 * * 8", "is no day of the week; it must be from 0 to 7"),
        ("0 20-8 * * *", '"20-8" in "0 20-8 * * *" is empty'),
        ("*/0 9 * * *", "is empty"),
        ("a-b-c 9 * * *", "is no minute; write for example"),
    ],
)
def test_an_invalid_cron_expression_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Cron(text)


def test_times_are_written_in_utc() -> None:
    assert in_utc(1_741_179_605.9) == "2025-03-05T13:00:05Z"
    assert datetime.fromisoformat(in_utc(1_741_179_605.9)).timestamp() == 1_741_179_605
