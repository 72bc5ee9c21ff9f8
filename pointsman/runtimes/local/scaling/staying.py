"""How long a deployment may keep its place when somebody else needs it."""

from pointsman.runtimes.local.scaling.scaled import Scaled

STAY_S = 10.0
"""Who was just loaded stays as long as loading took, and need not stay longer than this."""
LOADS_PER_TURN = 5
"""Whoever is busy stays so many times as long as loading took, so that a machine does more than loading."""


def may_go(one: Scaled, now: float) -> bool:
    """Whether all of it may be unloaded for somebody else, if nobody uses it."""
    return one.may_rest and one.target > 0 and _is_settled(one, now)


def spares(one: Scaled, now: float) -> int:
    """How many of its instances may go for somebody else, although they are used: all but the fewest that it must have,
    and all when its turn is over. Shards go all or not at all."""
    if one.followers or not _is_settled(one, now):
        return 0
    least = 0 if _turn_is_over(one, now) else max(one.guard.limits.min_replicas, 1)
    return max(one.presence.ready - least, 0)


def _turn_is_over(one: Scaled, now: float) -> bool:
    """Whether it had its place for as long as it may count on while it is busy."""
    turn_s = max(one.guard.limits.turn_s, LOADS_PER_TURN * (one.start_up_s or 0.0))
    return one.may_rest and one.presence.loaded_for_s(now) >= turn_s


def _is_settled(one: Scaled, now: float) -> bool:
    """It has been there for a while, and nobody ordered it to stay."""
    return one.guard.ordered is None and one.presence.loaded_for_s(now) >= min(STAY_S, one.start_up_s or STAY_S)
