"""The standard health service: who is ready, by name."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from pointsman.gateway.gateway import Gateway
from pointsman.gateway.grpc.messages import SERVICE
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.pipelines.prepared import PreparedApplication

LOOK_S = 0.25
"""How often it is looked for those who watch."""

HealthContext: TypeAlias = grpc.aio.ServicerContext[HealthCheckRequest, HealthCheckResponse]


class Health(HealthServicer):
    """The plane by the names "" and pointsman.v1.Predict, and every application by its own."""

    def __init__(self, gateway: Gateway, applications: Applications, is_ready: Callable[[], bool]) -> None:
        self._gateway = gateway
        self._applications = applications
        self._is_ready = is_ready
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Nothing is ready any more, and nobody need watch."""
        self._ending.set()

    async def Check(self, request: HealthCheckRequest, context: HealthContext) -> HealthCheckResponse:  # noqa: N802
        """How it is now."""
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f'there is no service or application "{request.service}"')
        return HealthCheckResponse(status=status)

    async def Watch(self, request: HealthCheckRequest, context: HealthContext) -> None:  # noqa: N802
        """How it is now, and whenever that changes."""
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                await context.write(HealthCheckResponse(status=status))
                told = status
            if self._ending.is_set():
                return
            try:
                await asyncio.wait_for(self._ending.wait(), LOOK_S)
            except TimeoutError:
                continue

    def _status(self, service: str) -> int:
        if service in ("", SERVICE):
            serves = self._is_ready()
        else:
            application = self._applications.get(service)
            if application is None:
                return HealthCheckResponse.SERVICE_UNKNOWN
            serves = self._can_answer(application)
        away = self._gateway.draining or self._ending.is_set()
        return HealthCheckResponse.SERVING if serves and not away else HealthCheckResponse.NOT_SERVING

    def _can_answer(self, application: PreparedApplication) -> bool:
        """Whether somebody is there for each of its steps."""
        traffic = self._gateway.traffic
        lanes = [
            (traffic.by_model if step.is_model else traffic.lanes).get(step.deployment) for step in application.steps
        ]
        if application.ingress:
            lanes.append(traffic.lanes.get(application.ingress))
        return all(lane is not None and len(lane.dispatcher.fleet) > 0 for lane in lanes)
