"""A module as a user would write it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

OWN = '''
from typing import Annotated
from pointsman.parameters import PluginRef
from pointsman.strategies import SchedulingPolicy


class PreferShortNames:
    """Shorter is better."""

    def __init__(self, longest_name: int = 8, favourite: str | None = None) -> None:
        if longest_name < 1:
            raise ValueError(f"longestName must be positive, found {longest_name}")
        self.longest_name, self.favourite = longest_name, favourite

    def scores(self, cycle, candidates):
        return [1.0 - min(len(str(one)), self.longest_name) / self.longest_name for one in candidates]


class Pair:
    def __init__(self, other: Annotated[object, PluginRef("scorer")]) -> None:
        self.other = other

    def scores(self, cycle, candidates):
        return [0.0] * len(candidates)


class Anything:
    def __init__(self, **settings) -> None:
        self.settings = settings

    def rejections(self, cycle, candidates):
        return ()


class Broken:
    def __init__(self) -> None:
        raise KeyError("no such luck")

    def scores(self, cycle, candidates):
        return [0.0] * len(candidates)


class MyPolicy(SchedulingPolicy):
    def __init__(self, patience_s: float = 1.0) -> None:
        self.patience_s = patience_s

    def schedule(self, requests, instances):
        return []


class Roleless:
    pass


def prefer_short_names():
    return PreferShortNames()
'''


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an importable module."""
    (tmp_path / "my_plugins.py").write_text(OWN)
    (tmp_path / "broken_plugins.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_plugins"
    for name in ("my_plugins", "broken_plugins"):
        sys.modules.pop(name, None)
