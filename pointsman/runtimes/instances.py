"""Instances as engines run them: how each is started, probed and configured, on any runtime."""

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from pointsman.config.deployments import endpoint_engine
from pointsman.config.plan import DeploymentPlan, PointsmanPlan
from pointsman.control import DesiredEndpoint, InstanceStatus
from pointsman.control import events as control
from pointsman.control.desired import Address, Lifecycle
from pointsman.engines import Engine, LaunchSpec
from pointsman.errors import PointsmanError, UnknownName
from pointsman.parameters import read_key
from pointsman.reasons import Reason
from pointsman.runtimes.interface import CannotStart, LoadTable, ProcessOrder, Runtime, Tell
from pointsman.runtimes.user_configs import UserConfigs


class Entry(msgspec.Struct, frozen=True):
    """The facts about an instance that are needed to send it requests."""

    deployment: str
    model: str
    """The server's name for the model."""
    engine: Engine
    endpoint: DesiredEndpoint | None = None
    """None if the plane starts the process of the instance."""
    key: str = ""
    """Where the API key of the server is found."""


class Directory:
    """The adapter and the model of each instance, as of its start or its first probe."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, instance_id: str) -> Entry | None:
        return self._entries.get(instance_id)

    def names(self) -> list[str]:
        return list(self._entries)

    def enter(self, instance_id: str, plan: DeploymentPlan) -> Engine:
        """Add a process of a deployment. It keeps the returned adapter, even if another plan is applied later."""
        assert plan.engine is not None, "only deployments with an engine have processes"
        wanted = plan.desired.engine
        served, key = ("", "") if wanted is None else (wanted.served_model, wanted.key)
        self._entries[instance_id] = Entry(plan.name, served or plan.model, plan.engine, key=key)
        return plan.engine

    def endpoint(
        self,
        instance_id: str,
        endpoint: DesiredEndpoint,
        plans: Mapping[str, DeploymentPlan],
        deployment_of: Callable[[str], str],
    ) -> Entry:
        """The entry of a server that the plane did not start, with the model that requests to it now name."""
        known, deployment = self._entries.get(instance_id), deployment_of(instance_id)
        served = endpoint.served_model or plans[deployment].model
        if known is not None and (known.deployment, known.model, known.endpoint) == (deployment, served, endpoint):
            return known
        entry = Entry(deployment, served, endpoint_engine(endpoint.engine), endpoint, endpoint.key)
        self._entries[instance_id] = entry
        return entry

    def keep(self, instance_ids: Collection[str]) -> None:
        """Drop all other instances."""
        self._entries = {name: entry for name, entry in self._entries.items() if name in instance_ids}


class Evidence:
    """Requests that replace health probes: an instance that answers requests needs no probe."""

    def __init__(self, load: LoadTable, tell: Tell) -> None:
        self._load = load
        self._tell = tell
        self._seen: dict[str, tuple[float, int]] = {}
        """The time of the last check of each instance, and the number of requests sent to it before that check."""
        self._idle: set[str] = set()
        """Instances that were reported to their controller as idle."""

    def spares(self, instance_id: str, deployment: str, now: float) -> bool:
        """Whether no probe is needed, because the instance has answered a request since the last call. If no request
        was sent to it since then, it is probed less often."""
        seen = self._load.activity(deployment, instance_id)
        if seen is None:
            return False
        since, requests = self._seen.get(instance_id, (now, -1))
        self._seen[instance_id] = now, seen.requests
        if seen.requests != requests or seen.in_flight:
            self._idle.discard(instance_id)
        elif instance_id not in self._idle:
            self._idle.add(instance_id)
            self._load.rest(deployment, instance_id)
            self._tell(control.WentIdle(instance_id))
        if seen.worked_at > since:
            self._tell(control.Answered(instance_id, readiness=False, ago_s=now - seen.worked_at))
            return True
        return False

    def forget(self, instance_id: str) -> None:
        """Forget an instance that starts again."""
        self._seen.pop(instance_id, None)
        self._idle.discard(instance_id)

    def keep(self, instance_ids: Collection[str]) -> None:
        """Forget all others."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in instance_ids}
        self._idle.intersection_update(self._seen)


SOURCES = "POINTSMAN_SOURCES"
"""The environment variable with the code that a replica's files no longer have."""


class LoadedCode:
    """Replicas whose code differs from the code in force. Their files were edited before they started, and the code
    was too large to be kept."""

    def __init__(self) -> None:
        self._edited: set[str] = set()

    def launched(self, instance_id: str, plan: DeploymentPlan) -> dict[str, str]:
        """Note that an instance starts. If its files differ, returns environment variables with the code in force."""
        self._edited.discard(instance_id)
        code = plan.replica_code
        if code is None or not code.is_edited():
            return {}
        if code.packed:
            return {SOURCES: code.packed}
        self._edited.add(instance_id)
        return {}

    def keep(self, instance_ids: Collection[str]) -> None:
        """Forget all others."""
        self._edited.intersection_update(instance_ids)

    def problems(self) -> list[Reason]:
        return [Reason("code-edited", {"instance": name}) for name in sorted(self._edited)]


def _key(source: str) -> str:
    try:
        return read_key(source)
    except ValueError as error:
        raise CannotStart(Reason("no-engine-key", {"why": str(error)})) from None


