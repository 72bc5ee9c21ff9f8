"""A rehearsal of placement: places every instance of a manifest on a described fleet.

Enters: asks, and a fleet, which the rehearsal changes. Leaves: for each instance, its place and the next best places.
For an instance without a place: the reasons against every worker in every tier, and what would help.
"""

from collections.abc import Iterable, Sequence
from itertools import count, islice
from typing import Any

import msgspec

from pointsman.placement.asks import Ask, Need
from pointsman.placement.fleet import Fleet, Occupant
from pointsman.placement.hints import hints
from pointsman.placement.moves import defragment, preempt
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.reasons import Reason
from pointsman.render.text import text_table

MAX_WORKERS = 12
"""Maximum number of workers whose reasons are listed. Further workers are only counted."""


class Rehearsal:
    """Places asks one after the other, and keeps the outcomes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._placer = Placer(fleet)
        self._asks = [_ask_again(one) for one in fleet.occupants.values()]
        self._seen: set[str] = set()
        self._running: list[str] = []
        self._outcomes: list[tuple[Placed | Refused, list[Reason]]] = []

    def place(self, deployments: Iterable[tuple[str, int, Ask | None]]) -> list[str]:
        """Place the missing instances of each deployment. Returns the deployments whose need is unknown."""
        unknown = []
        for name, replicas, template in deployments:
            if template is None:
                unknown.append(name)
                continue
            there = len(self._fleet.occupants.of(name))
            self._asks = [  # as in the manifest, because an instance that the manifest pins must not move
                msgspec.structs.replace(template, instance_id=one.instance_id) if one.deployment == name else one
                for one in self._asks
            ]
            self._running += [f"{name}: {there} of {replicas} are there already"] if there else []
            names = (f"{name}-{number}" for number in count(1))
            free = (one for one in names if one not in self._fleet.occupants and one not in self._seen)
            missing = list(islice(free, max(replicas - there, 0)))
            self._seen.update(missing)
            for taken, instance_id in enumerate(missing):
                ask = msgspec.structs.replace(template, instance_id=instance_id)
                if not self._place(ask, len(missing) - taken) and ask.all_or_nothing:
                    break
        return unknown

    @property
    def refused(self) -> int:
        return sum(isinstance(outcome, Refused) for outcome, _ in self._outcomes)

    def _place(self, ask: Ask, missing: int) -> bool:
        """Place one instance. Returns whether it got a place."""
        outcome = self._placer.take(ask, missing)
        advice: list[Reason] = []
        if isinstance(outcome, Placed):
            self._asks.append(ask)
        else:
            advice = [hint.reason for hint in hints(ask, self._placer)]
            room = preempt(ask, self._fleet), defragment(ask, self._fleet, self._asks)
            advice += [one.reason for one in room if one is not None]
        self._outcomes.append((outcome, advice))
        return isinstance(outcome, Placed)

    def as_list(self) -> list[dict[str, Any]]:
        return [self._as_dict(outcome, advice) for outcome, advice in self._outcomes]

    def _as_dict(self, outcome: Placed | Refused, advice: list[Reason]) -> dict[str, Any]:
        trace = None if outcome.trace is None else outcome.trace.as_dict()
        if isinstance(outcome, Refused):
            help_ = [reason.as_dict() for reason in advice]
            return {**outcome.as_dict(), "placed": False, "what_would_help": help_, "trace": trace}
        return {
            "instance": outcome.ask.instance_id,
            "placed": True,
            "place": msgspec.to_builtins(outcome.place),
            "overcommitted": None if outcome.overcommitted is None else outcome.overcommitted.as_dict(),
            "score": outcome.score,
            "runner_ups": [{"worker": worker, "score": score} for worker, score in outcome.runner_ups],
            "trace": trace,
        }

    def as_text(self) -> str:
        texts = [
            _placed_text(outcome) if isinstance(outcome, Placed) else _refused_text(outcome, advice)
            for outcome, advice in self._outcomes
        ]
        return "\n\n".join([*self._running, *texts])


def _placed_text(outcome: Placed) -> str:
    place = outcome.place
    split = []
    if place.tensor_parallel_size > 1:
        split.append(f"tensor parallel {place.tensor_parallel_size}")
    if place.pipeline_parallel_size > 1:
        split.append(f"{place.pipeline_parallel_size} stages of {', '.join(map(str, place.stage_layers))} layers")
    if place.gpu_layers:
        split.append(f"{place.gpu_layers} of {outcome.ask.need.layers} layers on the GPU")
    if place.overcommitted:
        split.append("although it does not fit")
    how = f" ({'; '.join(split)})" if split else ""
    lines = [f"{outcome.ask.instance_id}: {place.tier.value}{how}", f"  {place}"]
    if outcome.runner_ups:
        others = ", ".join(f"{worker} {score:.1f}" for worker, score in outcome.runner_ups)
        lines.append(f"  score {outcome.score:.1f}; next best: {others}")
    return "\n".join(lines)


def _refused_text(outcome: Refused, advice: list[Reason]) -> str:
    lines = [f"{outcome.ask.instance_id}: no place"]
    for tier, reasons in outcome.reasons().items():
        lines += _why_not(tier, list(reasons.items()))
    lines += [f"  what would help: {'; '.join(map(str, advice))}"] if advice else []
    return "\n".join(lines)


def _why_not(what: str, reasons: Sequence[tuple[str, Reason]]) -> list[str]:
    """The reasons against workers: one line if the reason is the same for all of them, else a table."""
    first = reasons[0][1]
    if all(reason == first for _, reason in reasons):
        count = f" ({len(reasons)} workers)" if len(reasons) > 1 else ""
        return [f"  {what}: {first}{count}"]
    rows = [[worker, str(reason)] for worker, reason in reasons[:MAX_WORKERS]]
    rows += [[f"{len(reasons) - MAX_WORKERS} more", ""]] if len(reasons) > MAX_WORKERS else []
    return [f"  {what}:", *(f"    {line}" for line in text_table(["worker", "why not"], rows).splitlines())]


def _ask_again(one: Occupant) -> Ask:
    """The ask with which a running instance would move. It asks for as much as the instance has now."""
    claims = one.place.claims
    gpus = [claim for claim in claims if claim.gpu is not None]
    need = Need.fixed(
        max((claim.gpu_bytes for claim in gpus), default=0),
        sum(claim.memory_bytes for claim in claims),
        max(len(gpus), 1),
    )
    return Ask(
        instance_id=one.instance_id,
        deployment=one.deployment,
        need=need,
        gpu_share=max((claim.gpu_share for claim in gpus), default=0.0) or None,
        exclusive=any(claim.exclusive for claim in gpus),
        cpus=sum(claim.cpus for claim in claims),
        priority=one.priority,
    )
