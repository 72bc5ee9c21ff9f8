"""Several gateways of one plane on virtual time: the product's two ends of the link, and delayed messages."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pointsman.config.plan import DeploymentPlan
from pointsman.routing.routes import DispatcherSettings
from pointsman.runtimes.gateway_processes import gateway_places
from pointsman.runtimes.gateways import LinkedGateway, SharedTraffic
from pointsman.runtimes.link import BEAT_S, SHARE_S, GatewayMessage, LinkReport, PlaneMessage
from pointsman.runtimes.linked import LinkedTraffic
from pointsman.runtimes.serving import LocalTraffic
from pointsman.runtimes.simulation.engines import SimulatedEngines
from pointsman.runtimes.simulation.processes import VirtualClock
from pointsman.runtimes.traffic import Traffic

LINK_S = 0.001
"""The delay of a message."""


class SimulatedGateway:
    """A gateway with its own dispatchers."""

    def __init__(
        self,
        name: str,
        clock: VirtualClock,
        engines: SimulatedEngines,
        settings: DispatcherSettings,
        shared: SharedTraffic,
    ) -> None:
        self.traffic = Traffic(clock, engines, settings)
        self.traffic.hooks.gone = partial(engines.forget, self.traffic.hooks)
        self.is_cut_off = False
        """Whether it is cut off from the plane, in both directions."""
        self.linked = LinkedTraffic(self.traffic, clock, self._tell)
        self._member = LinkedGateway(name)
        self._member.process = name
        self._shared = shared
        self._clock = clock
        self._reported_at = 0.0
        self._reports = False
        """Whether it reports at intervals."""
        shared.group.members[name] = self._member

    def configure(self, plans: Sequence[DeploymentPlan]) -> None:
        self.traffic.configure(plans)
        self.linked.observe()

    def connect(self) -> None:
        """Follow the plane from now on."""
        self.is_cut_off = False
        self.linked.connected()
        self._shared.connected(self._member, self._send)
        if not self._reports:
            self._reports = True
            self._report()

    def cut_off(self) -> None:
        """Break its link; the gateway keeps running."""
        self.is_cut_off = True
        self._member.send = None

    def end(self) -> None:
        """End its process. Its requests in flight are not simulated any further."""
        self.cut_off()
        self._shared.ended(self._member)

    def _send(self, message: PlaneMessage) -> None:
        self._later(self.linked.handle, message)

    def _tell(self, message: GatewayMessage) -> None:
        self._later(self._shared.handle, self._member, message)

    def _later(self, call: Callable[..., None], *about: Any) -> None:
        self._clock.call_at(self._clock.now() + LINK_S, self._unless_cut_off, call, *about)

    def _unless_cut_off(self, call: Callable[..., None], *about: Any) -> None:
        if not self.is_cut_off:
            call(*about)

    def _report(self) -> None:
        self._clock.call_at(self._clock.now() + SHARE_S, self._report)
        now = self._clock.now()
        if self.is_cut_off:
            self.linked.peers.expire()
            return
        lanes, endings, news = self.linked.report()
        if lanes or endings or news or now - self._reported_at >= BEAT_S:
            self._reported_at = now
            self._tell(LinkReport(now, lanes, endings, news, {}))


class SimulatedGateways:
    """The gateways of one plane."""

    def __init__(
        self, number: int, clock: VirtualClock, engines: SimulatedEngines, settings: DispatcherSettings, local: Traffic
    ) -> None:
        self.shared = SharedTraffic(LocalTraffic(local), clock)
        self.each = [SimulatedGateway(name, clock, engines, settings, self.shared) for name in gateway_places(number)]
        self._clock = clock
        self._beat()

    def configure(self, plans: Callable[[], Sequence[DeploymentPlan]]) -> None:
        """Put plans in force. Each gateway gets its own plans, because plugins have state."""
        for one in self.each:
            one.configure(plans())

    def _beat(self) -> None:
        self._clock.call_at(self._clock.now() + SHARE_S, self._beat)
        self.shared.beat()
