"""A fleet in a terminal: one line per worker, with one bar per GPU."""

import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import msgspec

from pointsman.placement.asks import Claim, Place
from pointsman.placement.fleet import EXCLUSIVE, FREE_BYTES, FREE_CPUS, FREE_MEMORY, TENANTS, Device, Fleet, Host
from pointsman.placement.gpu_models import known_gpu, short_gpu_name
from pointsman.render.text import quantity, text_table
from pointsman.types import WorkerStatus

# The content of a picture of a fleet, as data. Each GPU and each machine's memory is a bar that consists of parts.


CHOSEN = "chosen"
"""The owner of a place that no instance has yet."""


class PartKind(Enum):
    RESERVED = "reserved for the system"
    OTHERS = "used by others"
    CLAIMED = "claimed"
    HELD = "held by an exclusive instance"
    FREE = "free"


class BarPart(msgspec.Struct, frozen=True):
    kind: PartKind
    size_bytes: int
    owner: str = ""
    """The owner of a claim: the deployment, or the instance if the instance belongs to no deployment."""
    instance: str = ""
    chosen: bool = False


class Bar(msgspec.Struct, frozen=True):
    """One GPU, or the memory of one worker."""

    name: str
    total_bytes: int
    parts: tuple[BarPart, ...]
    free_bytes: int
    """Free memory. Below 0 if more memory is claimed or used than there is."""
    held: bool = False
    """Whether an exclusive instance is on this GPU. If so, the free part cannot be used."""
    link: str = ""


class Owner(msgspec.Struct):
    """Totals of one owner of claims, for the legend."""

    instances: int = 0
    gpu_bytes: int = 0
    memory_bytes: int = 0


class BarClaim(msgspec.Struct, frozen=True):
    """A claim on the memory of one GPU or worker, with its instance and its owner."""

    instance: str
    owner: str
    chosen: bool
    claim: Claim


class FleetView:
    """A fleet to draw, and the place to highlight. A place that no instance has is drawn as if an instance had it."""

    def __init__(self, fleet: Fleet, highlight: Place | None = None) -> None:
        self._fleet = fleet
        self._tenants: dict[str, list[BarClaim]] = {}
        self._expected = highlight
        """The place to highlight. None if an instance has it already."""
        self.owners: dict[str, Owner] = {}
        """Owners by name, in the order of their first claims."""
        for one in fleet.occupants.values():
            if one.place is highlight:
                self._expected = None
            self._count(one.instance_id, one.deployment or one.instance_id, one.place, chosen=one.place is highlight)
        if self._expected is not None:
            self._count("", CHOSEN, self._expected, chosen=True)
        self.chosen_workers: frozenset[str] = frozenset(highlight.workers if highlight is not None else ())

    def _count(self, instance: str, owner: str, place: Place, *, chosen: bool) -> None:
        known = self.owners.setdefault(owner, Owner())
        known.instances += 1
        for claim in place.claims:
            known.gpu_bytes += claim.gpu_bytes
            known.memory_bytes += claim.memory_bytes
            self._tenants.setdefault(claim.worker, []).append(BarClaim(instance, owner, chosen, claim))

    def first(self, most: int) -> list[Host]:
        """The workers to draw. If there are more than `most`: those of the highlighted place, then the first others."""
        hosts = list(self._fleet.workers)
        if len(hosts) <= most:
            return hosts
        chosen = [host for host in hosts if host.worker.name in self.chosen_workers]
        others = [host for host in hosts if host.worker.name not in self.chosen_workers]
        return [*chosen, *others[: max(most - len(chosen), 0)]]

    def gpus(self, host: Host) -> list[Bar]:
        """A bar for each GPU with its own memory."""
        if host.worker.unified_memory:
            return []
        tenants: dict[int | None, list[BarClaim]] = {}
        for one in self._tenants.get(host.worker.name, ()):
            tenants.setdefault(one.claim.gpu, []).append(one)
        return [self._gpu(device, tenants.get(device.gpu.index, ())) for device in host.devices]

    def _gpu(self, device: Device, tenants: Sequence[BarClaim]) -> Bar:
        columns, gpu = self._fleet.gpus.columns, device.gpu
        expected = [one.claim for one in tenants if self._expected is not None and one.chosen]
        free = int(columns[FREE_BYTES][device.row]) - sum(claim.gpu_bytes for claim in expected)
        held = bool(columns[EXCLUSIVE][device.row]) or any(c.exclusive or not gpu.shareable for c in expected)
        parts = _parts(
            device.host.worker.reserved_gpu_bytes, gpu.used_bytes, tenants, lambda claim: claim.gpu_bytes, free, held
        )
        return Bar(f"gpu{gpu.index}", gpu.memory_bytes, parts, free, held, gpu.link)

    def memory(self, host: Host) -> Bar:
        """A bar for the memory of the machine. Unified memory includes the memory of the GPUs."""
        worker = host.worker
        tenants = self._tenants.get(worker.name, ())

        def taken(claim: Claim) -> int:
            return claim.memory_bytes + (claim.gpu_bytes if worker.unified_memory else 0)

        free = int(self._fleet.workers.columns[FREE_MEMORY][host.row])
        if self._expected is not None:
            free -= sum(taken(one.claim) for one in tenants if one.chosen)
        parts = _parts(worker.reserved_memory_bytes, worker.used_memory_bytes, tenants, taken, free, held=False)
        return Bar("memory", worker.memory_bytes, parts, free)

    def free_cpus(self, host: Host) -> float:
        free = float(self._fleet.workers.columns[FREE_CPUS][host.row])
        if self._expected is not None:
            free -= sum(claim.cpus for claim in self._expected.claims if claim.worker == host.worker.name)
        return free


