"""YAML text -> plain data with the line of every value, and from there to a document of one of our kinds.

Enters: text. Leaves: dicts, lists, text and numbers, or a document. The one rule: mistakes in the YAML itself are
collected, and everything that can still be read is read.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from pointsman.config.problems import FieldPath, Problem, Problems, found
from pointsman.config.validation import INVALID, Section, Validator
from pointsman.errors import ConfigError, did_you_mean, text_of_file, why_unusable

MAX_VALUES = 100_000
"""A document with more values is a mistake, or an attack that repeats an anchor again and again."""
MAX_DEPTH = 100
"""The maximum nesting. PyYAML composes documents recursively, in C: deeper nesting would crash the process."""
OWN_FIELDS: Mapping[str, frozenset[str]] = {
    "Pointsman": frozenset({"deployments", "gateway", "workers", "applications"}),
    "Application": frozenset({"nodes", "calls", "output", "ingress"}),
}
"""The fields by which a document without a `kind` is recognised as one of ours."""
PICKER_FIELDS = frozenset({"plugins", "schedulingProfiles"})
ELSEWHERE = {
    "EndpointPickerConfig": "an EndpointPickerConfig, which is part of a manifest: write its fields under "
    "deployments[].scheduling.config, of the deployment whose requests it schedules",
    "Fleet": "a fleet, which is not part of a manifest; use it with --fleet of the command place",
}
"""Kinds of documents that belong elsewhere: what each kind is, and where it belongs."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def text_of(path: Path) -> str:
    """The text of a file. Raises `ConfigError` if it cannot be read."""
    try:
        return text_of_file(path)
    except OSError as error:
        line, why = 0, why_unusable(path, error)
    except UnicodeDecodeError as error:
        is_binary = b"\0" in error.object  # line numbers mean nothing in a binary file
        line = 0 if is_binary else error.object.count(b"\n", 0, error.start) + 1
        why = why_unusable(path, error)
    raise ConfigError([Problem(str(path), line, "", f"cannot be read: {why}")])


def read_yaml(text: str, file: str) -> tuple[Any, Problems]:
    """The data (None if the document is empty), and a collector with the lines of the data and all problems so far."""
    lines: dict[FieldPath, int] = {}
    problems = Problems(file, lines)
    try:
        too_deep = _line_nested_too_deeply(text)
        node = yaml.compose(text, _Loader) if too_deep is None else None
    except yaml.YAMLError as error:
        problems.add_at(*_syntax_error(error, text))
        return None, problems
    if too_deep is not None:
        problems.add_at(too_deep, f"values are nested more than {MAX_DEPTH} deep here")
    return None if node is None else _Reader(lines, problems).value(node, ()), problems


def _line_nested_too_deeply(text: str) -> int | None:
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return int(event.start_mark.line) + 1
    return None


class _Reader:
    """Turns nodes into data and records their lines."""

    def __init__(self, lines: dict[FieldPath, int], problems: Problems) -> None:
        self._lines = lines
        self._problems = problems
        self._constructor: Any = SafeConstructor()
        self._inside: set[int] = set()
        self._count = 0

    def value(self, node: yaml.Node, path: FieldPath) -> Any:
        self._lines.setdefault(path, node.start_mark.line + 1)
        self._count += 1
        if self._count > MAX_VALUES:
            if self._count == MAX_VALUES + 1:
                self._problems.add(path, f"the document has more than {MAX_VALUES} values; are anchors repeated?")
            return None
        if id(node) in self._inside:
            self._problems.add(path, "this anchor contains itself")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._inside.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return {key: self.value(child, (*path, key)) for key, child in self._pairs(node, path)}
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        finally:
            self._inside.discard(id(node))

    def _pairs(self, node: yaml.MappingNode, path: FieldPath) -> Iterator[tuple[str, yaml.Node]]:
        self._report_repeated_keys(node, path)
        try:
            self._constructor.flatten_mapping(node)  # merged keys come first: own keys override them
        except ConstructorError as error:
            self._problems.add_at(_line(error), f"a merge (<<) needs a mapping: {error.problem}", path)
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._problems.add_at(key.start_mark.line + 1, "a field name must be text", path)
                continue
            self._lines[(*path, key.value)] = key.start_mark.line + 1
            yield key.value, child

    def _report_repeated_keys(self, node: yaml.MappingNode, path: FieldPath) -> None:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if key.value in first:
                self._problems.add_at(line, f"is given twice, first on line {first[key.value]}", (*path, key.value))
            first.setdefault(key.value, line)

    def _scalar(self, node: yaml.ScalarNode, path: FieldPath) -> Any:
        tag, text = node.tag.rpartition(":")[2], node.value
        if tag == "timestamp" or (tag in ("int", "float") and ":" in text):
            return text  # 2026-01-01 and 1:30 are text, not a date or a sexagesimal number
        if tag == "str" and not node.style and _EXPONENT.fullmatch(text):
            return float(text)  # YAML 1.1 would read 1e9 as text, because it has no dot
        try:
            return self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            self._problems.add(path, f"cannot be read: {getattr(error, 'problem', None) or error}")
            return None


