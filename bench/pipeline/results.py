"""The figures of each server in each round: medians, and ratios within the same round."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec

from bench.pipeline.load import Loaded


class Diamond(msgspec.Struct, frozen=True):
    """The diamond under the load of this many clients."""

    loaded: Loaded
    cpu_ms: float
    """Of all processes of the server, per request."""


class Handing(msgspec.Struct, frozen=True):
    """The transfer of an array of 10 MB, in milliseconds: medians."""

    handed_ms: float
    """From its creation until the next replica starts."""
    read_ms: float
    """Until the next replica has read all of it."""


class Copying(msgspec.Struct, frozen=True):
    """Copies of the same array within one process, in milliseconds: medians."""

    again_ms: float
    """`array.copy()` repeatedly: into the memory of the previous copy, which is allocated."""
    fresh_ms: float
    """`array.copy()` into memory that the kernel must map first, page by page."""


class Round(msgspec.Struct):
    """One measurement of every server."""

    copying: Copying
    diamonds: dict[str, dict[int, Diamond]] = {}
    """server -> clients"""
    handings: dict[str, Handing] = {}
    resident_mb: dict[str, float] = {}
    """With the diamond, after all requests."""
    idle_share: dict[str, float] = {}
    """Share of a core, while idle."""


class InProcess(msgspec.Struct, frozen=True):
    """The diamond without a server, in CPU microseconds: the best of several tries."""

    execute_us: float
    plain_us: float
    """The same three calls in plain Python."""


Figure = Callable[[Round], float | None]
"""A figure of a round; None if it was not measured."""


class Results(msgspec.Struct):
    """The results of one run."""

    versions: dict[str, str]
    missing: dict[str, str] = {}
    """Why something was not measured."""
    rounds: list[Round] = []
    in_process: InProcess | None = None

    def values(self, figure: Figure) -> list[float]:
        """Of the rounds that have it."""
        return [value for value in map(figure, self.rounds) if value is not None]

    def median(self, figure: Figure) -> float | None:
        return middle(self.values(figure))

    def ratios(self, figure: Figure, beside: Figure) -> list[float]:
        """Of the rounds that have both."""
        pairs = [(figure(each), beside(each)) for each in self.rounds]
        return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]

    def complaints(self) -> Mapping[str, str]:
        """The first wrong response of each server."""
        found: dict[str, str] = {}
        for each in self.rounds:
            for server, by_clients in each.diamonds.items():
                for clients, diamond in by_clients.items():
                    if diamond.loaded.errors:
                        found.setdefault(server, f"{clients} clients: {diamond.loaded.complaint}")
        return found


def middle(values: Sequence[float]) -> float | None:
    """The median, if there is one."""
    return median(values) if values else None


def of_diamond(server: str, clients: int, figure: Callable[[Diamond], float]) -> Figure:
    """A figure of the diamond; None without a correct response."""

    def find(found: Round) -> float | None:
        diamond = found.diamonds.get(server, {}).get(clients)
        return figure(diamond) if diamond and diamond.loaded.requests else None

    return find


def of_handing(server: str, figure: Callable[[Handing], float]) -> Figure:
    """A figure of the transfer of the array."""

    def find(found: Round) -> float | None:
        handing = found.handings.get(server)
        return figure(handing) if handing else None

    return find


def of_server(server: str, figures: Callable[[Round], Mapping[str, float]]) -> Figure:
    """One of the figures that every server has."""
    return lambda found: figures(found).get(server)
