"""The GPUs of a fleet in arrays: which GPUs an ask may have, and aggregates by worker.

Results that depend only on the members of the fleet are computed once, and kept until the members change.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from pointsman.placement.asks import GENERATIONS, Ask
from pointsman.placement.fleet import (
    EXCLUSIVE,
    FREE_BYTES,
    FREE_MEMORY,
    FREE_SHARE,
    TENANTS,
    Device,
    Fleet,
    Host,
)
from pointsman.placement.gpu_models import gpu_generation, is_model
from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Rows: TypeAlias = NDArray[np.intp]
    Mask: TypeAlias = NDArray[np.bool_]
    Codes: TypeAlias = NDArray[np.int8]
else:
    Floats = Rows = Mask = Codes = Any

MAX_CACHED_MASKS = 256
"""Maximum number of kinds of asks for which the suitable GPUs are cached."""
SHARE_SLACK = 1e-9
"""Tolerance for rounding errors: shares are added and subtracted."""

ABLE, OTHER_KIND, TAKEN, NOT_ALONE, SMALL_SHARE = range(5)
OBSTACLES = {OTHER_KIND: "other_kind", TAKEN: "taken", NOT_ALONE: "not_empty", SMALL_SHARE: "small_share"}
"""Why an ask may not have a GPU, however much is free on it. The values are facts in the reason `no-gpu-available`."""


class Devices:
    """All GPUs in one numbering of a fleet, row by row. GPUs of the same worker have neighbouring rows."""

    def __init__(self, fleet: Fleet) -> None:
        devices = list(fleet.gpus)
        self._fleet = fleet
        self.generation = fleet.generation
        self.by_worker = ByWorker(fleet)
        self.workers = self.by_worker.workers
        """The row of the worker, per GPU."""
        self._alike = {words: _codes(devices, words) for words in (False, True, GENERATIONS)}
        """For each value of `mixed_gpus`, a number per GPU. GPUs with equal numbers may be in the same instance."""
        self.unified = np.array([host.worker.unified_memory for host in fleet.workers], dtype=bool)
        self._sizes = np.array([device.gpu.memory_bytes for device in devices], dtype=np.float64)
        self._any_unified = any(device.host.worker.unified_memory for device in devices)
        self._masks: dict[object, Mask] = {}

    def free(self, ask: Ask) -> Floats:
        """Free bytes on each GPU, as far as the ask may use them. With unified memory, these are at most what the
        machine has left after `host_bytes`. An engine that takes a share of a GPU gets the whole share or nothing."""
        free = np.array(self._fleet.gpus.columns[FREE_BYTES])  # a copy: reasons are read after the fleet has changed
        free = np.minimum(free, self.machine_free(ask)[self.workers]) if self._any_unified else free
        if ask.gpu_utilization is None:
            return free
        taken = np.floor(self._sizes * ask.gpu_utilization)
        return np.where(free >= taken, taken, 0.0)

    def machine_free(self, ask: Ask) -> Floats:
        """For each worker, the bytes that all of its GPUs together can give; infinite unless memory is unified."""
        if not self._any_unified:
            return np.full(len(self.unified), np.inf)
        left = np.asarray(self._fleet.workers.columns[FREE_MEMORY]) - ask.need.host_bytes
        return np.where(self.unified, left, np.inf)

    def able(self, ask: Ask) -> Mask:
        """The GPUs that the ask may have, however full these are."""
        return np.asarray(self.obstacles(ask) == ABLE)

    def obstacles(self, ask: Ask) -> Codes:
        """For each GPU, the key in `OBSTACLES` that says why the ask may not have it; `ABLE` if it may."""
        columns = self._fleet.gpus.columns
        found = np.zeros(len(self.workers), dtype=np.int8)
        if ask.gpu_share is not None:
            found[np.asarray(columns[FREE_SHARE]) < ask.gpu_share - SHARE_SLACK] = SMALL_SHARE
        if ask.exclusive:
            found[np.asarray(columns[TENANTS]) > 0] = NOT_ALONE
        found[np.asarray(columns[EXCLUSIVE]) > 0] = TAKEN
        found[~self._suited(ask)] = OTHER_KIND
        return found

    def _suited(self, ask: Ask) -> Mask:
        """GPUs whose vendor and model the ask allows. If GPUs were chosen by hand, only these."""
        key = (ask.engine.vendors, ask.gpu_models, ask.gpus)
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= MAX_CACHED_MASKS:
                self._masks.clear()
            mask = self._masks[key] = np.array(
                [
                    device.gpu.vendor in ask.engine.vendors
                    and (not ask.gpu_models or is_model(device.gpu.model, ask.gpu_models))
                    and (not ask.gpus or (str(device.host), device.gpu.index) in ask.gpus)
                    for device in self._fleet.gpus
                ],
                dtype=bool,
            )
        return mask

    def kinds(self, mask: Mask, *, mixed: bool | str) -> list[Mask]:
        """The GPUs in a set, grouped by what one instance may have: by model or, if GPUs may be mixed, by generation or
        by vendor."""
        codes = self._alike[mixed]
        return [mask & (codes == code) for code in np.unique(codes[mask])]

    def of(self, host: Host) -> slice:
        """The rows of a worker's GPUs."""
        first = host.devices[0].row if host.devices else 0
        return slice(first, first + len(host.devices))


