import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pointsman.config.revision import ManifestText
from pointsman.errors import PointsmanError
from pointsman.runtimes.local.store import FILE, MAX_SCALING_RECORDS, MAX_VERSIONS, Store, StoredProcess

FIRST, SECOND = ManifestText("one", "/a", "one.yaml"), ManifestText("two", "/b")
KNOWN = StoredProcess("m-1", "m", "recipe", "127.0.0.1", 4000)


def test_the_newest_manifest_is_in_force(state: Path) -> None:
    store = Store(state)
    assert store.documents.manifest() is None
    assert store.documents.save_manifest(FIRST, 10.0) == 1
    assert store.documents.save_manifest(SECOND, 20.0) == 2
    store.close()
    again = Store(state)
    assert again.documents.manifest() == (2, SECOND)
    again.close()


def test_processes_are_saved_changed_and_removed(state: Path) -> None:
    store = Store(state)
    store.processes.save(KNOWN)
    store.processes.save(StoredProcess("m-1", "m", "recipe", "127.0.0.1", 4000, 77, "boot/1"))
    assert store.processes.all() == [StoredProcess("m-1", "m", "recipe", "127.0.0.1", 4000, 77, "boot/1")]
    store.processes.forget("m-1")
    store.processes.forget("unknown")
    assert store.processes.all() == []
    store.close()


def test_what_was_saved_survives_a_kill(state: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.runtimes.local.test_store import *\n"
        "store = Store(Path(sys.argv[1])); store.documents.save_manifest(FIRST, 1.0); store.processes.save(KNOWN)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", script, str(state)], cwd=root, check=False).returncode == -9
    store = Store(state)
    assert store.documents.manifest() == (1, FIRST)
    assert store.processes.all() == [KNOWN]
    store.close()


def test_a_file_that_is_no_database_is_refused_with_advice(state: Path) -> None:
    (state / FILE).write_text("this is not a database, whatever its name says. " * 30)
    with pytest.raises(PointsmanError, match=r"cannot be used .* move it away"):
        Store(state)


def test_a_file_of_another_version_is_refused(state: Path) -> None:
    Store(state).close()
    with sqlite3.connect(state / FILE) as db:
        db.execute("pragma user_version = 99")
    db.close()
    with pytest.raises(PointsmanError, match="another version of Pointsman"):
        Store(state)


def test_applications_have_versions_to_go_back_to(state: Path) -> None:
    store = Store(state)
    one, two, three = (ManifestText(text, "/a", "app.yaml") for text in ("one", "two", "three"))
    assert store.documents.applications() == {}
    store.documents.save_application("b", one, 1.0)
    store.documents.save_application("a", one, 2.0)
    store.documents.save_application("b", two, 3.0)
    store.documents.save_application("b", three, 4.0)
    assert list(store.documents.applications().items()) == [("b", three), ("a", one)]
    assert store.documents.application_before("b") == two
    assert store.documents.application_before("a") is None
    store.documents.roll_back_application("b")
    store.documents.roll_back_application("b")
    assert store.documents.applications()["b"] == one
    assert store.documents.application_before("b") is None
    store.close()
    again = Store(state)
    assert again.documents.applications() == {"b": one, "a": one}
    again.documents.delete_application("b")
    assert again.documents.applications() == {"a": one}
    again.close()


def test_versions_of_applications_are_bounded(state: Path) -> None:
    store = Store(state)
    for number in range(MAX_VERSIONS + 5):
        store.documents.save_application("a", ManifestText(str(number), "/"), 1.0)
    for _ in range(MAX_VERSIONS - 1):
        assert store.documents.application_before("a") is not None
        store.documents.roll_back_application("a")
    assert store.documents.application_before("a") is None
    assert store.documents.applications()["a"].text == "5"
    store.close()


def test_targets_and_their_records_are_kept_and_bounded(state: Path) -> None:
    store = Store(state)
    assert store.targets.scaling() == {}
    store.targets.save_scaling({"m": "1", "n": "2"})
    store.targets.save_scaling({"m": "3"})
    for number in range(MAX_SCALING_RECORDS + 5):
        store.targets.note_scaling("m", str(number))
    store.targets.note_scaling("n", "one")
    store.close()
    again = Store(state)
    assert again.targets.scaling() == {"m": "3", "n": "2"}
    assert again.targets.scaling_records("m") == [str(number) for number in range(5, MAX_SCALING_RECORDS + 5)]
    again.targets.forget_scaling("m")
    assert again.targets.scaling() == {"n": "2"}
    assert (again.targets.scaling_records("m"), again.targets.scaling_records("n")) == ([], ["one"])
    again.close()
