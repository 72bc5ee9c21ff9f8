"""What a policy answered, understood: a wish, or in words what is wrong with it."""

import operator
import reprlib

import msgspec

from pointsman.scaling.policy import Wish

MOST = 1_000_000
"""More replicas than this is a mistake, whoever asks for them."""
LONGEST = 500
"""Characters of a policy's own words."""


class TooSlow(msgspec.Struct, frozen=True):
    """The answer came too late to count, or has not come yet."""

    seconds: float


class Stay(msgspec.Struct, frozen=True):
    """Nothing was said about this deployment: it stays as it is."""


def understood(answer: object, time_limit_s: float = 0.5) -> Wish | Stay | str:
    """A wish with a whole number, or what is wrong."""
    if isinstance(answer, Stay):
        return answer
    if isinstance(answer, TooSlow):
        return f"took {answer.seconds:.3g} s; it may take {time_limit_s:g} s (timeLimit)"
    if isinstance(answer, BaseException):
        return _cut(f"raised {type(answer).__name__}: {_text(answer)}".rstrip(": "))
    wish = answer if isinstance(answer, Wish) else Wish(answer)  # type: ignore[arg-type]
    replicas = _whole(wish.replicas)
    if replicas is None or not 0 <= replicas <= MOST:
        return f"returned {_shown(answer)}; it must be a whole number of replicas, 0 or more, or a Wish with one"
    return Wish(replicas, _said(wish.why), _said(wish.refused))


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
        return _cut(reprlib.repr(value))
    except Exception:
        return f"a {type(value).__name__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def _said(words: object) -> str:
    return _cut(words) if isinstance(words, str) else ""


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."