def alike(device: Device, mixed: bool | str) -> tuple[str, str]:
    """What the GPUs of one instance have in common: the vendor, and the model or generation unless any may be mixed."""
    gpu = device.gpu
    if not mixed:
        return gpu.vendor, gpu.model
    return gpu.vendor, "" if mixed == GENERATIONS else gpu_generation(gpu.model)


def _codes(devices: list[Device], mixed: bool | str) -> Rows:
    numbers: dict[tuple[str, str], int] = {}
    return np.array([numbers.setdefault(alike(device, mixed), len(numbers)) for device in devices], dtype=np.intp)


class ByWorker:
    """Aggregates values per GPU over the GPUs of each worker."""

    def __init__(self, fleet: Fleet) -> None:
        devices, hosts = list(fleet.gpus), list(fleet.workers)
        self.workers = np.array([device.host.row for device in devices], dtype=np.intp)
        """The row of the worker, per GPU."""
        links: dict[tuple[int, str], int] = {}
        self._link_codes = np.array(
            [
                links.setdefault((device.host.row, device.gpu.link), len(links)) if device.gpu.link else -1
                for device in devices
            ],
            dtype=np.intp,
        )
        """A number per GPU. Linked GPUs of a worker have the same number. A GPU without a link has -1."""
        self._link_workers = np.array([row for row, _ in links], dtype=np.intp)
        """For each of these numbers, the row of the worker."""
        self._with_gpus = np.array([host.row for host in hosts if host.devices], dtype=np.intp)
        self._starts = np.array([host.devices[0].row for host in hosts if host.devices], dtype=np.intp)
        self._width = len(hosts)
        self._indexes = np.array([index for host in hosts for index in range(len(host.devices))], dtype=np.intp)
        """For each GPU, its index among the GPUs of its worker."""
        self._max_gpus = max((len(host.devices) for host in hosts), default=0)

    def smallest(self, values: Floats) -> Floats:
        """The smallest value among the GPUs of each worker; inf for a worker without GPUs."""
        return self._reduced(np.minimum.reduceat, values, np.inf)

    def largest(self, values: Floats) -> Floats:
        """The largest value among the GPUs of each worker; -inf for a worker without GPUs."""
        return self._reduced(np.maximum.reduceat, values, -np.inf)

    def count(self, mask: Mask) -> Floats:
        """The number of GPUs of each worker that are in a set."""
        return self._reduced(np.add.reduceat, mask.astype(np.float64), 0.0)

    def _reduced(self, reduce: Callable[[Floats, Rows], Floats], values: Floats, empty: float) -> Floats:
        found = np.full(self._width, empty)
        if len(self._starts):
            found[self._with_gpus] = reduce(values, self._starts)
        return found

    def count_linked(self, mask: Mask) -> Floats:
        """For each worker, the size of the largest group of linked GPUs in a set."""
        most = np.zeros(self._width)
        if len(self._link_workers):
            linked = self._link_codes[mask & (self._link_codes >= 0)]
            np.maximum.at(most, self._link_workers, np.bincount(linked, minlength=len(self._link_workers)))
        return most

    def nth_smallest(self, values: Floats, number: int) -> Floats:
        """For each worker, the smallest value that `number` of its GPUs do not exceed; inf if it has fewer GPUs."""
        if not len(self._starts):
            return np.full(self._width, np.inf)
        rows = np.full((self._width, max(self._max_gpus, number)), np.inf)
        rows[self.workers, self._indexes] = values
        return np.sort(rows, axis=1)[:, number - 1]
