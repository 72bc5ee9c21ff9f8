"""What a policy writes down between two calls: plain data, and not much, as it is copied and saved all the time."""

from collections.abc import Mapping, MutableMapping
from copy import deepcopy
from typing import Any

import msgspec

from pointsman.scaling.answers import TooMuch
from pointsman.scaling.asking import ask
from pointsman.scaling.view import ApplicationView, DeploymentView

MOST_BYTES = 64 * 1024


def ask_with_notes(policy: object, view: DeploymentView | ApplicationView) -> object:
    """As `ask`; but whoever has written down too much has said nothing."""
    answer = ask(policy, view)
    size = size_of(view.state)
    return TooMuch(size, MOST_BYTES) if size > MOST_BYTES else answer


def size_of(notes: Mapping[str, Any]) -> int:
    """Bytes that it takes to save them; what cannot be saved takes none."""
    try:
        return len(msgspec.json.encode(dict(notes)))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return len(msgspec.json.encode(plain(notes)))


def plain(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The notes that can be saved; whatever else a policy put there is lost with the process."""
    kept: dict[str, Any] = {}
    for name, note in list(notes.items()):  # a policy that takes too long may still be writing
        try:
            kept[str(name)] = msgspec.json.decode(msgspec.json.encode(note))
        except (TypeError, ValueError, OverflowError, RecursionError):
            continue
    return kept


def copied(notes: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For a policy to write to on its thread, while others may read these."""
    try:
        return deepcopy(notes)
    except Exception:  # something of its own that cannot be copied; then it has to be careful itself
        return notes