class EngineInstances:
    """The instances of a plane: commands of its controller, carried out by a runtime through engine adapters."""

    def __init__(self, runtime: Runtime, load: LoadTable, tell: Tell, deployment_of: Callable[[str], str]) -> None:
        self.directory = Directory()
        self.loaded_code = LoadedCode()
        self.user_configs = UserConfigs(lambda: runtime.replicas.secret)
        self._runtime = runtime
        self._tell = tell
        self._evidence = Evidence(load, tell)
        self._deployment_of = deployment_of
        self._plans: dict[str, DeploymentPlan] = {}
        """Plans by deployment: the plans in force, and the plans of removed deployments that still have instances."""
        self._by_recipe: dict[tuple[str, str], DeploymentPlan] = {}
        """Plans by deployment and recipe, including earlier plans that still have instances."""
        self._folder = ""

    def configure(self, plan: PointsmanPlan, folder: str) -> None:
        """Apply another plan. `folder` is the folder of the manifest, in which the instances of the plan run."""
        self._folder = folder
        for one in plan.deployments:
            self._plans[one.name] = one
            self._by_recipe[one.name, one.desired.recipe] = one
        self.user_configs.configure(plan.user_configs())

    def keep(self, instances: Iterable[InstanceStatus], deployments: Iterable[str]) -> None:
        """Drop everything that no instance and no deployment in force needs."""
        known = list(instances)
        names = {one.id for one in known}
        self.directory.keep(names)
        self._evidence.keep(names)
        self.loaded_code.keep(names)
        kept = {*deployments, *(one.deployment for one in known)}
        recipes = {(one.deployment, one.recipe) for one in known}
        self._plans = {name: plan for name, plan in self._plans.items() if name in kept}
        recipes |= {(name, plan.desired.recipe) for name, plan in self._plans.items()}
        self._by_recipe = {key: plan for key, plan in self._by_recipe.items() if key in recipes}

    def lifecycles(self) -> list[Lifecycle]:
        """Lifecycles of all deployments that have instances."""
        return [plan.desired.lifecycle for plan in self._plans.values()]

    def adopted(self, event: control.Adopted, plan: PointsmanPlan) -> None:
        for one in plan.deployments:
            if one.name == event.deployment and one.engine is not None:
                self.directory.enter(event.instance_id, one)

    def launch(self, command: control.Launch) -> None:
        current, replicas = self._plans[command.deployment], self._runtime.replicas
        plan = self._by_recipe.get((command.deployment, command.recipe), current)
        engine = self.directory.enter(command.instance_id, plan)
        entry = self.directory.get(command.instance_id)
        assert entry is not None, "it was entered"
        config = self.user_configs.launched(command.instance_id, plan.name) if plan.is_replica else b""
        sources = self.loaded_code.launched(command.instance_id, plan)

        def spec(host: str, port: int) -> LaunchSpec:
            launch = engine.launch(entry.model, host, port)
            if engine.key_variable:  # a key in the plane's own environment must not apply to the engine
                key = {engine.key_variable: _key(entry.key) or None}
                launch = msgspec.structs.replace(launch, env={**key, **launch.env})
            launch = msgspec.structs.replace(launch, env={**launch.env, **sources}) if sources else launch
            launch = replicas.introduce(launch, config) if plan.is_replica else launch
            return launch if command.place is None else engine.placed(launch, command.place)

        self._runtime.launch(
            ProcessOrder(
                instance_id=command.instance_id,
                deployment=command.deployment,
                recipe=plan.desired.recipe,
                place=command.place,
                folder=plan.folder if plan.is_replica else self._folder,
                launch=spec,
                remedy=engine.remedy,
                why_final=engine.why_final,
            )
        )

    def stop(self, instance_id: str, *, kill: bool = False) -> None:
        self._runtime.stop(instance_id, kill=kill)

    def probe(self, command: control.Probe) -> None:
        name = command.instance_id
        entry = self.directory.get(name)
        if command.endpoint is not None:
            entry = self.directory.endpoint(name, command.endpoint, self._plans, self._deployment_of)
        address = self._address(name, entry)
        if entry is None or address is None:
            self._tell(control.Silent(name, "its engine or its address is not known"))
            return
        now = self._runtime.clock.now()
        if not command.readiness and self._evidence.spares(name, entry.deployment, now):
            return
        question = entry.engine.readiness(entry.model) if command.readiness else entry.engine.health
        self._runtime.probes.probe(name, address, question, command.readiness, command.timeout_s)

    def admitted(self, command: control.Admit) -> None:
        name = command.instance.instance_id
        entry = self.directory.get(name)
        address = self._address(name, entry)
        self._evidence.forget(name)
        if entry is not None and address is not None:
            self._runtime.probes.follow(command.deployment, name, address, entry.engine)
            if self._plans[command.deployment].is_replica:
                self.user_configs.admitted(name, command.deployment, address)

    def withdrawn(self, instance_id: str) -> None:
        self._runtime.probes.unfollow(instance_id)
        self.user_configs.forget(instance_id)

    async def logs(self, instance_id: str, lines: int = 100) -> str:
        known = self.directory.get(instance_id)
        if known is not None and known.endpoint is not None:
            url = known.endpoint.url
            raise PointsmanError(
                f'"{instance_id}" is a server at {url} that this plane did not start: its log is there'
            )
        text = await self._runtime.logs(instance_id, lines)
        if text is None and known is None:
            raise UnknownName("instance", instance_id, self.directory.names())
        return text or ""

    def _address(self, instance_id: str, entry: Entry | None) -> Address | None:
        if entry is not None and entry.endpoint is not None:
            return entry.endpoint.address
        address = self._runtime.address(instance_id)
        return address if address is None or entry is None else address._replace(key=entry.key)
