import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.config.revision import ManifestText
from pointsman.errors import NotStored, PointsmanError
from pointsman.runtimes.machine.store import FILE, MAX_SCALING_RECORDS, MAX_VERSIONS, Store, StoredProcess
from tests.properties import examples

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


def reopened(store: Store, state: Path) -> list[StoredProcess]:
    """The processes that the next plane finds."""
    store.close()
    again = Store(state)
    again.close()
    return again.processes.found


def test_processes_are_saved_changed_and_removed(state: Path) -> None:
    store = Store(state)
    store.processes.save(KNOWN)
    store.processes.save(StoredProcess("m-1", "m", "recipe", "127.0.0.1", 4000, 77, "boot/1"))
    assert reopened(store, state) == [StoredProcess("m-1", "m", "recipe", "127.0.0.1", 4000, 77, "boot/1")]
    store = Store(state)
    store.processes.forget("m-1")
    store.processes.forget("unknown")
    assert reopened(store, state) == []


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
    assert store.processes.found == [KNOWN]
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


# When the file cannot be written


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Another program holds the lock for writing."""
    other = sqlite3.connect(state / FILE, isolation_level=None)
    other.execute("begin immediate")
    try:
        yield
    finally:
        other.execute("rollback")
        other.close()


NAMES = st.sampled_from(["a", "b"])
CHANGES = st.one_of(
    st.tuples(st.just("save"), NAMES, st.integers(1, 9)),
    st.tuples(st.just("forget"), NAMES, st.just(0)),
    st.tuples(st.just("target"), NAMES, st.integers(1, 9)),
    st.tuples(st.just("note"), NAMES, st.integers(1, 9)),
    st.tuples(st.just("forget target"), NAMES, st.just(0)),
    st.tuples(st.just("use"), NAMES, st.integers(1, 9)),
    st.tuples(st.just("forget usage"), NAMES, st.just(0)),
    st.tuples(st.sampled_from(["break", "repair", "retry"]), st.just(""), st.just(0)),
)


def change(store: Store, what: str, name: str, number: int) -> None:
    match what:
        case "save":
            store.processes.save(StoredProcess(name, "m", "r", "127.0.0.1", number))
        case "forget":
            store.processes.forget(name)
        case "target":
            store.targets.save_scaling({name: str(number)})
        case "note":
            store.targets.note_scaling(name, str(number))
        case "forget target":
            store.targets.forget_scaling(name)
        case "use":
            store.usage.save_usage({name: str(number)})
        case "forget usage":
            store.usage.forget_usage([name])


def content(state: Path) -> tuple[object, ...]:
    store = Store(state)
    records = {name: store.targets.scaling_records(name) for name in ("a", "b")}
    found = store.processes.found, store.targets.scaling(), records, store.usage.usage()
    store.close()
    return found


@given(changes=st.lists(CHANGES, max_size=30))
@settings(max_examples=examples(60), deadline=None)
def test_whatever_fails_meanwhile_the_file_is_the_same_in_the_end(changes: list[tuple[str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        sound, broken = Store(Path(one)), Store(Path(other))
        with ExitStack() as fault:
            for what, name, number in changes:
                if what == "break":
                    fault.close()
                    fault.enter_context(locked(Path(other)))
                elif what == "repair":
                    fault.close()
                elif what == "retry":
                    broken.behind.flush()
                else:
                    change(sound, what, name, number)
                    change(broken, what, name, number)
                    assert broken.targets.scaling() == sound.targets.scaling()
                    assert broken.usage.usage() == sound.usage.usage()
                    assert broken.targets.scaling_records(name) == sound.targets.scaling_records(name)
        broken.behind.flush()
        assert (len(broken.behind), broken.problem) == (0, None)
        sound.close()
        broken.close()
        assert content(Path(other)) == content(Path(one))


def test_what_cannot_be_written_waits_and_is_reported(state: Path) -> None:
    store = Store(state)
    with locked(state):
        store.processes.save(KNOWN)
        store.targets.save_scaling({"m": "1"})
        assert (len(store.behind), store.behind.failures) == (2, 1)  # a change after a failure waits for the next try
        store.behind.flush()
        assert store.behind.failures == 2
        assert "cannot be written for 0 s now (database is locked; another program has locked it" in str(store.problem)
        assert "2 changes wait to be stored" in str(store.problem)
    store.behind.flush()
    assert (len(store.behind), store.problem) == (0, None)
    store.targets.save_scaling({"m": "2"})
    assert len(store.behind) == 0
    assert reopened(store, state) == [KNOWN]


def test_documents_are_stored_together_or_not_at_all(state: Path) -> None:
    store = Store(state)
    [pages] = store._db.execute("pragma page_count").fetchone()
    store._db.execute(f"pragma max_page_count = {pages + 4}")  # the disk is full, so far as SQLite knows

    def save_too_much() -> None:
        with store.documents.together():
            store.documents.save_manifest(FIRST, 1.0)
            store.documents.save_application("a", ManifestText("x" * 1_000_000, "/a"), 1.0)

    with pytest.raises(NotStored, match=r"nothing was changed.*database or disk is full.*free space"):
        save_too_much()
    assert store.documents.manifest() is None
    assert store.documents.applications() == {}
    with store.documents.together():
        store.documents.save_manifest(FIRST, 1.0)
    assert store.documents.manifest() == (1, FIRST)
    store.close()


def test_a_document_is_refused_while_another_program_has_locked_the_file(state: Path) -> None:
    store = Store(state)
    with locked(state), pytest.raises(NotStored, match="another program has locked it"), store.documents.together():
        store.documents.save_manifest(FIRST, 1.0)
    assert store.documents.manifest() is None
    store.close()
