"""What the replicas of a plane share with it: a secret, the socket of its gateway, and a folder of shared memory."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from pointsman.engines import LaunchSpec
from pointsman.errors import PointsmanError

SECRET = "secret"
SOCKET = "admin.sock"
MEMORY = Path("/dev/shm")
HEADER = "x-pointsman-secret"
PYTHON_PATH = "PYTHONPATH"


class Shared:
    """Made when a plane starts. The secret stays, so that replicas of an earlier plane know this one."""

    def __init__(self, state: Path, memory: Path = MEMORY) -> None:
        self.socket = state / SOCKET
        """Where the gateway answers calls of replicas."""
        self.secret = _secret(state / SECRET)
        digest = hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
        self.shm = memory / f"pointsman-{digest}" if os.access(memory, os.W_OK) else state / "shm"
        """A folder for large values; in memory where the system has such a place."""
        _own_folder(self.shm)

    def clear(self) -> None:
        """Nobody is there who could have left something: what is there is of no use."""
        self.remove()
        _own_folder(self.shm)

    def remove(self) -> None:
        """The plane ends, and its replicas have."""
        shutil.rmtree(self.shm, ignore_errors=True)

    def introduced(self, launch: LaunchSpec, user_config: bytes) -> LaunchSpec:
        """A replica that knows its plane, and its user config (JSON)."""
        told = {
            "POINTSMAN_SECRET": self.secret,
            "POINTSMAN_SOCKET": str(self.socket),
            "POINTSMAN_SHM": str(self.shm),
            "POINTSMAN_USER_CONFIG": user_config.decode(),
        }
        return msgspec.structs.replace(launch, env={**launch.env, **told, **_python_path(launch.env)})


def _python_path(env: Mapping[str, str | None]) -> dict[str, str]:
    """Folders of its own come before ours, and not instead of them."""
    own, ours = env.get(PYTHON_PATH), os.environ.get(PYTHON_PATH)
    return {PYTHON_PATH: os.pathsep.join([own, ours])} if own and ours else {}


def _secret(file: Path) -> str:
    """The one that is there, or a new one that only we may read."""
    with suppress(FileNotFoundError):
        known = file.read_text(encoding="ascii").strip()
        if known:
            return known
    made = secrets.token_urlsafe(32)
    unfinished = file.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(made)
    unfinished.replace(file)
    return made


def _own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.lstat()
    if stat.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise PointsmanError(f"{folder} belongs to somebody else; move it away, or use another --state")
    folder.chmod(0o700)
