import os
from pathlib import Path

import pytest

from pointsman.errors import PointsmanError
from pointsman.runtimes.machine import logs
from pointsman.runtimes.machine.logs import PIECE, last_line, log_file, tail


def written(folder: Path, text: str, older: str = "") -> Path:
    file = folder / "m-1.log"
    file.write_text(text)
    if older:
        (folder / "m-1.log.1").write_text(older)
    return file


def test_the_tail_goes_across_both_files(tmp_path: Path) -> None:
    file = written(tmp_path, "four\nfive\n", "one\ntwo\nthree\n")
    assert tail(file, 1) == "five\n"
    assert tail(file, 2) == "four\nfive\n"
    assert tail(file, 3) == "three\nfour\nfive\n"
    assert tail(file, 99) == "one\ntwo\nthree\nfour\nfive\n"
    assert tail(file, 0) == tail(tmp_path / "missing.log", 10) == ""


def test_the_tail_of_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    lines = [f"line {number} {'x' * 100}" for number in range(3 * PIECE // 100)]
    file = written(tmp_path, "\n".join(lines))
    assert tail(file, 1500).splitlines() == lines[-1500:]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("hello\nout of memory\n\n  \n", "out of memory"),
        ("[pointsman] x started as process 7: engine\n[pointsman] x process 7 ended: code 1\n", ""),
        ("from before\n[pointsman] x started as process 7: engine\n", ""),
        (
            "[pointsman] x started as process 7: engine\nno weights\n[pointsman] x process 7 ended: code 1\n",
            "no weights",
        ),
        ("y" * 500, "y" * 300 + "..."),
        (b"caf\xe9 \xff".decode("latin-1"), "café ÿ"),
    ],
)
def test_the_last_line_is_from_the_last_run(tmp_path: Path, text: str, words: str) -> None:
    assert last_line(written(tmp_path, text)) == words


def test_the_newest_logs_of_removed_instances_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOGS", 2)
    (tmp_path / logs.FOLDER).mkdir()
    for age, name in enumerate(["new", "newer", "old", "older", "known"]):
        for file in (log_file(tmp_path, name), log_file(tmp_path, name).with_suffix(".log.1")):
            file.write_text(name)
            os.utime(file, (1000 - age, 1000 - age))
    logs.prune(tmp_path, {"known"})
    kept = sorted(file.name for file in (tmp_path / logs.FOLDER).iterdir())
    assert kept == ["known.log", "known.log.1", "new.log", "new.log.1", "newer.log", "newer.log.1"]


@pytest.mark.parametrize("name", ["../lock", "a/b", ".hidden", "a\0b"])
def test_names_cannot_leave_the_log_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(PointsmanError, match="not the name of an instance"):
        log_file(tmp_path, name)
