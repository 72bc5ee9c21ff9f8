"""What a policy answered, understood: a wish, or in words what is wrong with it."""

import operator
import reprlib

import msgspec

from pointsman.scaling.policy import Wish
from pointsman.selection.text import one_line

MOST = 1_000_000
"""More replicas than this is a mistake, whoever asks for them."""
LONGEST = 500
"""Characters of a policy's own words."""


class TooSlow(msgspec.Struct, frozen=True):
    """The answer came too late to count, or has not come yet."""

    seconds: float


class TooMuch(msgspec.Struct, frozen=True):
    """It has written down more in `view.state` than is kept for it."""

    size_bytes: int
    limit_bytes: int


class Stay(msgspec.Struct, frozen=True):
    """Nothing was said about this deployment: it stays as it is."""


def understood(answer: object, time_limit_s: float = 0.5) -> Wish | Stay | str:
    """A wish with a whole number, or what is wrong."""
    if isinstance(answer, Stay):
        return answer
    if isinstance(answer, TooSlow):
        return _late(answer.seconds, time_limit_s)
    if isinstance(answer, TooMuch):
        size, limit = (f"{bytes_ / 1024:.0f} KiB" for bytes_ in (answer.size_bytes, answer.limit_bytes))
        return f"wrote {size} into view.state; it may keep {limit}, and what it wrote this time is forgotten"
    if isinstance(answer, BaseException):
        return one_line(f"raised {type(answer).__name__}: {_text(answer)}", LONGEST).rstrip(": ")
    wish = answer if isinstance(answer, Wish) else Wish(answer)  # type: ignore[arg-type]
    replicas = _whole(wish.replicas)
    if replicas is None or not 0 <= replicas <= MOST:
        found = f"a Wish for {_shown(wish.replicas)}" if wish is answer else _shown(answer)
        return f"returned {found}; it must be a whole number of replicas from 0 to {MOST:,}, or a Wish for one"
    return Wish(replicas, _said(wish.why), _said(wish.refused))


def _late(seconds: float, time_limit_s: float) -> str:
    """How long it has taken so far, unless that is only just too long."""
    limit = f"{time_limit_s:g} s"
    so_far = f"{seconds:.3g} s"
    if seconds <= time_limit_s or so_far == limit:
        return f"took more than {limit} (timeLimit)"
    return f"took {so_far}; it may take {limit} (timeLimit)"


def _whole(value: object) -> int | None:
    """3, 3.0 and the whole numbers of other libraries; neither True nor 2.5."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # an object may do anything when it is asked
        return None


def _shown(value: object) -> str:
    try:
        return one_line(reprlib.repr(value), LONGEST)
    except Exception:
        return f"a {type(value).__name__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def _said(words: object) -> str:
    return one_line(words, LONGEST) if isinstance(words, str) else ""