def _parts(
    reserved: int, others: int, tenants: Sequence[BarClaim], taken: Callable[[Claim], int], free: int, held: bool
) -> tuple[BarPart, ...]:
    claims: dict[str, BarPart] = {}
    for one in tenants:  # an instance may have several claims on the memory of one worker
        size = taken(one.claim) + (claims[one.instance].size_bytes if one.instance in claims else 0)
        claims[one.instance] = BarPart(PartKind.CLAIMED, size, one.owner, one.instance, one.chosen)
    parts = [
        BarPart(PartKind.RESERVED, reserved),
        BarPart(PartKind.OTHERS, others),
        *claims.values(),
        BarPart(PartKind.HELD if held else PartKind.FREE, max(free, 0)),
    ]
    return tuple(part for part in parts if part.size_bytes > 0)


def gpus_text(host: Host, most: int = 60) -> str:
    """The GPUs of a worker, such as "8 x H100 80GB". Empty if there are none.

    Sizes are left out if the text would be longer than `most`.
    """
    words = ""
    for name_of in (short_gpu_name, _bare_name):
        counts: dict[str, int] = {}
        for device in host.devices:
            name = name_of(device.gpu.model) or "GPU"
            counts[name] = counts.get(name, 0) + 1
        words = " + ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
        if len(words) <= most:
            return words
    return f"{words[: most - 1]}…"


def _bare_name(model: str) -> str:
    return short_gpu_name(model) if (known := known_gpu(model)) is None else known.name


def in_gib(size_bytes: float) -> str:
    """A size in GiB: below 100 with one decimal place, as 38.1; above without, as 1,234."""
    value = size_bytes / 2**30
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


# Totals


class Total(msgspec.Struct):
    """All GPUs of one model."""

    gpus: int = 0
    total_bytes: int = 0
    reserved_bytes: int = 0
    others_bytes: int = 0
    free_bytes: int = 0
    """Free bytes that can be used. Bytes next to an exclusive instance count as held instead."""
    held_bytes: int = 0
    empty: int = 0
    """Number of GPUs without instances or other processes."""
    largest_bytes: int = 0
    """The largest free part of a single GPU."""

    @property
    def claimed_bytes(self) -> int:
        return max(self.total_bytes - self.reserved_bytes - self.others_bytes - self.free_bytes - self.held_bytes, 0)


def totals(fleet: Fleet) -> dict[str, Total]:
    """Totals by model, in the order of the fleet. GPUs of workers with unified memory are left out."""
    found: dict[str, Total] = {}
    names: dict[str, str] = {}
    columns = fleet.gpus.columns
    numbers = zip(columns[FREE_BYTES], columns[TENANTS], columns[EXCLUSIVE], strict=True)
    for device, (free, tenants, exclusive) in zip(fleet.gpus, numbers, strict=True):
        gpu, worker = device.gpu, device.host.worker
        if worker.unified_memory:
            continue
        name = names.get(gpu.model) or names.setdefault(gpu.model, short_gpu_name(gpu.model) or "GPU")
        one = found.setdefault(name, Total())
        one.gpus += 1
        one.total_bytes += gpu.memory_bytes
        one.reserved_bytes += worker.reserved_gpu_bytes
        one.others_bytes += gpu.used_bytes
        one.empty += not tenants and not gpu.used_bytes
        rest = max(int(free), 0)
        if exclusive:
            one.held_bytes += rest
        else:
            one.free_bytes += rest
            if worker.status is WorkerStatus.READY:
                one.largest_bytes = max(one.largest_bytes, rest)
    return found


