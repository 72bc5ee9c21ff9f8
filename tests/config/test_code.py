"""The user's code: what belongs to its version, and modules whose files have changed."""

import os
import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.config.code import CodeInForce, SourceTree, code_in, code_version, load_module, own_roots


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With modules of the user's, which can be imported."""
    write(tmp_path, "own_policy.py", "import own_helper\nfrom own_package import part\nLIMIT = own_helper.LIMIT\n")
    write(tmp_path, "own_helper.py", "import json\nLIMIT = 1\n")
    write(tmp_path, "own_package/__init__.py", "")
    write(tmp_path, "own_package/part.py", "from . import sibling\nfrom .sibling import X\n")
    write(tmp_path, "own_package/sibling.py", "X = 1\n")
    write(tmp_path, "own_other.py", "import own_helper\nLIMIT = own_helper.LIMIT\n")
    write(tmp_path, "own_unrelated.py", "")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def test_a_version_has_everything_that_is_imported_from_the_folder(folder: Path) -> None:
    found = SourceTree([folder]).modules_of("own_policy")
    assert set(found) == {"own_policy", "own_helper", "own_package", "own_package.part", "own_package.sibling"}
    assert set(SourceTree([folder]).modules_of("own_policy.py")) - {"own_policy.py"} == set(found) - {"own_policy"}
    assert SourceTree([folder]).modules_of("json") == {}


def test_packages_of_another_environment_are_none_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "other" / "site-packages"
    installed.mkdir(parents=True)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(tmp_path)
    assert tmp_path in own_roots()
    assert installed not in own_roots()


@pytest.mark.parametrize(
    ("name", "changes"),
    [("own_policy.py", True), ("own_helper.py", True), ("own_package/sibling.py", True), ("own_unrelated.py", False)],
)
def test_a_version_changes_with_its_files_alone(folder: Path, name: str, changes: bool) -> None:
    before = code_version(["own_policy:LIMIT"], [folder])
    write(folder, name, (folder / name).read_text() + "# edited\n")
    assert (code_version(["own_policy:LIMIT"], [folder]) != before) is changes


def test_code_in_a_section_is_found_wherever_it_is_named(folder: Path) -> None:
    section = {"policy": "max-of", "parameters": {"policies": [{"policy": "own_policy:P"}, {"policy": "own_other:P"}]}}
    assert set(code_in(section)) == {"own_policy:P", "own_other:P"}
    assert code_in({"plugins": [{"type": "queue-scorer"}], "policy": "fifo"}) == {}


def test_an_edited_module_is_loaded_anew_and_the_earlier_one_stays_as_it_is(folder: Path) -> None:
    first = load_module("own_policy")
    assert load_module("own_policy") is first, "nothing has changed"
    write(folder, "own_helper.py", "import json\nLIMIT = 2\n")  # of the same size, in the same second
    second = load_module("own_policy")
    assert (first.LIMIT, second.LIMIT) == (1, 2)
    assert first.own_helper.LIMIT == 1
    assert second.part is first.part, "what has not changed is not loaded again"


def test_modules_that_share_one_are_loaded_anew_one_by_one(folder: Path) -> None:
    policy, other = load_module("own_policy"), load_module("own_other")
    write(folder, "own_helper.py", "LIMIT = 3\n")
    assert load_module("own_policy").LIMIT == 3
    assert (policy.LIMIT, other.LIMIT) == (1, 1)
    assert load_module("own_other").LIMIT == 3


def test_a_module_that_does_not_load_leaves_what_was_there(folder: Path) -> None:
    first = load_module("own_policy")
    write(folder, "own_helper.py", "raise RuntimeError('no')\n")
    with pytest.raises(RuntimeError, match="no"):
        load_module("own_policy")
    assert sys.modules["own_policy"] is first
    write(folder, "own_helper.py", "LIMIT = 4\n")
    assert load_module("own_policy").LIMIT == 4


def test_bytecode_of_the_same_second_is_not_loaded_again(tmp_path: Path) -> None:
    """Python takes it for current, if the size is the same as well."""
    source = tmp_path / "own_word.py"
    source.write_text("WORD = 'one'\n")
    compiled = Path(str(py_compile.compile(str(source))))
    second = 1_700_000_000 * 10**9
    os.utime(compiled, ns=(second, second + 1))
    os.utime(source, ns=(second, second))
    code = CodeInForce(["own_word:WORD"], [tmp_path])
    assert compiled.exists()
    source.write_text("WORD = 'two'\n")
    os.utime(source, ns=(second, second + 2))
    assert code.is_edited()
    assert not compiled.exists()
