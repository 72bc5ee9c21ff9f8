"""A rehearsal of placement: every instance of a manifest is placed on a fleet, and everything is told.

Enters: a fleet that may be changed, and asks. Leaves: for each instance its place and who else might have had it; or
why there is none, worker by worker and tier by tier, and what would have to change.
"""

from collections.abc import Iterable, Sequence
from itertools import count, islice
from typing import Any

import msgspec

from pointsman.placement.asks import Ask, Place
from pointsman.placement.fleet import Fleet
from pointsman.placement.hints import hints
from pointsman.placement.moves import Defragmentation, Preemption, defragment, preempt
from pointsman.placement.needs import Need
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.render.text import text_table

MOST_WORKERS = 12
"""Workers whose reasons are listed one by one; the others are counted."""


class Rehearsal:
    """What would become of asks, one after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._placer = Placer(fleet)
        self._asks = [_ask_again(instance_id, place, fleet) for instance_id, place in fleet.instances().items()]
        self._seen: set[str] = set()
        self._there: list[str] = []
        self._told: list[tuple[Placed | Refused, list[str]]] = []

    def place(self, deployments: Iterable[tuple[str, int, Ask | None]]) -> list[str]:
        """Place what is missing of so many instances of each deployment. Those of which the need is not known."""
        unknown = []
        for name, replicas, template in deployments:
            if template is None:
                unknown.append(name)
                continue
            there = sum(self._fleet.deployment_of(one) == name for one in self._fleet.instances())
            self._there += [f"{name}: {there} of {replicas} are there already"] if there else []
            names = (f"{name}-{number}" for number in count(1))
            free = (one for one in names if self._fleet.place_of(one) is None and one not in self._seen)
            missing = list(islice(free, max(replicas - there, 0)))
            self._seen.update(missing)
            asks = [msgspec.structs.replace(template, instance_id=instance_id) for instance_id in missing]
            if template.all_or_nothing and asks:
                trial = Placer(self._fleet.copy()).place_all(asks, all_or_nothing=True)
                asks = asks if len(trial) == len(asks) else [trial[0].ask]
            for ask in asks:
                self._place(ask)
        return unknown

    @property
    def refused(self) -> int:
        """How many have no place."""
        return sum(isinstance(outcome, Refused) for outcome, _ in self._told)

    def _place(self, ask: Ask) -> None:
        outcome = self._placer.place(ask)
        advice: list[str] = []
        if isinstance(outcome, Placed):
            self._fleet.claim(ask.instance_id, outcome.place, ask.deployment, ask.priority)
            self._asks.append(ask)
        else:
            advice = [hint.words for hint in hints(ask, self._placer)]
            stopped = preempt(ask, self._fleet)
            moved = defragment(ask, self._fleet, self._asks)
            advice += [] if stopped is None else [_stopping(stopped)]
            advice += [] if moved is None else [_moving(moved)]
        self._told.append((outcome, advice))

    def as_list(self) -> list[dict[str, Any]]:
        """Plain data, ready for JSON."""
        return [self._as_dict(outcome, advice) for outcome, advice in self._told]

    def _as_dict(self, outcome: Placed | Refused, advice: list[str]) -> dict[str, Any]:
        trace = None if outcome.trace is None else outcome.trace.as_dict()
        if isinstance(outcome, Refused):
            return {**outcome.as_dict(), "placed": False, "what_would_help": advice, "trace": trace}
        return {
            "instance": outcome.ask.instance_id,
            "placed": True,
            "place": msgspec.to_builtins(outcome.place),
            "score": outcome.score,
            "runner_ups": [{"worker": worker, "score": score} for worker, score in outcome.runner_ups],
            "trace": trace,
        }

    def as_text(self) -> str:
        """For a terminal."""
        told = [
            _placed_text(outcome) if isinstance(outcome, Placed) else _refused_text(outcome, advice)
            for outcome, advice in self._told
        ]
        return "\n\n".join([*self._there, *told])


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


def _refused_text(outcome: Refused, advice: list[str]) -> str:
    lines = [f"{outcome.ask.instance_id}: no place"]
    runs = () if outcome.trace is None else outcome.trace.profiles
    for number, run in enumerate(runs):
        *demands, fit = run.stages or [("", ())]
        if number == 0:  # they turn the same workers away in every tier
            lines += _why_not("not considered", [reason for _, rejected in demands for reason in rejected])
        lines += _why_not(run.profile, list(fit[1]))
    lines += [f"  what would help: {'; '.join(advice)}"] if advice else []
    return "\n".join(lines)


def _why_not(what: str, reasons: Sequence[tuple[object, str]]) -> list[str]:
    """In a line if it is the same for all, else worker by worker."""
    kinds = {why for _, why in reasons}
    if len(kinds) <= 1:
        who = f" ({len(reasons)} workers)" if len(reasons) > 1 else ""
        return [f"  {what}: {why}{who}" for why in kinds]
    rows = [[str(worker), why] for worker, why in reasons[:MOST_WORKERS]]
    rows += [[f"{len(reasons) - MOST_WORKERS} more", ""]] if len(reasons) > MOST_WORKERS else []
    return [f"  {what}:", *(f"    {line}" for line in text_table(["worker", "why not"], rows).splitlines())]


def _stopping(found: Preemption) -> str:
    return f"stopping {', '.join(found.victims)} would make room on {', '.join(found.placed.place.workers)}"


def _moving(found: Defragmentation) -> str:
    moves = ", ".join(f"{move.instance_id} to {move.after}" for move in found.moves)
    return f"moving {moves} would make room on {', '.join(found.placed.place.workers)}"


def _ask_again(instance_id: str, place: Place, fleet: Fleet) -> Ask:
    """What an instance that runs already would ask for if it had to move: as much as it has."""
    gpus = [claim for claim in place.claims if claim.gpu is not None]
    need = Need.fixed(
        max((claim.gpu_bytes for claim in gpus), default=0),
        sum(claim.memory_bytes for claim in place.claims),
        max(len(gpus), 1),
    )
    return Ask(
        instance_id=instance_id,
        deployment=fleet.deployment_of(instance_id),
        need=need,
        gpu_share=max((claim.gpu_share for claim in gpus), default=0.0) or None,
        exclusive=any(claim.exclusive for claim in gpus),
        cpus=sum(claim.cpus for claim in place.claims),
        priority=fleet.priority_of(instance_id),
    )
