"""Whom to ask, where and how: the adapter, the model and the address of each instance."""

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from pointsman.config.deployments import endpoint_engine
from pointsman.config.plan import DeploymentPlan, PointsmanPlan
from pointsman.control import DesiredEndpoint
from pointsman.control import events as control
from pointsman.control.desired import Address
from pointsman.engines import Engine, LaunchSpec
from pointsman.runtimes.local.probes import Configuring, Prober, Scraper
from pointsman.runtimes.local.processes import Processes
from pointsman.runtimes.local.shared import Shared
from pointsman.runtimes.local.store import Lock, Store
from pointsman.runtimes.traffic import Traffic


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


# The hands of a plane: each command of the controller, carried out on processes, lanes and timers of this machine.


class PlaneParts(NamedTuple):
    """What there is between start and stop."""

    loop: asyncio.AbstractEventLoop
    lock: Lock
    store: Store
    processes: Processes
    shared: Shared


class CommandExecutor:
    """Does what it is told, and tells what became of it. `at_work` says what it has to work with."""

    def __init__(
        self,
        traffic: Traffic,
        tell: Callable[[control.ControllerEvent], None],
        at_work: Callable[[], PlaneParts],
        deployment_of: Callable[[str], str],
        scrape_interval_s: float,
    ) -> None:
        self.plans: dict[str, DeploymentPlan] = {}
        """By deployment: those in force, and those that are gone and still have instances."""
        self._by_recipe: dict[tuple[str, str], DeploymentPlan] = {}
        """By deployment and recipe: also earlier ones, as long as instances of them are there."""
        self.folder = ""
        """Of the manifest: where its instances run."""
        self.directory = Directory()
        self.prober = Prober(tell)
        self.scraper = Scraper(traffic.measured, scrape_interval_s)
        self.configuring = Configuring(lambda: at_work().shared.secret)
        self._traffic = traffic
        self._tell = tell
        self._at_work = at_work
        self._deployment_of = deployment_of
        self._timer: asyncio.TimerHandle | None = None
        self._do: dict[type[Any], Callable[[Any], None]] = {
            control.Launch: self._launch,
            control.Probe: self._probe,
            control.Admit: self._admit,
            control.Update: lambda command: traffic.update(command.deployment, command.instance),
            control.Withdraw: self._withdraw,
            control.AwaitDrained: self._await_drained,
            control.Terminate: lambda command: at_work().processes.signal(command.instance_id, signal.SIGTERM),
            control.Kill: lambda command: at_work().processes.signal(command.instance_id, signal.SIGKILL),
            control.WakeController: self._wake_at,
        }

    def carry_out(self, command: control.ControllerCommand) -> None:
        """Now."""
        try:
            self._do[type(command)](command)
        except Exception as error:  # one command that fails must not keep the others from being carried out
            failed = {"message": f"pointsman: {command} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(failed)

    def adopted(self, event: control.Adopted, plan: PointsmanPlan) -> None:
        """A process of an earlier plane is ours now."""
        for one in plan.deployments:
            if one.name == event.deployment and one.engine is not None:
                self.directory.enter(event.instance_id, one)

    def problems(self) -> list[str]:
        """What could not be done or learned."""
        return [*self.scraper.problems(), *self.configuring.problems()]

    def close(self) -> None:
        """Ask and tell nobody any more."""
        self.prober.close()
        self.scraper.close()
        self.configuring.close()

    def stop_timer(self) -> None:
        """Nobody is woken any more."""
        if self._timer is not None:
            self._timer.cancel()

    def configure(self, plans: Iterable[DeploymentPlan]) -> None:
        """These are in force."""
        for plan in plans:
            self.plans[plan.name] = plan
            self._by_recipe[plan.name, plan.desired.recipe] = plan

    def forget(self, deployments: Container[str], recipes: Container[tuple[str, str]]) -> None:
        """All but these deployments, and of those that stay all but these recipes and what is in force."""
        self.plans = {name: plan for name, plan in self.plans.items() if name in deployments}
        current = {(name, plan.desired.recipe) for name, plan in self.plans.items()}
        self._by_recipe = {key: plan for key, plan in self._by_recipe.items() if key in recipes or key in current}

    def _launch(self, command: control.Launch) -> None:
        current, shared = self.plans[command.deployment], self._at_work().shared
        plan = self._by_recipe.get((command.deployment, command.recipe), current)
        engine = self.directory.enter(command.instance_id, plan)
        config = self.configuring.launched(command.instance_id, plan.name) if plan.is_replica else b""

        def how(host: str, port: int) -> LaunchSpec:
            launch = engine.launch(plan.model, host, port)
            launch = shared.introduced(launch, config) if plan.is_replica else launch
            return launch if command.place is None else engine.placed(launch, command.place)

        folder = plan.folder if plan.is_replica else self.folder
        self._at_work().processes.launch(
            command.instance_id, command.deployment, plan.desired.recipe, folder, how, command.place
        )

    def _probe(self, command: control.Probe) -> None:
        name = command.instance_id
        entry = self.directory.get(name)
        if command.endpoint is not None:
            entry = self.directory.endpoint(name, command.endpoint, self.plans, self._deployment_of)
        address = self.directory.address(name, self._at_work().processes.address)
        if entry is None or address is None:
            self._tell(control.Silent(name, "nobody knows how to ask it"))
            return
        question = entry.engine.readiness(entry.model) if command.readiness else entry.engine.health
        self.prober.probe(name, address, question, readiness=command.readiness, timeout_s=command.timeout_s)

    def _admit(self, command: control.Admit) -> None:
        name = command.instance.instance_id
        self._traffic.admit(command.deployment, command.instance)
        entry, address = self.directory.get(name), self.directory.address(name, self._at_work().processes.address)
        if entry is not None and address is not None:
            self.scraper.follow(command.deployment, name, address, entry.engine)
            if self.plans[command.deployment].is_replica:
                self.configuring.admitted(name, command.deployment, address)

    def _withdraw(self, command: control.Withdraw) -> None:
        self.scraper.forget(command.instance_id)
        self.configuring.forget(command.instance_id)
        self._traffic.withdraw(command.deployment, command.instance_id, command.why)

    def _await_drained(self, command: control.AwaitDrained) -> None:
        drained = control.Drained(command.instance_id)
        self._traffic.when_idle(command.deployment, command.instance_id, lambda: self._tell(drained))

    def _wake_at(self, command: control.WakeController) -> None:
        self.stop_timer()
        delay_s = max(command.at - time.monotonic(), 0.0)
        self._timer = self._at_work().loop.call_later(delay_s, self._tell, control.ControllerTimer())
