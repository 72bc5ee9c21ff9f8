"""Sizes of the house: limits that may only shrink, and names that exist once."""

import pytest

from tests.architecture import house


def test_every_class_name_exists_once() -> None:
    assert house.repeated_class_names() == []


LINES_PER_FILE = 190
"""The mean, at least: a new idea may have a file, a fragment of one may not. Raise it when it grows; never lower it."""
SLACK = 5
"""Lines by which the mean may be higher before the limit must follow."""


def test_files_are_ideas_not_fragments() -> None:
    sizes = house.lines().values()
    mean = sum(sizes) / len(sizes)
    assert mean >= LINES_PER_FILE
    assert mean < LINES_PER_FILE + SLACK, f"set LINES_PER_FILE to {int(mean)}"


LIMITS = {
    "modules over 500 lines": 0,
    "classes with more than 12 methods": 11,
    "fragments: short modules with one importer": 0,
}
"""Lower a limit when the figure falls; never raise one."""


def figures() -> dict[str, list[str]]:
    return {
        "modules over 500 lines": house.long_modules(),
        "classes with more than 12 methods": house.classes_with_many_methods(),
        "fragments: short modules with one importer": house.fragments(),
    }


@pytest.mark.parametrize("figure", LIMITS)
def test_limits_only_shrink(figure: str) -> None:
    found = figures()[figure]
    assert len(found) <= LIMITS[figure], "\n".join(found)
    assert len(found) == LIMITS[figure], f"set the limit of {figure!r} to {len(found)}"


def test_all_http_is_in_one_room() -> None:
    """The status line, the parser and the standard library's clients are named in `http/` alone."""
    strangers = [
        f"{module}:{line}"
        for module in house.modules()
        if not module.startswith("pointsman.http")
        for line, _ in house.http_in(module)
    ]
    assert strangers == []
