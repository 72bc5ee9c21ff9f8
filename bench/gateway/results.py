"""Figures by scenario, proxy and round: medians, and ratios within a round."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec

from bench.gateway.measuring import DIRECT, Figures, Memory
from bench.gateway.warm_start import WarmStart

Figure = Callable[[Figures], float]


class MeasuredProxy(msgspec.Struct, frozen=True):
    name: str
    selection: str
    version: str


class Results(msgspec.Struct):
    """All figures of one run."""

    kind: str
    """Language of the load generator and the backend."""
    proxies: list[MeasuredProxy] = []
    unavailable: dict[str, str] = {}
    """Why the other proxies were not measured."""
    runs: dict[str, dict[str, list[Figures]]] = {}
    """scenario -> proxy -> rounds; a failed round has no requests."""
    memory: dict[str, Memory] = {}
    after_mb: dict[str, float] = {}
    idle_ms: dict[str, float] = {}
    """CPU time per second without requests."""
    warm_starts: list[WarmStart] = []
    other_share: float = 0.0
    """The share of the proxies' core used by unrelated processes during the measurement."""

    def add(self, scenario: str, proxy: str, figures: Figures) -> None:
        self.runs.setdefault(scenario, {}).setdefault(proxy, []).append(figures)

    def rounds(self, scenario: str, proxy: str) -> Sequence[Figures]:
        return self.runs.get(scenario, {}).get(proxy, [])

    def minimum(self, scenario: str, proxy: str, figure: Figure) -> float | None:
        """Minimum over the rounds: the least disturbed one."""
        return min((figure(figures) for figures in self.rounds(scenario, proxy) if figures.requests), default=None)

    def median(self, scenario: str, proxy: str, figure: Figure) -> float | None:
        """Median over the rounds; None if nothing was measured."""
        values = [figure(figures) for figures in self.rounds(scenario, proxy) if figures.requests]
        return median(values) if values else None

    def ratios(self, scenario: str, proxy: str, other: str, figure: Figure) -> list[float]:
        """Ratio of each round, whose two sides were measured within seconds of each other."""
        pairs = zip(self.rounds(scenario, proxy), self.rounds(scenario, other), strict=False)
        return [figure(ours) / figure(theirs) for ours, theirs in pairs if ours.requests and theirs.requests]

    def ratio(self, scenario: str, proxy: str, other: str, figure: Figure) -> float | None:
        """Median of the ratios of the rounds."""
        values = self.ratios(scenario, proxy, other, figure)
        return median(values) if values else None

    def added_us(self, scenario: str, proxy: str) -> list[float]:
        """Time to the first event that the proxy adds to a direct connection, in each round."""
        pairs = zip(self.rounds(scenario, proxy), self.rounds(scenario, DIRECT), strict=False)
        return [ours.first_us - bare.first_us for ours, bare in pairs if ours.requests and bare.requests]

    def errors(self, scenario: str, proxy: str) -> int:
        return sum(figures.errors for figures in self.rounds(scenario, proxy))

    def first_errors(self) -> Mapping[str, str]:
        """The first wrong response of each proxy, by name."""
        found: dict[str, str] = {}
        for scenario, by_proxy in self.runs.items():
            for proxy, rounds in by_proxy.items():
                for figures in rounds:
                    if figures.errors:
                        found.setdefault(proxy, f"{scenario}: {figures.first_error}")
        return found
