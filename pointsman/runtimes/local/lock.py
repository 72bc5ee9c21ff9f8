"""One plane per state directory: whoever runs there holds its lock, and loses it with its last breath."""

import fcntl
import os
from pathlib import Path

from pointsman.errors import PointsmanError

LOCK_FILE = "lock"


class Lock:
    """Held from its making until `release`."""

    def __init__(self, state: Path) -> None:
        self._file = os.open(state / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            instead = "stop it with pointsman down, or choose another --state"
            raise PointsmanError(f"a plane runs in {state} already (pid {holder}); {instead}") from None
        os.truncate(self._file, 0)
        os.write(self._file, b"%d\n" % os.getpid())

    def release(self) -> None:
        """Let others in."""
        os.truncate(self._file, 0)
        os.close(self._file)