def _syntax_error(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    if isinstance(error, yaml.MarkedYAMLError):
        if error.context and "expected a single document" in error.context:
            return _line(error), "a second document starts here; one file holds one document"
        words = " ".join(filter(None, [error.context, error.problem]))
        last = text.count("\n", 0, len(text.rstrip())) + 1
        return min(_line(error), last), f"this is not YAML: {words}"
    position = getattr(error, "position", 0)
    return text.count("\n", 0, position) + 1, f"this is not YAML: {getattr(error, 'reason', error)}"


def _line(error: yaml.MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark is not None else 0


def document_of(
    source: Path | str,
    kinds: Mapping[str, type[Section]],
    folder: Path | None = None,
    file: str = "",
    *,
    was_in_force: bool = False,
    empty: str = "",
) -> tuple[Any, Problems]:
    """The document, as far as it can be read, and its problems. Paths in the document are relative to `folder`. `empty`
    is the problem to report if the document has no content. Without it, such a document has all defaults."""
    text, name = (source, "<text>") if isinstance(source, str) else (text_of(source), str(source))
    data, problems = read_yaml(text, file or name)
    problems.was_in_force = was_in_force
    if data is None:
        problems.raise_if_any()
        data = {}
    if data == {} and empty:
        problems.add((), empty)
        problems.raise_if_any()
    if not isinstance(data, dict):
        problems.add((), f"expected a mapping (field: value), found {found(data)}")
        return INVALID, problems
    kind = _kind(data, kinds, problems)
    return Validator(problems, folder=folder).value({**data, "kind": kind}, kinds[kind], ()), problems


def folder_of(source: Path | str, folder: Path | str | None) -> Path:
    """The folder that paths in a document are relative to: by default that of its file; for text, the current one."""
    if folder is None:
        folder = Path() if isinstance(source, str) else source.parent
    return Path(folder).absolute()


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make modules in the document's folder importable: they may contain the user's own classes."""
    entry = str(folder)
    if entry in sys.path:
        yield
        return
    sys.path.append(entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _kind(data: dict[str, Any], kinds: Mapping[str, type[Section]], problems: Problems) -> str:
    """The kind of a document. If the kind is misspelled or missing, the likeliest kind, so that the rest is checked."""
    kind = data.get("kind")
    if isinstance(kind, str) and kind in kinds:
        return kind
    own = any(fields & data.keys() for fields in OWN_FIELDS.values())
    meant = "EndpointPickerConfig" if kind is None and not own and PICKER_FIELDS & data.keys() else kind
    if isinstance(meant, str) and meant in ELSEWHERE and meant not in kinds:
        problems.add(("kind",), f"this is {ELSEWHERE[meant]}")
        problems.raise_if_any()  # the rest of the document cannot be checked
    likely = next((name for name in kinds if OWN_FIELDS.get(name, frozenset()) & data.keys()), next(iter(kinds)))
    if kind is None:
        return likely
    if not isinstance(kind, str):
        problems.add(("kind",), f"expected text, found {found(kind)}")
        return likely
    problems.add(("kind",), f'unknown kind "{kind}"{did_you_mean(kind, kinds)}')
    return (get_close_matches(kind, kinds, n=1) or [likely])[0]
