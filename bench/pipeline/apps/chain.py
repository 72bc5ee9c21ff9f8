"""A large array from one replica to the next: how long the transfer takes, by the clock that both share."""

import time
from typing import Any

import numpy as np

import pointsman as pm


@pm.deployment
def make(count: int, value: float) -> dict[str, Any]:
    array = np.full(count, value)
    return {"made": time.monotonic(), "array": array}


@pm.deployment
def total(sent: dict[str, Any]) -> dict[str, float]:
    arrived = time.monotonic()
    found = float(sent["array"].sum())
    return {"handed_s": arrived - sent["made"], "read_s": time.monotonic() - sent["made"], "sum": found}


with pm.InputNode() as given:
    made = make.bind(given[0], given[1])
    dag = total.bind(made)
