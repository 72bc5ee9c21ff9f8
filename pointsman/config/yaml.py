"""YAML text -> plain data, with the line of everything in it.

Enters: text. Leaves: dicts, lists, text, numbers, and for each path its line. The one rule: nothing in here knows
what the data means. Mistakes of the YAML itself are collected, and whatever can still be read is.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from pointsman.config.problems import FieldPath, Problems

MOST_VALUES = 100_000
"""A document with more values than this is a mistake, or an attack that repeats an anchor again and again."""

DEEPEST = 100
"""Composing a document is recursive, in C: one nested without end would end the process."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def read_yaml(text: str, file: str) -> tuple[Any, Problems]:
    """The data (None for an empty document) and a collector that knows its lines and the mistakes so far."""
    lines: dict[FieldPath, int] = {}
    problems = Problems(file, lines)
    try:
        too_deep = _line_nested_too_deeply(text)
        node = yaml.compose(text, _Loader) if too_deep is None else None
    except yaml.YAMLError as error:
        problems.add_at(*_syntax_error(error, text))
        return None, problems
    if too_deep is not None:
        problems.add_at(too_deep, f"values are nested more than {DEEPEST} deep here")
    return None if node is None else _Reader(lines, problems).value(node, ()), problems


def _line_nested_too_deeply(text: str) -> int | None:
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            return int(event.start_mark.line) + 1
    return None


class _Reader:
    """Turns nodes into data, noting where each was."""

    def __init__(self, lines: dict[FieldPath, int], problems: Problems) -> None:
        self._lines = lines
        self._problems = problems
        self._constructor: Any = SafeConstructor()
        self._inside: set[int] = set()
        self._count = 0

    def value(self, node: yaml.Node, path: FieldPath) -> Any:
        self._lines.setdefault(path, node.start_mark.line + 1)
        self._count += 1
        if self._count > MOST_VALUES:
            if self._count == MOST_VALUES + 1:
                self._problems.add(path, f"the document has more than {MOST_VALUES} values; are anchors repeated?")
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
            return [self.value(child, (*path, place)) for place, child in enumerate(node.value)]
        finally:
            self._inside.discard(id(node))

    def _pairs(self, node: yaml.MappingNode, path: FieldPath) -> Iterator[tuple[str, yaml.Node]]:
        self._report_repeated_keys(node, path)
        try:
            self._constructor.flatten_mapping(node)  # what `<<` brings comes first, so that own keys win
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
                message = f"is given twice, first on line {first[key.value]}"
                self._problems.add_at(line, message, (*path, key.value))
            first.setdefault(key.value, line)

    def _scalar(self, node: yaml.ScalarNode, path: FieldPath) -> Any:
        tag, text = node.tag.rpartition(":")[2], node.value
        if tag == "timestamp" or (tag in ("int", "float") and ":" in text):
            return text  # 2026-01-01 and 1:30 are text here, not a date and not sexagesimal
        if tag == "str" and not node.style and _EXPONENT.fullmatch(text):
            return float(text)  # YAML 1.1 wants a dot in 1e9; people do not
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
