import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pointsman.config.changes import Change, Changes
from pointsman.config.revision import ManifestText
from pointsman.errors import PointsmanError
from pointsman.runtimes.local.store import (
    APPLICATION_HISTORY,
    APPLICATIONS,
    FILE,
    HISTORY,
    SCALING_HISTORY,
    Store,
    StoredInstance,
    stored_manifest,
)

FIRST, SECOND = ManifestText("one", "/a", "one.yaml"), ManifestText("two", "/b")
STARTED = Changes((Change("start", "m-1", "1 replica is wanted"), Change("open", "m", "new")))
KNOWN = StoredInstance("m-1", "m", "recipe", "127.0.0.1", 4000)


def test_it_remembers_the_newest_manifest_and_what_was_changed(state: Path) -> None:
    assert stored_manifest(state) is None
    store = Store(state)
    assert store.manifest() is None
    assert store.save_manifest(FIRST, STARTED, 10.0) == 1
    assert store.save_manifest(SECOND, Changes(), 20.0) == 2
    store.note(2, Changes((Change("add", "x", "it is listed"),)), 30.0)
    store.close()
    again = Store(state)
    assert again.manifest() == (2, SECOND)
    assert [(one.generation, one.at, one.change.what) for one in again.history()] == [
        (2, 30.0, "add"), (1, 10.0, "open"), (1, 10.0, "start"),
    ]  # fmt: skip
    again.close()
    assert stored_manifest(state) == SECOND


def test_history_is_bounded(state: Path) -> None:
    store = Store(state)
    store.note(1, Changes(tuple(Change("start", f"m-{n}", "") for n in range(HISTORY + 50))), 1.0)
    kept = store.history(2 * HISTORY)
    assert len(kept) == HISTORY
    assert kept[0].change.subject == f"m-{HISTORY + 49}"
    store.close()


def test_instances_come_change_and_go(state: Path) -> None:
    store = Store(state)
    store.save(KNOWN)
    store.save(StoredInstance("m-1", "m", "recipe", "127.0.0.1", 4000, 77, "boot/1"))
    assert store.instances() == [StoredInstance("m-1", "m", "recipe", "127.0.0.1", 4000, 77, "boot/1")]
    store.forget("m-1")
    store.forget("nobody")
    assert store.instances() == []
    store.close()


def test_what_was_saved_survives_a_kill(state: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.runtimes.local.test_store import *\n"
        "store = Store(Path(sys.argv[1])); store.save_manifest(FIRST, STARTED, 1.0); store.save(KNOWN)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", script, str(state)], cwd=root, check=False).returncode == -9
    store = Store(state)
    assert store.manifest() == (1, FIRST)
    assert store.instances() == [KNOWN]
    store.close()


def test_a_file_that_is_not_ours_is_refused_with_what_to_do(state: Path) -> None:
    (state / FILE).write_text("this is not a database, whatever its name says. " * 30)
    with pytest.raises(PointsmanError, match=r"cannot be used .* move it away"):
        Store(state)


def test_a_newer_form_is_refused(state: Path) -> None:
    Store(state).close()
    with sqlite3.connect(state / FILE) as db:
        db.execute("pragma user_version = 99")
    db.close()
    with pytest.raises(PointsmanError, match="newer Pointsman"):
        Store(state)


def test_applications_have_versions_to_go_back_to(state: Path) -> None:
    store = Store(state)
    one, two, three = (ManifestText(text, "/a", "app.yaml") for text in ("one", "two", "three"))
    assert store.applications() == {}
    store.save_application("b", one, STARTED, 1.0)
    store.save_application("a", one, Changes(), 2.0)
    store.save_application("b", two, Changes(), 3.0)
    store.save_application("b", three, Changes(), 4.0)
    assert list(store.applications().items()) == [("b", three), ("a", one)]
    assert store.application_before("b") == two
    assert store.application_before("a") is None
    store.roll_back_application("b", Changes(), 5.0)
    store.roll_back_application("b", Changes(), 6.0)
    assert store.applications()["b"] == one
    assert store.application_before("b") is None
    store.close()
    again = Store(state)
    assert again.applications() == {"b": one, "a": one}
    again.delete_application("b", Changes((Change("close", "b", "gone"),)), 7.0)
    assert again.applications() == {"a": one}
    assert [happened.change.what for happened in again.history()] == ["close", "open", "start"]
    again.close()


def test_versions_of_applications_are_bounded(state: Path) -> None:
    store = Store(state)
    for number in range(APPLICATION_HISTORY + 5):
        store.save_application("a", ManifestText(str(number), "/"), Changes(), 1.0)
    for _ in range(APPLICATION_HISTORY - 1):
        assert store.application_before("a") is not None
        store.roll_back_application("a", Changes(), 1.0)
    assert store.application_before("a") is None
    assert store.applications()["a"].text == "5"
    store.close()


def test_targets_and_why_they_are_so_are_kept_and_bounded(state: Path) -> None:
    store = Store(state)
    assert store.scaling() == {}
    store.save_scaling({"m": "1", "n": "2"})
    store.save_scaling({"m": "3"})
    for number in range(SCALING_HISTORY + 5):
        store.note_scaling("m", str(number))
    store.note_scaling("n", "one")
    store.close()
    again = Store(state)
    assert again.scaling() == {"m": "3", "n": "2"}
    assert again.scaling_records("m") == [str(number) for number in range(5, SCALING_HISTORY + 5)]
    again.forget_scaling("m")
    assert again.scaling() == {"n": "2"}
    assert (again.scaling_records("m"), again.scaling_records("n")) == ([], ["one"])
    again.close()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_older_forms_are_brought_up_to_date(state: Path, version: int) -> None:
    place = ", place text" if version > 1 else ""
    applications = APPLICATIONS if version > 2 else ""
    with sqlite3.connect(state / FILE) as db:
        db.executescript(f"""
            create table manifests (generation integer primary key, text text, folder text, file text, at real);
            create table instances (id text primary key, deployment text, recipe text, host text, port integer,
                pid integer, born text{place}) without rowid;
            create table changes (id integer primary key, generation integer, at real, what text, subject text,
                why text);
            {applications}
            insert into manifests (text, folder, file, at) values ('one', '/a', 'one.yaml', 1.0);
            pragma user_version = {version};
        """)
    for _ in range(2):
        store = Store(state)
        assert store.manifest() == (1, FIRST)
        store.save(KNOWN)
        store.save_application("a", SECOND, Changes(), 1.0)
        assert store.instances() == [KNOWN]
        assert store.applications() == {"a": SECOND}
        store.save_scaling({"m": "state"})
        assert store.scaling() == {"m": "state"}
        store.close()
