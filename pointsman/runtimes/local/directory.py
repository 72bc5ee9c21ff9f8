"""Whom to ask, where and how: the adapter, the model and the address of each instance."""

from collections.abc import Callable, Collection, Mapping

import msgspec

from pointsman.config.endpoints import endpoint_engine
from pointsman.config.plan import DeploymentPlan
from pointsman.control import DesiredEndpoint
from pointsman.control.desired import Address
from pointsman.engines import Engine


class Entry(msgspec.Struct, frozen=True):
    """What must be known of an instance to talk to it."""

    deployment: str
    model: str
    engine: Engine
    endpoint: DesiredEndpoint | None = None
    """None: it is a process of ours."""


class Directory:
    """All instances, as they were when they were started or first asked."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, instance_id: str) -> Entry | None:
        """None: nothing is known of it."""
        return self._entries.get(instance_id)

    def enter(self, instance_id: str, plan: DeploymentPlan) -> Engine:
        """A process of this deployment. Its adapter, which it keeps, whatever is applied later."""
        assert plan.engine is not None, "only deployments with an engine have processes"
        self._entries[instance_id] = Entry(plan.name, plan.model, plan.engine)
        return plan.engine

    def endpoint(
        self,
        instance_id: str,
        endpoint: DesiredEndpoint,
        plans: Mapping[str, DeploymentPlan],
        deployment_of: Callable[[str], str],
    ) -> Entry:
        """A server that somebody else started, with the model that it is asked for now."""
        known = self._entries.get(instance_id)
        if known is not None and known.endpoint is not None and known.deployment in plans:
            same = (known.endpoint.url, known.endpoint.engine) == (endpoint.url, endpoint.engine)
            if same and known.model == plans[known.deployment].model:
                return known
        deployment = deployment_of(instance_id)
        entry = Entry(deployment, plans[deployment].model, endpoint_engine(endpoint.engine), endpoint)
        self._entries[instance_id] = entry
        return entry

    def address(self, instance_id: str, of_process: Callable[[str], Address | None]) -> Address | None:
        """Where it listens; None: not known."""
        known = self._entries.get(instance_id)
        if known is not None and known.endpoint is not None:
            return known.endpoint.address
        return of_process(instance_id)

    def keep(self, instance_ids: Collection[str]) -> None:
        """The others are gone."""
        self._entries = {name: entry for name, entry in self._entries.items() if name in instance_ids}
