"""Free ports for instances: no two of ours get the same one."""

import socket


class Ports:
    """Hands out ports that nobody listens on, and remembers to whom.

    Somebody else may take a port before its instance listens: then the instance ends, and its next start gets another.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._taken: dict[str, int] = {}

    def take(self, instance_id: str) -> int:
        """A port for an instance, instead of the one that it had."""
        taken = set(self._taken.values())
        probes: list[socket.socket] = []
        try:
            while True:
                probe = socket.socket()
                probes.append(probe)  # held until one is found, so that the system offers another each time
                probe.bind((self._host, 0))
                port = int(probe.getsockname()[1])
                if port not in taken:
                    self._taken[instance_id] = port
                    return port
        finally:
            for probe in probes:
                probe.close()

    def keep(self, instance_id: str, port: int) -> None:
        """An instance has this one already."""
        self._taken[instance_id] = port

    def release(self, instance_id: str) -> None:
        """Its process has ended."""
        self._taken.pop(instance_id, None)
