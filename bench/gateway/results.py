"""Figures by scenario, proxy and round: medians, and ratios of figures that were measured next to each other."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec

from bench.gateway.measuring import DIRECT, Figures, Memory
from bench.gateway.warm_start import WarmStart

Figure = Callable[[Figures], float]


class Known(msgspec.Struct, frozen=True):
    """A proxy that took part."""

    name: str
    decides: str
    version: str


class Results(msgspec.Struct):
    """Everything that one run found."""

    kind: str
    """Of load generator and backend."""
    proxies: list[Known] = []
    missing: dict[str, str] = {}
    """Why the others did not take part."""
    runs: dict[str, dict[str, list[Figures]]] = {}
    """scenario -> proxy -> rounds; a run that failed holds no requests."""
    memory: dict[str, Memory] = {}
    after_mb: dict[str, float] = {}
    rest_ms: dict[str, float] = {}
    """CPU per second while nobody asks anything."""
    warm_starts: list[WarmStart] = []
    others: float = 0.0
    """The share of the proxies' core that went to processes that are none of ours while we measured."""

    def add(self, scenario: str, proxy: str, figures: Figures) -> None:
        self.runs.setdefault(scenario, {}).setdefault(proxy, []).append(figures)

    def rounds(self, scenario: str, proxy: str) -> Sequence[Figures]:
        return self.runs.get(scenario, {}).get(proxy, [])

    def least(self, scenario: str, proxy: str, figure: Figure) -> float | None:
        """Of all rounds: the one that was disturbed least."""
        return min((figure(figures) for figures in self.rounds(scenario, proxy) if figures.requests), default=None)

    def median(self, scenario: str, proxy: str, figure: Figure) -> float | None:
        """Over the rounds; None: nothing was measured."""
        values = [figure(figures) for figures in self.rounds(scenario, proxy) if figures.requests]
        return median(values) if values else None

    def ratios(self, scenario: str, proxy: str, other: str, figure: Figure) -> list[float]:
        """Each round's: both sides of it were measured within seconds of each other."""
        pairs = zip(self.rounds(scenario, proxy), self.rounds(scenario, other), strict=False)
        return [figure(ours) / figure(theirs) for ours, theirs in pairs if ours.requests and theirs.requests]

    def ratio(self, scenario: str, proxy: str, other: str, figure: Figure) -> float | None:
        """The median of the rounds' ratios."""
        values = self.ratios(scenario, proxy, other, figure)
        return median(values) if values else None

    def added_us(self, scenario: str, proxy: str) -> list[float]:
        """Each round's time to the first event, less that without a proxy."""
        pairs = zip(self.rounds(scenario, proxy), self.rounds(scenario, DIRECT), strict=False)
        return [ours.first_us - bare.first_us for ours, bare in pairs if ours.requests and bare.requests]

    def errors(self, scenario: str, proxy: str) -> int:
        return sum(figures.errors for figures in self.rounds(scenario, proxy))

    def complaints(self) -> Mapping[str, str]:
        """What the first wrong answer of each proxy was."""
        found: dict[str, str] = {}
        for scenario, by_proxy in self.runs.items():
            for proxy, rounds in by_proxy.items():
                for figures in rounds:
                    if figures.errors:
                        found.setdefault(proxy, f"{scenario}: {figures.complaint}")
        return found
