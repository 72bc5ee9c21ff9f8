"""Tells replicas their user config: new ones know it from their launch, others are told whenever it has changed."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pointsman.control.desired import Address
from pointsman.runtimes.local.asking import Unanswered, ask
from pointsman.runtimes.local.shared import HEADER

TIMEOUT_S = 30.0
PATH = "/configure"


class KnownConfig(msgspec.Struct):
    """A replica, and what it was last told."""

    deployment: str
    told: bytes | None
    """JSON; None: nobody knows, because an earlier plane has told it."""
    address: Address | None = None
    """None: it is not in service."""
    problem: str = ""


class Configuring:
    """The user configs in force, and who knows them."""

    def __init__(self, secret: Callable[[], str]) -> None:
        self._secret = secret
        self._configs: dict[str, bytes] = {}
        """By deployment, as JSON; none: None."""
        self._replicas: dict[str, KnownConfig] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}

    def configure(self, configs: Mapping[str, Any]) -> None:
        """These hold from now on."""
        self._configs = {name: msgspec.json.encode(config) for name, config in configs.items()}
        self.look()

    def launched(self, instance_id: str, deployment: str) -> bytes:
        """It is started with what holds now: this, as JSON."""
        told = self._wanted(deployment)
        self._replicas[instance_id] = KnownConfig(deployment, told)
        return told

    def admitted(self, instance_id: str, deployment: str, address: Address) -> None:
        """It is in service: from now on it is told what changes."""
        known = self._replicas.setdefault(instance_id, KnownConfig(deployment, None))
        known.address = address
        self._tell(instance_id, known)

    def forget(self, instance_id: str) -> None:
        """It is not in service any more."""
        self._replicas.pop(instance_id, None)
        task = self._telling.pop(instance_id, None)
        if task is not None:
            task.cancel()

    def look(self) -> None:
        """Tell whoever has not been told yet."""
        for instance_id, known in self._replicas.items():
            self._tell(instance_id, known)

    def problems(self) -> list[str]:
        """Who could not be told, and why."""
        return [known.problem for known in self._replicas.values() if known.problem]

    def close(self) -> None:
        """Tell nobody any more."""
        for task in self._telling.values():
            task.cancel()
        self._telling.clear()

    def _wanted(self, deployment: str) -> bytes:
        return self._configs.get(deployment, b"null")

    def _tell(self, instance_id: str, known: KnownConfig) -> None:
        wanted = self._wanted(known.deployment)
        nothing_to_say = wanted == known.told or (known.told is None and wanted == b"null")
        if known.address is None or nothing_to_say or instance_id in self._telling:
            return
        work = self._ask(instance_id, known, known.address, wanted)
        self._telling[instance_id] = asyncio.get_running_loop().create_task(work)

    async def _ask(self, instance_id: str, known: KnownConfig, address: Address, config: bytes) -> None:
        headers = f"{HEADER}: {self._secret()}\r\n"
        try:
            answer = await ask(address, "POST", PATH, config, timeout_s=TIMEOUT_S, headers=headers)
        except Unanswered as error:  # told again when somebody looks next
            known.problem = f"{instance_id} could not be told its user config: {error}"
        else:
            known.told = config
            said = " ".join(answer.body[:300].decode("utf-8", "replace").split())
            refused = f"{instance_id} refused its user config ({answer.status}): {said}"
            known.problem = "" if answer.status < 300 else refused
        self._telling.pop(instance_id, None)
        if known.told == config:  # it may have changed in the meantime
            self._tell(instance_id, known)
