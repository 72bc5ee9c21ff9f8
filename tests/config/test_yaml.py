"""YAML text becomes data with lines; its mistakes are collected."""

from typing import Any

import pytest

from pointsman.config.yaml import MAX_DEPTH, MAX_VALUES, read_yaml


def read(text: str) -> tuple[Any, list[str]]:
    data, problems = read_yaml(text, "f.yaml")
    return data, [str(problem) for problem in problems]


def test_every_path_has_its_line() -> None:
    _, problems = read_yaml("a: 1\nb:\n- c: 2\n  d: [3,\n    4]\n", "f.yaml")
    lines = {path: problems.line_of(path) for path in [("a",), ("b",), ("b", 0), ("b", 0, "d"), ("b", 0, "d", 1)]}
    assert lines == {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 0, "d"): 4, ("b", 0, "d", 1): 5}


def test_what_is_not_there_is_reported_at_the_nearest_thing_around_it() -> None:
    _, problems = read_yaml("a: 1\nb:\n- c: 2\n", "f.yaml")
    assert problems.line_of(("b", 0, "missing", "deeper")) == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("'1e9'", "1e9"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("yes", True),
        ("0x10", 16),
        ("~", None),
        ("text", "text"),
    ],
)
def test_scalars_are_what_people_mean(text: str, value: object) -> None:
    data, problems = read(f"a: {text}")
    assert (data, problems) == ({"a": value}, [])


def test_anchors_and_merges_work_and_own_keys_win() -> None:
    data, problems = read("base: &b {p: 1, q: 2}\nuse:\n  <<: *b\n  q: 3\nlist: [*b]\n")
    assert data["use"] == {"p": 1, "q": 3}
    assert data["list"] == [{"p": 1, "q": 2}]
    assert problems == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a: is given twice, first on line 1"),
        ("x:\n  - a: 1\n    a: 2\n", "f.yaml:3: x[0].a: is given twice, first on line 2"),
        ("a: &a [*a]", "f.yaml:1: a[0]: this anchor contains itself"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document starts here; one file holds one document"),
        ("? [a]\n: b\n", "f.yaml:1: a field name must be text"),
        ("\n\nx: {<<: 5}\n", "f.yaml:3: x: a merge (<<) needs a mapping"),
    ],
)
def test_mistakes_of_the_form(text: str, problem: str) -> None:
    _, problems = read(text)
    assert len(problems) == 1
    assert problems[0].startswith(problem)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: [1,\n  b\nc: 2\n", 3), ("a:\n\t- b\n", 2), ("x: *nobody", 1), ("ok: 1\nbad: \x01\n", 2), ("a: 'open\n", 1)],
)
def test_syntax_errors_are_one_problem_with_a_line(text: str, line: int) -> None:
    data, problems = read(text)
    assert data is None
    assert len(problems) == 1
    assert problems[0].startswith(f"f.yaml:{line}: this is not YAML: ")


def test_code_in_a_document_is_never_run() -> None:
    _, problems = read("a: !!python/object/apply:os.getcwd []\nb: !!python/name:os.getcwd x\n")
    assert [problem for problem in problems if "b: cannot be read" in problem]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_endless_nesting_is_a_problem_and_not_a_crash(opening: str) -> None:
    data, problems = read(opening * 50_000)
    assert data is None
    assert problems == [f"f.yaml:1: values are nested more than {MAX_DEPTH} deep here"]


def test_anchors_repeated_without_end_are_a_problem() -> None:
    text = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    _, problems = read(text)
    assert len(problems) == 1
    assert f"more than {MAX_VALUES} values" in problems[0]


def test_an_empty_document_is_nothing() -> None:
    assert read("# only a comment\n") == (None, [])
