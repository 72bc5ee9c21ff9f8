"""How near two instances are: in the same NVLink or NUMA domain, on the same host, in the same rack, or far apart.

The `host` and the labels of an instance say where it is. A domain counts only within one host. An unknown location is
far from everything. The published plugins use a `Location` instead: host, rack, zone and region, from labels of any
name.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias, get_args

from pointsman.types import ExecutionInstance

NVLINK_DOMAIN = "pointsman/nvlink-domain"
NUMA_NODE = "pointsman/numa-node"
RACK = "pointsman/rack"

UNKNOWN = "(unknown)"


class Nearness(Enum):
    """What two instances share, from nearest to farthest."""

    SAME_INSTANCE = "same instance"
    SAME_NVLINK = "same NVLink domain"
    SAME_NUMA = "same NUMA node"
    SAME_HOST = "same host"
    SAME_RACK = "same rack"
    FAR = "far"


def nearness(one: ExecutionInstance, other: ExecutionInstance) -> Nearness:
    """The nearest thing that two instances share."""
    if one.instance_id == other.instance_id:
        return Nearness.SAME_INSTANCE
    if one.host and one.host == other.host:
        if _share(NVLINK_DOMAIN, one, other):
            return Nearness.SAME_NVLINK
        if _share(NUMA_NODE, one, other):
            return Nearness.SAME_NUMA
        return Nearness.SAME_HOST
    return Nearness.SAME_RACK if _share(RACK, one, other) else Nearness.FAR


def _share(label: str, one: ExecutionInstance, other: ExecutionInstance) -> bool:
    value = one.labels.get(label)
    return value is not None and value == other.labels.get(label)


Level: TypeAlias = Literal["host", "rack", "zone", "region"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Levels from nearest to farthest."""


class Location(NamedTuple):
    """Where an instance is; levels that are not known are empty."""

    host: str = ""
    rack: str = ""
    zone: str = ""
    region: str = ""

    def common(self, other: "Location") -> int | None:
        """The nearest level that both share, as an index of `LEVELS`; None if there is none. Unknown is not equal."""
        pairs = zip(self, other, strict=True)
        return next((level for level, (here, there) in enumerate(pairs) if here and here == there), None)

    @classmethod
    def read(cls, written: str) -> "Location":
        """Read host=a,rack=b,zone=c,region=d. Levels may be absent; other names and malformed parts are skipped."""
        pairs = (part.partition("=") for part in written.split(","))
        return cls(**{level: value for level, equals, value in pairs if equals and level in LEVELS})


def tree(instances: Iterable[ExecutionInstance]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """rack -> host -> domain -> instance ids, each sorted."""
    racks: dict[str, dict[str, dict[str, list[str]]]] = {}
    for instance in sorted(instances, key=lambda instance: instance.instance_id):
        rack = racks.setdefault(instance.labels.get(RACK, UNKNOWN), {})
        host = rack.setdefault(instance.host or UNKNOWN, {})
        host.setdefault(_domain(instance), []).append(instance.instance_id)
    return {
        rack: {host: dict(sorted(domains.items())) for host, domains in sorted(hosts.items())}
        for rack, hosts in sorted(racks.items())
    }


def _domain(instance: ExecutionInstance) -> str:
    if NVLINK_DOMAIN in instance.labels:
        return f"nvlink {instance.labels[NVLINK_DOMAIN]}"
    if NUMA_NODE in instance.labels:
        return f"numa {instance.labels[NUMA_NODE]}"
    return UNKNOWN