def headline(fleet: Fleet) -> str:
    """One line about the fleet: 11 workers, 47 GPUs with 2,921 GiB: 41 % claimed, 1 % used by others, 58 % free"""
    by_model = totals(fleet)
    workers = quantity(len(fleet), "worker")
    size = sum(one.total_bytes for one in by_model.values())
    if not size:
        return f"{workers}, {quantity(len(fleet.gpus), 'GPU')}"
    own = sum(one.gpus for one in by_model.values())
    gpus = f"{quantity(own, 'GPU')} with {in_gib(size)} GiB"
    if own < len(fleet.gpus):
        gpus += f" (and {len(fleet.gpus) - own:,} of unified memory)"
    shares = {
        "claimed": sum(one.claimed_bytes for one in by_model.values()),
        "used by others": sum(one.others_bytes for one in by_model.values()),
        "free": sum(one.free_bytes for one in by_model.values()),
    }
    words = ", ".join(f"{share / size:.0%} {word}".replace("%", " %") for word, share in shares.items() if share)
    return f"{workers}, {gpus}: {words}"


SUMMARY_HEADS = ("GPU", "count", "GiB", "claimed", "by others", "free", "empty GPUs", "largest free")


def summary_rows(fleet: Fleet) -> list[list[str]]:
    rows = []
    for name, one in totals(fleet).items():
        sizes = map(in_gib, (one.total_bytes, one.claimed_bytes, one.others_bytes, one.free_bytes))
        rows.append([name, f"{one.gpus:,}", *sizes, f"{one.empty:,}", in_gib(one.largest_bytes)])
    return rows


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvw"
MANY = "+"
"""The mark for deployments for which no letter is left."""
MARKS = {PartKind.RESERVED: "-", PartKind.OTHERS: "x", PartKind.HELD: "~", PartKind.FREE: " "}
CHOSEN_MARK = "#"
OVERCOMMITTED = "!"

MIN_CELLS, MAX_CELLS = 4, 30
"""Minimum and maximum width of a bar."""
BACKGROUNDS = (75, 215, 114, 176, 203, 80, 221, 137, 211, 73)
"""Colours of deployments, chosen from the 256 colours that terminals have."""


def fleet_text(
    fleet: Fleet, *, width: int = 100, color: bool = False, highlight: Place | None = None, rows: int = 40
) -> str:
    """A picture of the fleet. It shows at most `rows` workers, those of the highlighted place first.

    If there are more workers, a table sums up all of them by GPU model.
    """
    view = FleetView(fleet, highlight)
    hosts = view.first(rows)
    drawing = _FleetText(view, width, color)
    lines = [headline(fleet), "", *drawing.table(hosts)]
    if len(hosts) < len(fleet):
        lines += [f"... and {quantity(len(fleet) - len(hosts), 'worker')} more", ""]
        lines += [text_table(SUMMARY_HEADS, summary_rows(fleet))]
    return "\n".join([*lines, "", *drawing.legend()])


