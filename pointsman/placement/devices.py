"""The GPUs of a fleet in arrays: which of them an ask may have, and what is true of all GPUs of a worker.

What depends on the members alone is worked out once and kept until they change.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from pointsman.placement.asks import Ask
from pointsman.placement.fleet import EXCLUSIVE, FREE_BYTES, FREE_MEMORY, FREE_SHARE, TENANTS, Fleet, Host
from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Rows: TypeAlias = NDArray[np.intp]
    Mask: TypeAlias = NDArray[np.bool_]

MOST_MASKS = 256
"""Kinds of asks whose static part is remembered."""
SHARE_SLACK = 1e-9
"""Shares are fractions that were added and taken away."""


class Devices:
    """All GPUs of one generation of a fleet, row by row; those of a worker are neighbours."""

    def __init__(self, fleet: Fleet) -> None:
        devices = list(fleet.gpus)
        hosts = list(fleet.workers)
        self._fleet = fleet
        self.generation = fleet.generation
        self.workers = np.array([device.host.row for device in devices], dtype=np.intp)
        """By GPU: the row of its worker."""
        models = sorted({device.gpu.model for device in devices})
        self.models = models
        code = {model: number for number, model in enumerate(models)}
        self.model_codes = np.array([code[device.gpu.model] for device in devices], dtype=np.intp)
        links: dict[tuple[int, str], int] = {}
        self.link_codes = np.array(
            [
                links.setdefault((device.host.row, device.gpu.link), len(links)) if device.gpu.link else -1
                for device in devices
            ],
            dtype=np.intp,
        )
        """GPUs of a worker that are linked have the same number; -1: over PCIe."""
        self.link_workers = np.array([row for row, _ in links], dtype=np.intp)
        """By that number: the row of their worker."""
        self._unified = np.array([device.host.worker.unified_memory for device in devices], dtype=bool)
        self._any_unified = bool(self._unified.any())
        with_gpus = [host.row for host in hosts if host.devices]
        self._with_gpus = np.array(with_gpus, dtype=np.intp)
        self._starts = np.array([host.devices[0].row for host in hosts if host.devices], dtype=np.intp)
        self._width = len(hosts)
        self._masks: dict[object, Mask] = {}

    def free(self, ask: Ask) -> "Floats":
        """Bytes free on each GPU; where memory is unified, no more than the machine has left beside the instance."""
        free = self._fleet.gpus.columns[FREE_BYTES]
        if not self._any_unified:
            return free  # type: ignore[return-value]
        machine = np.asarray(self._fleet.workers.columns[FREE_MEMORY])[self.workers] - ask.need.host_bytes
        return np.where(self._unified, np.minimum(free, machine), free)

    def able(self, ask: Ask) -> "Mask":
        """The GPUs that it may have, however full they are."""
        columns = self._fleet.gpus.columns
        able = self._suited(ask) & (np.asarray(columns[EXCLUSIVE]) <= 0)
        tenants = np.asarray(columns[TENANTS])
        if ask.exclusive:
            able &= tenants <= 0
        if ask.gpu_share is not None:
            able &= np.asarray(columns[FREE_SHARE]) >= ask.gpu_share - SHARE_SLACK
        return able

    def _suited(self, ask: Ask) -> "Mask":
        """By make and by hand."""
        key = (ask.engine.vendors, ask.gpu_models, ask.gpus)
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= MOST_MASKS:
                self._masks.clear()
            mask = self._masks[key] = np.array(
                [
                    device.gpu.vendor in ask.engine.vendors
                    and (not ask.gpu_models or device.gpu.model in ask.gpu_models)
                    and (not ask.gpus or (str(device.host), device.gpu.index) in ask.gpus)
                    for device in self._fleet.gpus
                ],
                dtype=bool,
            )
        return mask

    # Per worker

    def smallest(self, values: "Floats") -> "Floats":
        """The least value among the GPUs of each worker; inf without GPUs."""
        return self._reduced(np.minimum.reduceat, values, np.inf)

    def largest(self, values: "Floats") -> "Floats":
        """The largest; -inf without GPUs."""
        return self._reduced(np.maximum.reduceat, values, -np.inf)

    def count(self, mask: "Mask") -> "Floats":
        """How many GPUs of each worker are in a set."""
        return self._reduced(np.add.reduceat, mask.astype(np.float64), 0.0)

    def _reduced(self, reduce: "Callable[[Floats, Rows], Floats]", values: "Floats", empty: float) -> "Floats":
        found = np.full(self._width, empty)
        if len(self._starts):
            found[self._with_gpus] = reduce(values, self._starts)
        return found

    def count_alike(self, mask: "Mask") -> "Floats":
        """How many GPUs of one model each worker has in a set, at most."""
        most = np.zeros(self._width)
        for code in range(len(self.models)):
            np.maximum(most, self.count(mask & (self.model_codes == code)), out=most)
        return most

    def count_linked(self, mask: "Mask") -> "Floats":
        """How many linked GPUs each worker has in a set, at most."""
        most = np.zeros(self._width)
        if len(self.link_workers):
            linked = self.link_codes[mask & (self.link_codes >= 0)]
            np.maximum.at(most, self.link_workers, np.bincount(linked, minlength=len(self.link_workers)))
        return most

    def of(self, host: Host) -> slice:
        """The rows of a worker's GPUs."""
        first = host.devices[0].row if host.devices else 0
        return slice(first, first + len(host.devices))
