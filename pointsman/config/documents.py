"""Text -> a document of one of several kinds, with the lines of everything in it."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pointsman.config.problems import Problems
from pointsman.config.section import Section
from pointsman.config.source import text_of
from pointsman.config.validation import INVALID, Validator
from pointsman.config.wording import found
from pointsman.config.yaml import read_yaml
from pointsman.errors import did_you_mean

TELLING: Mapping[str, frozenset[str]] = {
    "Pointsman": frozenset({"deployments", "gateway", "workers", "applications"}),
    "Application": frozenset({"nodes", "calls", "output", "ingress"}),
}
"""Fields that tell our own documents from a picker's, where they do not say their kind."""


def document_of(
    source: Path | str,
    kinds: Mapping[str, type[Section]],
    folder: Path | None = None,
    file: str = "",
    *,
    was_in_force: bool = False,
) -> tuple[Any, Problems]:
    """The document, as far as it can be read, and what is wrong with it. `folder`: what its paths are relative to."""
    text, name = (source, "<text>") if isinstance(source, str) else (text_of(source), str(source))
    data, problems = read_yaml(text, file or name)
    problems.was_in_force = was_in_force
    if data is None:
        problems.raise_if_any()
        data = {}
    if not isinstance(data, dict):
        problems.add((), f"expected a mapping (field: value), found {found(data)}")
        return INVALID, problems
    kind = _kind(data, kinds, problems)
    return Validator(problems, folder=folder).value({**data, "kind": kind}, kinds[kind], ()), problems


def folder_of(source: Path | str, folder: Path | str | None) -> Path:
    """What paths in a document are relative to: the folder of its file, and for text the current one."""
    if folder is None:
        folder = Path() if isinstance(source, str) else source.parent
    return Path(folder).absolute()


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Classes of the author's own may be in modules beside the document."""
    place = str(folder)
    if place in sys.path:
        yield
        return
    sys.path.append(place)
    try:
        yield
    finally:
        sys.path.remove(place)


def _kind(data: dict[str, Any], kinds: Mapping[str, type[Section]], problems: Problems) -> str:
    """The kind of a document. For one that is misspelled or missing, the likeliest, so that the rest is checked too."""
    kind = data.get("kind")
    if isinstance(kind, str) and kind in kinds:
        return kind
    likely = next((name for name in kinds if TELLING.get(name, frozenset()) & data.keys()), next(iter(kinds)))
    if kind is None:
        return likely
    if not isinstance(kind, str):
        problems.add(("kind",), f"expected text, found {found(kind)}")
        return likely
    problems.add(("kind",), f'unknown kind "{kind}"{did_you_mean(kind, kinds)}')
    return (get_close_matches(kind, kinds, n=1) or [likely])[0]
