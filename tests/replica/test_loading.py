"""Loading code by module and by file, and its errors."""

import os
from pathlib import Path
from textwrap import dedent

import pytest

from pointsman.pipeline.graph import CALL
from tests.replica.replicas import last_line, replica

SCRIPT = """
import pathlib
import pointsman as pm
from pointsman.pipeline.context import loading_stops_here
print("loaded")

@pm.deployment
class Model:
    def forward(self, x): return [x, __name__]

class Outer:
    class Inner:
        def forward(self): return "inner"

loading_stops_here("execute")  # what dag.execute() and app.deploy() do first
loading_stops_here("deploy")
pathlib.Path(__file__).with_name("ran").touch()

if __name__ == "__main__":
    raise SystemExit("this is for people")
"""


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(dedent(text))


@pytest.mark.parametrize("code", ["script.py:Model", "script:Model", "sub/../script.py:Model"])
def test_a_script_is_loaded_up_to_the_wanted_definition(tmp_path: Path, code: str) -> None:
    write(tmp_path, script=SCRIPT)
    (tmp_path / "sub").mkdir()
    with replica(tmp_path, code=code) as running:
        assert running.value("forward", 1) == [1, "script"]
    assert not (tmp_path / "ran").exists()


def test_a_nested_class_can_be_loaded(tmp_path: Path) -> None:
    write(tmp_path, script=SCRIPT)
    with replica(tmp_path, code="script.py:Outer.Inner") as running:
        assert running.value("forward") == "inner"


def test_modules_of_packages_and_files_can_import_their_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    write(
        package,
        __init__="",
        code="from package.other import two\nfrom .other import two as again\ndef f(): return two + again",
    )
    write(package, other="two = 2")
    with replica(tmp_path, code="package.code:f", kind="function") as running:
        assert running.value(CALL) == 4
    folder = tmp_path / "folder"
    folder.mkdir()
    write(
        folder, main="from beside import three\nfrom top import four\ndef f(): return three + four", beside="three = 3"
    )
    write(tmp_path, top="four = 4")
    with replica(tmp_path, code="folder/main.py:f", kind="function") as running:
        assert running.value(CALL) == 7


def test_a_file_may_have_the_name_of_an_installed_module(tmp_path: Path) -> None:
    write(tmp_path, json="def f(): return __name__", **{"my-code": "def f(): return 'dash'"})
    with replica(tmp_path, code="json.py:f", kind="function") as running:
        assert running.value(CALL).startswith("_pointsman_")
    with replica(tmp_path, code="my-code.py:f", kind="function") as running:
        assert running.value(CALL) == "dash"


def test_classes_of_a_script_are_sent_between_its_replicas(tmp_path: Path) -> None:
    write(
        tmp_path,
        types_of_mine="""
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        def make(): return Point(3)
        def read(point): return point.x + isinstance(point, Point)
        """,
    )
    with (
        replica(tmp_path, code="types_of_mine.py:make", kind="function") as maker,
        replica(tmp_path, code="types_of_mine.py:read", kind="function") as reader,
    ):
        point = maker.call(CALL).body
        assert point[0] == 1
        from pointsman.wire import CallHead, decode_value, encode_call, placeholder, template

        body = encode_call(CallHead(method=CALL, args=template([placeholder(0)])), [point])
        assert decode_value(reader.fetch("POST", "/call", body).body) == 4


@pytest.mark.parametrize(
    ("code", "last"),  # the codes after > can be loaded another time, for all that is known
    [
        ("missing.py:Model", "missing.py does not exist (looked for FOLDER/missing.py)"),
        ("script.py:Modle", 'script.py has no "Modle"; did you mean "Model"?'),
        ("script:Modle", 'script has no "Modle"; did you mean "Model"?'),
        ("script", '"script" names no code; write module:Name or path/to/file.py:Name'),
        (">raises.py:Model", "FOLDER/raises.py:3: ZeroDivisionError: division by zero"),
        (">raises:Model", "FOLDER/raises.py:3: ZeroDivisionError: division by zero"),
        ("syntax.py:Model", "FOLDER/syntax.py:1: SyntaxError: invalid syntax (syntax.py, line 1)"),
        ("imports.py:Model", "FOLDER/imports.py:1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("exits.py:Model", "FOLDER/exits.py:2: it called sys.exit('bye'); put that under if __name__ == '__main__'"),
        (">init.py:Model", "FOLDER/init.py:3: KeyError: 'no', while init.py:Model was made"),
        ("arguments.py:Model", "arguments.py:Model: TypeError: Model.__init__() missing 1 required positional arg"),
        ("lazy.py:Model", "FOLDER/lazy.py:3: ModuleNotFoundError: No module named 'nowhere_to_be_found', while lazy"),
        (">library.py:Model", "FOLDER/library.py:2: json.decoder.JSONDecodeError"),
    ],
)  # fmt: skip
def test_the_last_line_says_what_is_wrong(tmp_path: Path, code: str, last: str) -> None:
    write(
        tmp_path,
        script="class Model: ...",
        raises="\n\nx = 1 / 0",
        syntax="def",
        imports="import nowhere_to_be_found",
        exits="import sys\nsys.exit('bye')",
        init="class Model:\n    def __init__(self):\n        raise KeyError('no')",
        library="import json\njson.loads('{')",
        arguments="class Model:\n    def __init__(self, a): ...",
        lazy="class Model:\n    def __init__(self):\n        import nowhere_to_be_found",
    )
    exit_code = 1 if code.startswith(">") else os.EX_CONFIG
    line = last_line(tmp_path, exit_code=exit_code, code=code.removeprefix(">"))
    assert line.startswith(f"the replica cannot start: {last.replace('json.decoder.', '')}")


def test_a_missing_module(tmp_path: Path) -> None:
    assert "there is no module nothing_of_the_kind (looked in " in last_line(tmp_path, code="nothing_of_the_kind:f")
    assert "No module named 'nothing_of'" in last_line(tmp_path, code="nothing_of.the_kind:f")


def test_deploy_before_the_wanted_definition(tmp_path: Path) -> None:
    write(
        tmp_path,
        script="""
        from pointsman.pipeline.context import loading_stops_here
        loading_stops_here("execute")
        loading_stops_here("deploy")
        class Model: ...
        """,
    )
    assert last_line(tmp_path, code="script.py:Model").endswith(
        "script.py: Model is defined below deploy(); define it above, or put deploy() under if __name__ == '__main__'"
    )
