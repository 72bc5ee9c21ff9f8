"""Names that must be there and differ."""

from pointsman.config.problems import Path, Problems


class Names:
    """The names of one list of a document."""

    def __init__(self, word: str, problems: Problems) -> None:
        self._word = word
        self._problems = problems
        self._lines: dict[str, int] = {}

    def take(self, name: str, path: Path) -> None:
        """Check the name of the entry at a path. One that is INVALID is a problem already."""
        field = (*path, "name")
        if name == "":
            self._problems.add(field, "must not be empty")
        elif name and name in self._lines:
            self._problems.add(field, f'there is already a {self._word} "{name}" on line {self._lines[name]}')
        elif name:
            self._lines[name] = self._problems.line_of(field)
