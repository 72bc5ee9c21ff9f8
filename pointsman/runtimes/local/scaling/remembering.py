"""What scaling must not forget, in the store of the plane. What cannot be read any more is as good as nothing."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from pointsman.runtimes.local.scaling.deciders import ScalingDecider
from pointsman.runtimes.local.scaling.scaled import Saved, Scaled
from pointsman.runtimes.local.store import Store
from pointsman.scaling.policy import plain
from pointsman.scaling.records import ScalingRecord


class ScalingStore:
    """Reads and writes. Before a store is opened, and after it is closed, nothing is kept."""

    def __init__(self) -> None:
        self.store: Store | None = None

    def states(self) -> dict[str, str]:
        """Everything that was saved, by deployment or by the key of a decider: for the next two."""
        return {} if self.store is None else self.store.scaling()

    def state_of(self, deployment: str, states: Mapping[str, str]) -> Saved:
        """What was saved of a deployment."""
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(states.get(deployment, "{}"), type=Saved)
        return Saved()

    def notes_of(self, decider: ScalingDecider, states: Mapping[str, str]) -> dict[str, Any]:
        """What the policy of an application wrote down, if it is still the same."""
        with suppress(msgspec.MsgspecError):
            recipe, notes = msgspec.json.decode(states.get(decider.key, '["", {}]'), type=tuple[str, dict[str, Any]])
            return notes if recipe == decider.recipe else {}
        return {}

    def records_of(self, deployment: str) -> list[ScalingRecord]:
        """Its last changes, the oldest first."""
        records = []
        for text in [] if self.store is None else self.store.scaling_records(deployment):
            with suppress(msgspec.MsgspecError):
                records.append(msgspec.json.decode(text, type=ScalingRecord))
        return records

    def keep(self, records: Iterable[ScalingRecord]) -> None:
        """Add these."""
        if self.store is not None:
            for record in records:
                self.store.note_scaling(record.deployment, msgspec.json.encode(record).decode())

    def save(self, scaled: Iterable[Scaled], deciders: Iterable[ScalingDecider] = ()) -> None:
        """How things stand, of deployments and of the policies of applications."""
        if self.store is not None:
            states = {one.name: msgspec.json.encode(one.saved()).decode() for one in scaled}
            theirs = {one.key: [one.recipe, plain(one.notes or {})] for one in deciders if one.of_application}
            self.store.save_scaling(states | {key: msgspec.json.encode(one).decode() for key, one in theirs.items()})

    def forget(self, deployment: str) -> None:
        """It is not scaled any more."""
        if self.store is not None:
            self.store.forget_scaling(deployment)
