"""What the replicas of a plane on this machine share with it: a secret, the socket of its gateway, and memory."""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from pointsman.engines import LaunchSpec
from pointsman.errors import PointsmanError

SECRET = "secret"
SOCKET = "admin.sock"
MEMORY = Path("/dev/shm")
PYTHON_PATH = "PYTHONPATH"


class LocalReplicaAccess:
    """`ReplicaAccess` of the interface. The secret stays, so that replicas of an earlier plane trust this one."""

    def __init__(self, state: Path, memory: Path = MEMORY) -> None:
        self.socket = state / SOCKET
        """Where the gateway answers calls of replicas."""
        self.secret = _secret(state / SECRET)
        digest = hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
        self.memory = SharedFolder(memory / f"pointsman-{digest}" if os.access(memory, os.W_OK) else state / "shm")

    def introduce(self, launch: LaunchSpec, user_config: bytes) -> LaunchSpec:
        environment = {
            "POINTSMAN_SECRET": self.secret,
            "POINTSMAN_SOCKET": str(self.socket),
            "POINTSMAN_SHM": str(self.memory.path),
            "POINTSMAN_USER_CONFIG": user_config.decode(),
        }
        return msgspec.structs.replace(launch, env={**launch.env, **environment, **_python_path(launch.env)})


class SharedFolder:
    """`SharedMemory` of the interface: files in a folder that lies in memory, where the system has such a place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _own_folder(path)

    def clear(self) -> None:
        """Remove everything: no process is left that could use it."""
        self.close()
        _own_folder(self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):
                (self.path / name).unlink()

    def remove_older_than(self, age_s: float) -> None:
        oldest = time.time() - age_s
        with suppress(OSError):
            for file in self.path.iterdir():
                if not file.name.startswith(".") and file.stat().st_ctime < oldest:
                    file.unlink()


def _python_path(env: Mapping[str, str | None]) -> dict[str, str]:
    """Folders of the replica come before those of the plane."""
    own, ours = env.get(PYTHON_PATH), os.environ.get(PYTHON_PATH)
    return {PYTHON_PATH: os.pathsep.join([own, ours])} if own and ours else {}


def _secret(file: Path) -> str:
    """The secret of the state directory; a new one, readable by its owner only, if there is none."""
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
        raise PointsmanError(f"{folder} is owned by another user; move it away, or use another --state")
    folder.chmod(0o700)
