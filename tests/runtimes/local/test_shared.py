"""What replicas share with their plane: made once, for its owner alone, and gone when it ends."""

import os
import stat
from pathlib import Path

import pytest

from pointsman.engines import LaunchSpec
from pointsman.errors import PointsmanError
from pointsman.runtimes.local.runtime import LocalReplicaAccess


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_secret_is_private_and_survives_a_restart(state: Path, tmp_path: Path) -> None:
    first, again = LocalReplicaAccess(state, tmp_path), LocalReplicaAccess(state, tmp_path)
    assert first.secret == again.secret
    assert len(first.secret) >= 32
    assert mode(state / "secret") == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert LocalReplicaAccess(other, tmp_path).secret != first.secret


def test_shared_memory_is_private_and_removed_with_the_plane(state: Path, tmp_path: Path) -> None:
    shared = LocalReplicaAccess(state, tmp_path)
    assert shared.memory.path.parent == tmp_path
    assert shared.memory.path.name.startswith("pointsman-")
    assert mode(shared.memory.path) == 0o700
    (shared.memory.path / "left").write_bytes(b"x")
    assert LocalReplicaAccess(state, tmp_path).memory.path == shared.memory.path, "of the same plane"
    shared.memory.clear()
    assert list(shared.memory.path.iterdir()) == []
    shared.memory.close()
    assert not shared.memory.path.exists()


def test_without_dev_shm_it_is_in_the_state_directory(state: Path, tmp_path: Path) -> None:
    shared = LocalReplicaAccess(state, tmp_path / "not there")
    assert shared.memory.path == state / "shm"
    assert mode(shared.memory.path) == 0o700


def test_a_symbolic_link_is_refused(state: Path, tmp_path: Path) -> None:
    shared = LocalReplicaAccess(state, tmp_path)
    shared.memory.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shared.memory.path.symlink_to(elsewhere)
    with pytest.raises(PointsmanError, match="owned by another user"):
        LocalReplicaAccess(state, tmp_path)


def test_replicas_get_secret_socket_and_memory(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = LocalReplicaAccess(state, tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/ours")
    env = shared.introduce(LaunchSpec(("x",), {"A": "b", "PYTHONPATH": "/own"}), b'{"limit":1}').env
    assert env == {
        "A": "b",
        "PYTHONPATH": os.pathsep.join(["/own", "/ours"]),
        "POINTSMAN_SECRET": shared.secret,
        "POINTSMAN_SOCKET": str(state / "admin.sock"),
        "POINTSMAN_SHM": str(shared.memory.path),
        "POINTSMAN_USER_CONFIG": '{"limit":1}',
    }
    assert "PYTHONPATH" not in shared.introduce(LaunchSpec(("x",)), b"null").env
