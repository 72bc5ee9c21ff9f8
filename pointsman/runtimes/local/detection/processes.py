"""Which processes belong to our instances: engines start processes of their own, one per GPU."""

from collections.abc import Iterable
from pathlib import Path

from pointsman.runtimes.local.detection.files import text


def family(pids: Iterable[int], proc: Path) -> frozenset[int]:
    """These processes and all that descend from them."""
    found = set(pids)
    if not found:
        return frozenset()
    children: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        # "12 (any (name) at all) S 7 ...": the parent is the second word after the last parenthesis
        words = text(folder / "stat").rpartition(")")[2].split()
        if len(words) > 1 and words[1].isdecimal() and folder.name.isdecimal():
            children.setdefault(int(words[1]), []).append(int(folder.name))
    new = list(found)
    while new:
        born = [child for child in children.get(new.pop(), ()) if child not in found]
        found.update(born)
        new += born
    return frozenset(found)
