"""Sizes of memory as people write them, and what is wrong with those that are none."""

from math import isfinite
from typing import Any

from pointsman.config.problems import FieldPath, Problems
from pointsman.config.quantities import quantity
from pointsman.config.validation import INVALID
from pointsman.config.wording import found


def size(data: Any) -> int:
    """Bytes: 80Gi, 80GiB, 80GB, 85899345920. Raises ValueError, with an example, for anything else."""
    if isinstance(data, str):
        number = data.replace(" ", "")
        for form in (number, number.removesuffix("B")):
            try:
                return quantity(form)
            except ValueError:
                continue
    elif isinstance(data, int | float) and not isinstance(data, bool) and isfinite(data):
        return quantity(str(data))
    raise ValueError(f"expected a size such as 80Gi, 80GB or a number of bytes, found {found(data)}")


class Sizes:
    """Reads the sizes of one document; what is wrong with them is noted, and counts as nothing."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def read(self, data: Any, path: FieldPath, *, least: int = 0, most: int | None = None) -> int:
        """Bytes within bounds; `most`: what there is, None or 0 if that is not known."""
        if data is None or data is INVALID:
            return 0
        try:
            value = size(data)
        except ValueError as error:
            self._problems.add(path, str(error))
            return 0
        if value < least:
            self._problems.add(path, f"must be at least {least}, found {found(data)}")
        elif most and value > most:
            self._problems.add(path, f"is more than there is ({_gib(most)}), found {found(data)}")
        return value


def _gib(value: int) -> str:
    """For messages: 79.6 GiB."""
    return f"{value / 2**30:.1f} GiB"
