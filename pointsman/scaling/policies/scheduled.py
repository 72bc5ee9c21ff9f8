"""Replicas by a schedule."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from pointsman.parameters import Parameters, ReadBy, Time
from pointsman.scaling.calendar import Cron, in_words, shown, zone_of
from pointsman.scaling.policies.sizing import checked
from pointsman.scaling.policy import DeploymentView, Wish


class ScheduleEntry(Parameters, frozen=True):
    """A number of replicas from each match of a cron expression on."""

    cron: Annotated[str, ReadBy(Cron)]
    replicas: Annotated[int, Meta(ge=0)]
    duration: Time | None = None
    """How long it holds; None: until another entry without a duration begins."""


class Scheduled:
    """What the schedule says for this time; 0 where it says nothing."""

    def __init__(self, entries: Sequence[ScheduleEntry], time_zone: Annotated[str, ReadBy(zone_of)] = "UTC") -> None:
        if not entries:
            raise ValueError("entries is empty; write for example {cron: 0 9 * * mon-fri, replicas: 4, duration: 8h}")
        for entry in entries:
            checked(f'duration of "{entry.cron}"', entry.duration)
            if entry.replicas < 0:
                raise ValueError(f'replicas of "{entry.cron}" must be 0 or more, found {entry.replicas}')
        self.zone = zone_of(time_zone)
        self.entries = [(entry, Cron(entry.cron)) for entry in entries]

    def desired_replicas(self, view: DeploymentView) -> Wish:
        lasting: list[tuple[int, float, ScheduleEntry]] = []
        begun: list[tuple[float, int, ScheduleEntry]] = []
        for index, (entry, cron) in enumerate(self.entries):
            start = cron.latest(view.now, self.zone)
            if start is not None and entry.duration is None:
                begun.append((start, index, entry))
            elif start is not None and entry.duration is not None and view.now < start + entry.duration:
                lasting.append((entry.replicas, start, entry))
        if lasting:  # if entries overlap, the largest number holds
            replicas, start, entry = max(lasting, key=lambda one: one[0])
        elif begun:
            start, _, entry = max(begun, key=lambda one: one[:2])
            replicas = entry.replicas
        else:
            return Wish(0, f"the schedule has nothing for {in_words(shown(view.now, self.zone))}")
        since = in_words(shown(start, self.zone))
        return Wish(replicas, f'scheduled "{entry.cron}" since {since}: {replicas}')