class _FleetText:
    """The lines of one picture, and the marks that it uses."""

    def __init__(self, view: FleetView, width: int, color: bool) -> None:
        self._view = view
        self._width = width
        self._color = color
        named = list(view.owners)  # the chosen place comes last and takes no letter
        self._letters = {name: LETTERS[index] if index < len(LETTERS) else MANY for index, name in enumerate(named)}
        self._backgrounds = {name: BACKGROUNDS[index % len(BACKGROUNDS)] for index, name in enumerate(named)}
        self._used: set[str] = set()

    def table(self, hosts: Sequence[Host]) -> list[str]:
        """A table head, and a line for each worker. GPUs that do not fit on the line continue on the next one."""
        names = [_name(host, max(self._width // 4, 8)) for host in hosts]
        kinds = [gpus_text(host, 20) or "CPU only" for host in hosts]
        first, second = (max([*map(len, cells), 6]) for cells in (names, kinds))
        room = max(self._width - first - second - 22, MIN_CELLS + 2)  # 18 for the numbers, 4 between columns
        lines = [f"{'worker':{first}}  {'GPUs':{second}}  {'':{room}}{'free GiB':>9}{'largest':>9}"]
        for host, name, kind in zip(hosts, names, kinds, strict=True):
            bars = self._view.gpus(host) or [self._view.memory(host)]
            open_bars = [bar.free_bytes for bar in bars if not bar.held] or [0]
            free = f"{in_gib(sum(max(size, 0) for size in open_bars)):>9}{in_gib(max(open_bars)):>9}"
            for index, line in enumerate(self._bars(bars, room)):
                before = f"{name:{first}}  {kind:{second}}  " if not index else " " * (first + second + 4)
                lines.append((before + line + (free if not index else "")).rstrip())
        return lines

    def _bars(self, bars: Sequence[Bar], room: int) -> Iterable[str]:
        """Lines with bars side by side. Each line is padded to the width of the room."""
        side_by_side = min(len(bars), max((room - 1) // (MIN_CELLS + 1), 1))
        cells = min((room - 1) // side_by_side - 1, MAX_CELLS)
        for start in range(0, len(bars), side_by_side):
            drawn = [self._bar(bar, cells) for bar in bars[start : start + side_by_side]]
            yield "│" + "".join(f"{one}│" for one in drawn) + " " * (room - 1 - len(drawn) * (cells + 1))

    def _bar(self, bar: Bar, cells: int) -> str:
        too_much = bar.free_bytes < 0
        if too_much:
            self._used.add(OVERCOMMITTED)
            cells -= 1
        drawn = ""
        for part, length in zip(bar.parts, shared_out(bar.parts, cells), strict=True):
            text = self._mark(part) * length
            self._used.update(text)
            if part.kind in (PartKind.FREE, PartKind.HELD):
                number = _short(bar.free_bytes)
                text = text[len(number) :] + number if len(number) <= length else text
            drawn += self._painted(text, part)
        return drawn + (OVERCOMMITTED if too_much else "")

    def _mark(self, part: BarPart) -> str:
        if part.kind is not PartKind.CLAIMED:
            return MARKS[part.kind]
        return CHOSEN_MARK if part.chosen else self._letters[part.owner]

    def _painted(self, text: str, part: BarPart) -> str:
        if not self._color or not text or part.kind is PartKind.FREE:
            return text
        if part.chosen:
            return f"\x1b[1;30;48;5;226m{text}\x1b[0m"
        if part.kind is PartKind.CLAIMED:
            return f"\x1b[30;48;5;{self._backgrounds[part.owner]}m{text}\x1b[0m"
        return f"\x1b[90m{text}\x1b[0m"

    def legend(self) -> list[str]:
        """The meanings of the letters and other marks that are in the picture."""
        owners = [
            f"{self._painted(letter, BarPart(PartKind.CLAIMED, 1, name))} {name} ({_taken(self._view.owners[name])})"
            for name, letter in self._letters.items()
            if letter in self._used and letter != MANY
        ]
        marks = {
            CHOSEN_MARK: CHOSEN,
            MANY: "further deployments",
            **{mark: kind.value for kind, mark in MARKS.items() if kind is not PartKind.FREE},
            OVERCOMMITTED: "more is claimed than there is",
        }
        meanings = [f"{mark} {words}" for mark, words in marks.items() if mark in self._used]
        return [*_wrapped(owners, self._width), *_wrapped([*meanings, "numbers: GiB free"], self._width)]


def shared_out(parts: Sequence[BarPart], cells: int) -> list[int]:
    """Number of cells for each part, in proportion to its size. If there are enough cells, each claim and the other
    processes get at least one."""
    total = sum(part.size_bytes for part in parts)
    if not total:
        return [0] * len(parts)
    exact = [part.size_bytes * cells / total for part in parts]
    least = [int(part.kind in (PartKind.CLAIMED, PartKind.OTHERS)) for part in parts]
    shares = [max(int(share), one) for share, one in zip(exact, least, strict=True)]
    indexes = range(len(parts))
    while sum(shares) > cells:
        shares[max(indexes, key=lambda index: (shares[index] > least[index], shares[index] - exact[index]))] -= 1
    while sum(shares) < cells:
        shares[max(indexes, key=lambda index: exact[index] - shares[index])] += 1
    return shares


def _name(host: Host, most: int) -> str:
    worker = host.worker
    name = worker.name if len(worker.name) <= most else f"{worker.name[: most - 1]}…"
    return name if worker.status is WorkerStatus.READY else f"{name} ({worker.status.value})"


def _short(size_bytes: int) -> str:
    """A size in GiB inside a bar, such as 38 or 3.8."""
    value = size_bytes / 2**30
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _taken(owner: Owner) -> str:
    size = owner.gpu_bytes or owner.memory_bytes
    return f"{quantity(owner.instances, 'instance')}, {in_gib(size)} GiB{'' if owner.gpu_bytes else ' of memory'}"


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and _length(lines[-1]) + 3 + _length(word) <= width:
            lines[-1] += f"   {word}"
        else:
            lines.append(word)
    return lines


def _length(text: str) -> int:
    """The visible length of a text, without its escape codes."""
    return len(re.sub(r"\x1b\[[0-9;]*m", "", text))
