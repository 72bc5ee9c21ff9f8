"""The fleet of a replay. It need not exist: it is a number of engines on measured hardware, or a manifest.

Enters: `16x70B|a100_sxm|vllm|tp8` or a file, and a policy. Leaves: the manifest that the simulation runs. The one rule:
a manifest stays as it is, except for the scheduling of the deployment whose policy is tried.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config import load_manifest
from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText
from pointsman.config.yaml import read_yaml, text_of
from pointsman.errors import PointsmanError, UnknownName
from pointsman.lab.traffic.policies import TriedPolicy
from pointsman.lab.traffic.recording import BLOCK_TOKENS
from pointsman.simulator.performance import constants
from pointsman.types import Gpu, Worker

ENGINES = re.compile(r"(\d+)x(\S+)")
TENSOR_PARALLEL = re.compile(r"\|tp(\d+)$")
DEPLOYMENT = "fleet"
MACHINE_GPUS, MACHINE_GPU_BYTES, MACHINE_BYTES, MACHINE_CPUS = 8, 80 << 30, 2 << 40, 256.0
"""The size of each machine on which the instances of a manifest are placed."""
MACHINES = 64


class LabFleet(msgspec.Struct, frozen=True):
    """The fleet that serves a recording."""

    text: str
    """The text that names the fleet."""
    document: dict[str, Any]
    """A manifest, as plain data."""
    folder: str
    gpus: int = 0
    """Number of GPUs of each instance. 0 if the manifest determines it."""

    def manifest(self, policy: TriedPolicy | None, deployment: str = "") -> ManifestText:
        """The manifest, with this policy for a deployment. If `policy` is None, the manifest is unchanged.

        If `deployment` is empty, it means the only deployment.
        """
        document = self.document
        if policy is not None:
            chosen = self._chosen(deployment)
            document = document | {
                "deployments": [
                    one | {"scheduling": policy.section} if one is chosen else one for one in document["deployments"]
                ]
            }
        folder = (policy.folder if policy is not None and not self.folder else self.folder) or str(Path.cwd())
        return ManifestText(json.dumps(document), folder, self.text)

    def plan(self, policy: TriedPolicy | None, deployment: str = "") -> PointsmanPlan:
        """The plan that the manifest builds. Raises a `ConfigError` if the manifest has problems."""
        text = self.manifest(policy, deployment)
        return load_manifest(text.text, text.folder, text.file)

    def _chosen(self, deployment: str) -> dict[str, Any]:
        known: dict[str, dict[str, Any]] = {one["name"]: one for one in self.document["deployments"]}
        if deployment:
            if deployment not in known:
                raise UnknownName("deployment", deployment, known)
            return known[deployment]
        if len(known) > 1:
            raise PointsmanError(f"{self.text} has {len(known)} deployments: {', '.join(known)}; choose one with --of")
        return next(iter(known.values()))

    def workers(self) -> list[Worker]:
        """Machines for the instances of a manifest. Empty if its engines need no place."""
        if self.gpus:
            return []
        gpus = tuple(Gpu(index=index, memory_bytes=MACHINE_GPU_BYTES) for index in range(MACHINE_GPUS))
        return [
            Worker(name=f"machine-{number}", cpus=MACHINE_CPUS, memory_bytes=MACHINE_BYTES, gpus=gpus)
            for number in range(1, MACHINES + 1)
        ]


def fleet_of(text: str) -> LabFleet:
    """Read a fleet from COUNTxHARDWARE, or from the path of a manifest."""
    found = ENGINES.fullmatch(text)
    if found is None:
        return _of_manifest(text)
    count, hardware = int(found[1]), found[2]
    if hardware not in constants():
        raise UnknownName("hardware", hardware, constants())
    if count < 1:
        raise PointsmanError(f'"{text}": a fleet has at least one engine')
    parallel = TENSOR_PARALLEL.search(hardware)
    engine = {"type": "simulated", "parameters": {"hardware": hardware, "blockSize": BLOCK_TOKENS}}
    deployment = {"name": DEPLOYMENT, "model": DEPLOYMENT, "replicas": count, "engine": engine}
    document = {"kind": "Pointsman", "deployments": [deployment]}
    return LabFleet(text, document, "", int(parallel[1]) if parallel else 1)


def _of_manifest(text: str) -> LabFleet:
    file = Path(text)
    if file.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise PointsmanError(
            f'"{text}" is not a fleet; write COUNTxHARDWARE, such as "16x70B|a100_sxm|vllm|tp8", or a manifest (.yaml)'
        )
    return fleet_of_manifest(text_of(file), str(file.absolute().parent), text)


def fleet_of_manifest(text: str, folder: str, name: str) -> LabFleet:
    plan = load_manifest(text, folder, name)
    if not plan.deployments:
        raise PointsmanError(f"{name}: it has no deployments, so there is nothing to replay requests on")
    data, _ = read_yaml(text, name)
    return LabFleet(name, data, folder)
