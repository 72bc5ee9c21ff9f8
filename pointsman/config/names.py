"""Names that must be there and differ."""

from collections.abc import Iterable

from pointsman.config.problems import FieldPath, Problems
from pointsman.config.wording import a


class Names:
    """The names of one list of a document."""

    def __init__(self, word: str, problems: Problems, taken: Iterable[str] = ()) -> None:
        """`taken`: names that others outside of the list have."""
        self._word = word
        self._problems = problems
        self._lines = dict.fromkeys(taken, 0)

    def take(self, name: str, path: FieldPath) -> None:
        """Check the name of the entry at a path. One that is INVALID is a problem already."""
        field = (*path, "name")
        if name == "":
            self._problems.add(field, "must not be empty")
        elif name and name in self._lines:
            where = f" on line {self._lines[name]}" if self._lines[name] else ""
            self._problems.add(field, f'there is already {a(self._word)} "{name}"{where}')
        elif name:
            self._lines[name] = self._problems.line_of(field)
