"""The state of a simulated plane, in memory, and what a simulation has none of: GPU drivers, replicas, listeners."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from pointsman.config.revision import ManifestText
from pointsman.control import InstanceStatus
from pointsman.engines import LaunchSpec
from pointsman.errors import PointsmanError
from pointsman.replica.handles import Transport


class MemoryDocuments:
    """`DocumentStore` of the interface."""

    def __init__(self) -> None:
        self._manifests: list[ManifestText] = []
        self._versions: dict[str, list[ManifestText]] = {}

    def manifest(self) -> tuple[int, ManifestText] | None:
        return (len(self._manifests), self._manifests[-1]) if self._manifests else None

    def save_manifest(self, manifest: ManifestText, at: float) -> int:
        self._manifests.append(manifest)
        return len(self._manifests)

    def applications(self) -> dict[str, ManifestText]:
        return {name: versions[-1] for name, versions in self._versions.items()}

    def application_before(self, name: str) -> ManifestText | None:
        versions = self._versions.get(name, ())
        return versions[-2] if len(versions) > 1 else None

    def save_application(self, name: str, document: ManifestText, at: float) -> None:
        self._versions.setdefault(name, []).append(document)

    def roll_back_application(self, name: str) -> None:
        self._versions[name].pop()

    def delete_application(self, name: str) -> None:
        del self._versions[name]


class MemoryTargets:
    """`TargetStore` of the interface."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._records: defaultdict[str, list[str]] = defaultdict(list)

    def scaling(self) -> dict[str, str]:
        return dict(self._states)

    def save_scaling(self, states: Mapping[str, str]) -> None:
        self._states |= states

    def forget_scaling(self, name: str) -> None:
        self._states.pop(name, None)
        self._records.pop(name, None)

    def scaling_records(self, name: str) -> list[str]:
        return list(self._records[name])

    def note_scaling(self, name: str, record: str) -> None:
        self._records[name].append(record)


class NoGpuMeter:
    """`GpuMeter` of the interface."""

    async def read(self, deployments: Collection[str], instances: Sequence[InstanceStatus]) -> None: ...

    def of(self, deployments: Collection[str], instances: Iterable[InstanceStatus]) -> float | None:
        return None

    def close(self) -> None: ...


class NoReplicas:
    """`ReplicaAccess` and `SharedMemory` of the interface: the code of a pipeline's nodes is not simulated."""

    secret = ""

    @property
    def memory(self) -> "NoReplicas":
        return self

    def introduce(self, launch: LaunchSpec, user_config: bytes) -> LaunchSpec:
        return launch

    def remove(self, names: Iterable[str]) -> None: ...

    def remove_older_than(self, age_s: float) -> None: ...


class NoListener:
    """`AdminListener` of the interface."""

    async def listen(self, connect: Callable[[], Any]) -> None: ...

    def dial(self) -> Transport:
        raise PointsmanError("a simulated plane has no listener; call its methods")

    def close(self) -> None: ...
