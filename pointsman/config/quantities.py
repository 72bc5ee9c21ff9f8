"""Amounts with a unit, as Kubernetes writes them: 500, 1k, 1Gi."""

import re
from decimal import Decimal
from math import ceil
from typing import Annotated

import msgspec


class QuantityText(msgspec.Struct, frozen=True):
    """In YAML this may be written 500, 2k or 1Gi."""


Quantity = Annotated[int, QuantityText()]

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_FORM = re.compile(r"([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d{1,2})?)(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E|)")


def quantity(text: str) -> int:
    """Read 500, 2k, 1Gi, 1e9; fractions round up. Raises ValueError, with an example, for anything else."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not an amount; write for example 500, 2k or 1Gi')
    amount = Decimal(match[1]) * (_DECIMAL | _BINARY)[match[2]]
    return ceil(amount)
