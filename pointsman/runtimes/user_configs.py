"""User configs of replicas: the config that each replica has, and the errors of replicas that refuse their config."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pointsman.control.desired import Address
from pointsman.errors import shown
from pointsman.http.client import NoResponse, fetch
from pointsman.reasons import Reason
from pointsman.wire import CallFailed

CONFIGURE_TIMEOUT_S = 30.0
CONFIGURE_PATH = "/configure"
SECRET_HEADER = "x-pointsman-secret"


class ConfiguredReplica(msgspec.Struct):
    """A replica, and the user config that it has."""

    deployment: str
    config: bytes | None
    """JSON; None if unknown, because an earlier plane configured it."""
    address: Address | None = None
    """None if the replica is not in service."""
    problem: Reason | None = None


MAX_REFUSAL = 500
"""Maximum number of characters of the error with which a replica refuses a config."""


class UserConfigs:
    """The user configs in force. Replicas are started with their config, and replicas in service get every change."""

    def __init__(self, secret: Callable[[], str]) -> None:
        self._secret = secret
        self._configs: dict[str, bytes] = {}
        """Configs by deployment, as JSON."""
        self._replicas: dict[str, ConfiguredReplica] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    def configure(self, configs: Mapping[str, Any]) -> None:
        """Put other configs in force, by deployment."""
        self._configs = {name: msgspec.json.encode(config) for name, config in configs.items()}
        self.retry()

    def launched(self, instance_id: str, deployment: str) -> bytes:
        """The config that a replica is started with, as JSON."""
        config = self._wanted(deployment)
        self._replicas[instance_id] = ConfiguredReplica(deployment, config)
        return config

    def admitted(self, instance_id: str, deployment: str, address: Address) -> None:
        replica = self._replicas.setdefault(instance_id, ConfiguredReplica(deployment, None))
        replica.address = address
        self._update(instance_id, replica)

    def forget(self, instance_id: str) -> None:
        self._replicas.pop(instance_id, None)
        task = self._sending.pop(instance_id, None)
        if task is not None:
            task.cancel()

    def retry(self) -> None:
        """Send configs to replicas that do not have their present config."""
        for instance_id, replica in self._replicas.items():
            self._update(instance_id, replica)

    def problems(self) -> list[Reason]:
        return [replica.problem for replica in self._replicas.values() if replica.problem]

    def status_of(self, deployment: str) -> dict[str, Any]:
        """How many replicas lack their config, and the errors of replicas that refused it; empty if all have it."""
        mine = [(name, one) for name, one in self._replicas.items() if one.deployment == deployment]
        awaited = sum(name in self._sending for name, _ in mine)
        refused = [one.problem.as_dict() for _, one in mine if one.problem]
        return {"user_config": {"awaited": awaited, "problems": refused}} if awaited or refused else {}

    def close(self) -> None:
        for task in self._sending.values():
            task.cancel()
        self._sending.clear()

    def _wanted(self, deployment: str) -> bytes:
        return self._configs.get(deployment, b"null")

    def _update(self, instance_id: str, replica: ConfiguredReplica) -> None:
        wanted = self._wanted(replica.deployment)
        is_known = wanted == replica.config or (replica.config is None and wanted == b"null")
        if replica.address is None or is_known or instance_id in self._sending:
            return
        work = self._send(instance_id, replica, replica.address, wanted)
        self._sending[instance_id] = asyncio.get_running_loop().create_task(work)

    async def _send(self, instance_id: str, replica: ConfiguredReplica, address: Address, config: bytes) -> None:
        headers = f"{SECRET_HEADER}: {self._secret()}\r\n"
        try:
            answer = await fetch(
                address, "POST", CONFIGURE_PATH, config, timeout_s=CONFIGURE_TIMEOUT_S, headers=headers
            )
        except NoResponse as error:  # sent again by the next `retry`
            replica.problem = Reason("user-config-not-sent", {"instance": instance_id, "error": str(error)})
        else:
            replica.config = config
            why = str(CallFailed.from_answer(answer.status, answer.body))
            refused = Reason("user-config-refused", {"instance": instance_id, "error": shown(why, MAX_REFUSAL)})
            replica.problem = None if answer.status < 300 else refused
        finally:
            if self._sending.get(instance_id) is asyncio.current_task():  # otherwise the replica was removed
                del self._sending[instance_id]
        if replica.config == config:  # another config may be in force by now
            self._update(instance_id, replica)
