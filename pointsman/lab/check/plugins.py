"""The promises of filters, scorers, pickers and profile handlers."""

from collections.abc import Callable
from numbers import Real
from typing import Any, TypeAlias

from pointsman.lab.check.dice import SEEDS, loaded
from pointsman.lab.check.situations import Situation
from pointsman.selection import (
    Cycle,
    MaxScorePicker,
    Profile,
    ProfileFailure,
    ProfileResult,
    Ranked,
    Scheduler,
    SchedulingFailure,
    SchedulingResult,
)
from pointsman.types import RequestMetadata

Build: TypeAlias = Callable[[], Any]
Promise: TypeAlias = Callable[[Build, Situation], str | None]


def cycle_of(situation: Situation) -> Cycle[RequestMetadata]:
    """A cycle for the first request."""
    request = situation.requests[0] if situation.requests else RequestMetadata("r0")
    return Cycle(request, now=100.0, seed=situation.seed)


def filters_properly(build: Build, situation: Situation) -> str | None:
    """A filter names only candidates that it was given, each with a reason, and does not raise."""
    roster = situation.fleet().roster
    try:
        rejected = list(build().rejections(cycle_of(situation), roster))
    except Exception as error:
        return f"rejections() raised {type(error).__name__}: {error}"
    for entry in rejected:
        if not (isinstance(entry, tuple) and len(entry) == 2):
            return f"rejections() gave {entry!r}, not a pair of a candidate and a reason"
        who, why = entry
        if not any(who is candidate for candidate in roster):
            return f"rejections() named {who!r}, who is not a candidate"
        if not isinstance(why, str) or not why.strip():
            return f"rejections() turned {who} away without a reason"
    return None


def scores_properly(build: Build, situation: Situation) -> str | None:
    """A scorer gives one number in [0, 1] per candidate, also for those never measured, and does not raise."""
    roster = situation.fleet().roster
    try:
        scores = list(build().scores(cycle_of(situation), roster))
    except Exception as error:
        return f"scores() raised {type(error).__name__}: {error}"
    if len(scores) != len(roster):
        return f"scores() gave {len(scores)} scores for {len(roster)} candidates"
    for endpoint, score in zip(roster, scores, strict=True):
        if not (isinstance(score, Real) and 0 <= float(score) <= 1):
            measured = "" if endpoint.metrics is not None else ", which was never measured"
            return f"scores() gave {score} to {endpoint}{measured}; it must be from 0 to 1"
    return None


def picks_properly(build: Build, situation: Situation) -> str | None:
    """A picker returns at least one of those it was given, nobody twice, and does not raise."""
    roster = situation.fleet().roster
    if not len(roster):
        return None
    totals = [float((number * 7 + situation.seed) % 3) for number in range(len(roster))]
    try:
        chosen = list(build().pick(cycle_of(situation), Ranked(roster, totals)))
    except Exception as error:
        return f"pick() raised {type(error).__name__}: {error}"
    if not chosen:
        return f"pick() chose nobody of {len(roster)} candidates"
    if len({id(who) for who in chosen}) != len(chosen):
        return f"pick() chose somebody twice: {chosen}"
    stranger = next((who for who in chosen if not any(who is candidate for candidate in roster)), None)
    return None if stranger is None else f"pick() chose {stranger!r}, who is not a candidate"


class _Nobody:
    def rejections(self, cycle: Cycle[Any], candidates: Any) -> list[tuple[Any, str]]:
        return [(candidate, "nobody is good enough") for candidate in candidates]


def handles_properly(build: Build, situation: Situation) -> str | None:
    """A handler asks only for profiles that exist, comes to an end, and says what came of it, whoever fails."""
    names = ("decode", "prefill", "default")[: 1 + situation.seed % 3]
    failing = situation.seed // 2
    profiles = [
        Profile[Any](name, *([_Nobody()] if place < failing else []), MaxScorePicker())
        for place, name in enumerate(names)
    ]
    try:
        outcome = Scheduler(profiles, build()).run(cycle_of(situation), situation.fleet().roster)
    except Exception as error:
        return f"with profiles {', '.join(names)}: {type(error).__name__}: {error}"
    if isinstance(outcome, SchedulingFailure):
        return None
    if not isinstance(outcome, SchedulingResult):
        return f"process_results() returned a {type(outcome).__name__}"
    primary: ProfileResult[Any] | ProfileFailure[Any] | None = outcome.results.get(outcome.primary)
    if not isinstance(primary, ProfileResult):
        return f'process_results() named "{outcome.primary}" as primary, which chose nobody'
    return None


def repeats(method: str) -> Promise:
    """With the same seed, the same answer."""

    def promise(build: Build, situation: Situation) -> str | None:
        answers = []
        for seed in SEEDS:
            roster = situation.fleet().roster
            if method == "pick" and not len(roster):
                return None
            given = Ranked(roster, [1.0] * len(roster)) if method == "pick" else roster
            with loaded(seed):
                answer = getattr(build(), method)(cycle_of(situation), given)
                answers.append([str(part) for part in answer])
        if answers[0] == answers[1]:
            return None
        return f"{method}() answered differently with the same seed: draw from cycle.chance"

    return promise


PROMISES: dict[str, dict[str, Promise]] = {
    "filter": {"names candidates with reasons": filters_properly, "repeats with the same seed": repeats("rejections")},
    "scorer": {"gives each candidate 0 to 1": scores_properly, "repeats with the same seed": repeats("scores")},
    "picker": {"picks from those it is given": picks_properly, "repeats with the same seed": repeats("pick")},
    "profile handler": {"runs profiles to an end": handles_properly},
}
