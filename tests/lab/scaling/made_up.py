"""Generated load, the same each time."""

import math
import random

from pointsman.lab.scaling import Series

BIN_S = 600.0
DAY = 144


def daily(days: int, noise: float = 0.08, seed: int = 7) -> Series:
    """A quiet night, a busy afternoon, and an irregular burst every ten minutes."""
    rng = random.Random(seed)
    rates = [
        200 * (1 + 0.5 * math.sin(2 * math.pi * place / DAY)) * math.exp(rng.gauss(0, noise))
        for place in range(days * DAY)
    ]
    return Series("daily", BIN_S, rates)


def moody(days: int, seed: int = 7) -> Series:
    """Calm for a day, wild for a day, and so on; it goes from where it is, and comes back in the long run."""
    rng = random.Random(seed)
    rates, away = [], 0.0
    for place in range(days * DAY):
        away = 0.9 * away + rng.gauss(0, 0.15 if place // DAY % 2 else 0.02)
        rates.append(200 * math.exp(away))
    return Series("moody", BIN_S, rates)


def steps(*rates: float) -> Series:
    return Series("steps", BIN_S, rates)
