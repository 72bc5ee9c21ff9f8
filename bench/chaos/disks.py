"""Two real ways to make the writes of a running plane fail.

A small separate disk, which needs the right to mount: it is filled, and emptied again. And a limit on the size of
files (`RLIMIT_FSIZE` 0) set on a running process from outside, which needs no rights: no file can grow.
"""

import errno
import os
import resource
import subprocess
from pathlib import Path

FILLING = "filling"
SIZE_MIB = 16


class SmallDisk:
    """A file system in memory, mounted on a folder. `fill` takes all of its space."""

    def __init__(self, folder: Path) -> None:
        """Create the folder, for its owner only. Raises `OSError` if nothing can be mounted here."""
        folder.mkdir(mode=0o700)
        self.folder = folder
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=0700", "pointsman-disk", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            folder.rmdir()
            raise OSError(errno.EPERM, "a disk cannot be mounted here")

    def fill(self) -> None:
        with (self.folder / FILLING).open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        (self.folder / FILLING).unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


def can_mount() -> bool:
    """Whether disks can be mounted: for root, outside of containers that forbid it."""
    if os.geteuid() != 0:
        return False
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "pointsman-probe", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def forbid_writes(pid: int) -> None:
    """From now on, no file that a process writes may grow. Its children inherit that."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def allow_writes(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
