"""`/admin/v1/recording`: a recording of live traffic, which clients read in pieces while the gateways make it."""

from secrets import token_hex
from typing import Any

import msgspec

from pointsman.errors import UnknownName
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.lookup import AdminCall, AskGateways
from pointsman.runtimes.interface import Clock
from pointsman.runtimes.recording import RecordedPart, Recorder, RecordingLease


class RecordingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to begin a recording, to read more of it, or to end it."""

    id: str = ""
    """Id of a recording that has begun; empty to begin a new one."""
    model: str = ""
    """Record only requests for this model; if empty, record all requests."""
    stop: bool = False


class RecordingAdmin:
    def __init__(self, gateway: Gateway, clock: Clock, ask: AskGateways | None) -> None:
        self._gateway = gateway
        self._clock = clock
        self._recorder = Recorder(gateway.traffic, clock)
        self._ask = ask
        self._leases: dict[str, RecordingLease] = {}

    async def read(self, call: AdminCall) -> dict[str, Any]:
        """The lines that all gateways have recorded since the last call."""
        asked = msgspec.json.decode(call.body or b"{}", type=RecordingRequest)
        if asked.id and asked.id not in self._leases:
            raise UnknownName("recording", asked.id, self._leases)
        if asked.model and asked.model not in self._gateway.traffic.by_model:
            raise UnknownName("model", asked.model, self._gateway.traffic.by_model)
        if not asked.id:
            lease = RecordingLease(token_hex(4), token_hex(16), self._clock.now(), asked.model)
            self._recorder.read(lease)
            self._leases = {lease.id: lease}
        else:
            lease = msgspec.structs.replace(self._leases[asked.id], stop=asked.stop)
        part = self._recorder.read(lease)
        if self._ask is not None:
            details = {
                name: str(value).lower() if isinstance(value, bool) else str(value)
                for name, value in msgspec.structs.asdict(lease).items()
            }
            for answer in await self._ask("recording", details):
                if answer is not None:
                    part.add(msgspec.convert(answer, RecordedPart))
        if lease.stop:
            del self._leases[lease.id]
        part.lines.sort(key=lambda line: line.timestamp)
        return {"id": lease.id, **msgspec.to_builtins(part)}
