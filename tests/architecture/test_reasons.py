"""Reasons are data: their codes are listed and documented, and no function reads the text of one.

The tests read the source; nothing but the table of sentences is imported.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pointsman.render.sentences import SENTENCES
from tests.architecture.house import PACKAGE, SOURCES, nodes_of

ROOT = Path(__file__).parents[2]

TEXTS = {"why", "reason", "text", "message", "words", "short_reason", "problem"}
"""Attributes, JSON fields and variables that hold the text of a reason."""
LOCAL = TEXTS - {"text", "message", "words"}
"""Those that are also variables; the others name all kinds of text there."""
RENDERING = {"sentence", "kind", "detail", "group_counts", "in_words"}
"""Functions that render a reason."""
READING = {
    "startswith", "endswith", "partition", "rpartition", "split", "rsplit", "splitlines", "removeprefix",
    "removesuffix", "find", "rfind", "index", "count", "replace", "translate",
}  # fmt: skip
"""Methods of str that look into a text or take it apart."""
SEARCHING = {"match", "fullmatch", "search", "findall", "finditer", "sub", "split"}
"""The same of regular expressions."""
NO_REASONS = {"cli/logs.py"}
"""Its text is a log."""


REASONS = {"why", "reason", "refusal", "failure", "unplaced", "cause", "because", "absence", "dropped"}
"""Names of values that are reasons: `str()` of one is its text."""
RENDERED_AT_THE_EDGE = {"text"}
"""Facts that are texts by definition: of plugins, and of reasons that go to another process."""


def is_rendered(node: ast.AST) -> bool:
    """Whether an expression renders a reason."""
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name) | ast.Attribute(attr=name)]):
            return name in REASONS
        case ast.Call(func=ast.Name(id=name)):
            return name in RENDERING
        case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id=name) | ast.Attribute(attr=name))]):
            return name in REASONS
        case ast.Tuple(elts=elements):
            return any(map(is_rendered, elements))
    return False


def is_text(node: ast.AST) -> bool:
    """Whether an expression is, by its name, the text of a reason."""
    match node:
        case ast.Attribute(attr=name):
            return name in TEXTS
        case ast.Name(id=name):
            return name in LOCAL
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name in TEXTS
        case ast.Call(func=ast.Name(id="str"), args=[given]):
            return is_text(given) or (isinstance(given, ast.Name) and given.id in ("failure", "refusal", "unplaced"))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in RENDERING
    return False


MAKERS = {"Reason", "having"}


def called(func: ast.AST) -> str:
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""


def readings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, expression) where the text of a reason is read."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=read, attr=method)) if method in READING and is_text(read):
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr=method), args=given) if method in SEARCHING and any(
                is_text(one) for one in given
            ):
                yield node.lineno, ast.unparse(node)
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[read]) if is_text(read):
                yield node.lineno, ast.unparse(node)
            case ast.Compare(left=read, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=str(given))]) if (
                given and is_text(read)
            ):
                yield node.lineno, ast.unparse(node)
            case ast.Subscript(value=read, slice=ast.Slice()) if is_text(read):
                yield node.lineno, ast.unparse(node)
            case ast.Subscript(slice=key) if is_rendered(key):
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr="get" | "setdefault" | "pop" | "add"), args=[key, *_]) if is_rendered(
                key
            ):
                yield node.lineno, ast.unparse(node)
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn() | ast.Eq() | ast.NotEq()]) if is_rendered(key):
                yield node.lineno, ast.unparse(node)
            case ast.Dict(keys=keys) | ast.DictComp(key=ast.AST() as keys) if any(
                one is not None and is_rendered(one) for one in (keys if isinstance(keys, list) else [keys])
            ):
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=func, args=[_, ast.Dict(keys=names, values=facts)]) if called(func) in MAKERS and any(
                is_rendered(fact) and not (isinstance(name, ast.Constant) and name.value in RENDERED_AT_THE_EDGE)
                for name, fact in zip(names, facts, strict=True)
            ):
                yield node.lineno, ast.unparse(node)


def test_no_function_reads_the_text_of_a_reason() -> None:
    """To recognise or group reasons, compare codes and facts."""
    found = [
        f"{source.relative_to(PACKAGE)}:{line}: {expression}"
        for source in SOURCES
        if str(source.relative_to(PACKAGE)) not in NO_REASONS
        for line, expression in readings(nodes_of(source))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        'kinds = Counter(why.partition(":")[0] for _, _, why in self.reasons())',
        "refusal.why.partition(START_ONE)[0]",
        'words = self.reason.removeprefix("no place: ") if waits else self.reason',
        'told = self.reason and not self.reason.startswith("not ready yet")',
        'why = self.short_reason.partition(":")[0]',
        "any(why.startswith(NOT_ALLOWED) for _, why in told)",
        '"hopeless" in str(failure)',
        'told["reason"].startswith("no place")',
        're.sub("Z$", "", record.why)',
        "sentence(code, facts)[:20]",
        'instance.reason == "no place"',
        "groups.setdefault((one.deployment, str(one.reason)), [])",
        "counts[str(record.why)] += 1",
        "{str(one.reason): one for one in instances}",
        "str(reason) in shown",
        "str(one.why) == str(other.why)",
        'Reason("given-up", {"instances": names, "why": str(refusal)})',
    ],
)
def test_what_reads_a_text_is_found(code: str) -> None:
    assert list(readings(ast.walk(ast.parse(code))))


# Codes


def made_codes() -> Iterator[tuple[str, str]]:
    """(code, where) of every reason made in the package with a literal code."""
    for source in SOURCES:
        for node in nodes_of(source):
            match node:
                case ast.Call(func=ast.Name(id="Reason"), args=[ast.Constant(value=str(code)), *_]):
                    pass
                case ast.Call(
                    func=ast.Name(id="Rejected") | ast.Subscript(value=ast.Name(id="Rejected")),
                    args=[_, _, ast.Constant(value=str(code))],
                ):
                    pass
                case _:
                    continue
            yield code, f"{source.relative_to(PACKAGE)}:{node.lineno}"


def test_every_code_that_is_made_has_a_sentence() -> None:
    assert [f"{where}: {code}" for code, where in made_codes() if code not in SENTENCES] == []


def test_every_sentence_is_of_a_code_that_is_made() -> None:
    literals = {
        node.value
        for source in SOURCES
        if source.name != "sentences.py"
        for node in nodes_of(source)
        if isinstance(node, ast.Constant)
    }
    assert SENTENCES.keys() - literals == set()


def test_codes_are_kebab_case() -> None:
    assert [code for code in SENTENCES if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)] == []


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    """docs/reasons.md: a row `| `code` | facts | when |` for each."""
    page = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `([a-z0-9-]+)` \|", page, flags=re.MULTILINE)
    assert sorted(documented) == sorted(SENTENCES)
