"""Who reaches whom: from links between devices to groups of GPUs."""

from collections.abc import Mapping, Sequence


def groups(neighbours: Mapping[str, Sequence[str]], word: str) -> dict[str, str]:
    """Each device that reaches another of them, directly or over switches -> the name of its group: nvlink-0."""
    together: dict[str, set[str]] = {}
    for device, others in neighbours.items():
        merged = {device, *others}
        for one in list(merged):
            merged |= together.get(one, set())
        for one in merged:
            together[one] = merged
    names: dict[int, str] = {}
    found = {}
    for device in neighbours:
        group = together[device]
        if sum(one in neighbours for one in group) > 1:
            found[device] = names.setdefault(id(group), f"{word}-{len(names)}")
    return found
