"""Looks for a case in which a promise is broken, and shrinks it to the smallest one."""

import copy
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.strategies import SearchStrategy

from pointsman.lab.check.report import Broken, Trying, Watch

Case = TypeVar("Case")

ENOUGH_S = 5.0
"""Of answers, while a promise is searched, and again while what was found is shrunk: the slow are asked less."""


def drawn(cases: SearchStrategy[Case], count: int) -> list[Case]:
    """So many of them, always the same."""
    found: list[Case] = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        verbosity=Verbosity.quiet,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


class Search(msgspec.Struct, Generic[Case], frozen=True):
    """Where to look, and who sees how it goes on."""

    cases: Sequence[Case]
    shrink: Callable[[Case, Callable[[Case], bool]], Case]
    show: Callable[[Case], str]
    watch: Watch

    def broken(self, name: str, promise: Callable[[Case], str | None]) -> Broken | None:
        """The smallest case in which the promise of this name is broken, and what is; None: none was found."""
        said: list[str] = []
        spent_s = 0.0

        def shows(case: Case) -> bool:
            nonlocal spent_s
            if spent_s > ENOUGH_S:
                return False
            self.watch.tell(Trying(name, self.show(case)))
            given, began = copy.deepcopy(case), time.perf_counter()  # it may be changed, and others come after
            try:
                what = promise(given)
            except Exception:  # it raised, which another promise reports
                what = None
            spent_s += time.perf_counter() - began
            # Kept now: whoever decides by chance may not do it again.
            said.extend(() if what is None else (what,))
            return what is not None

        found = next(filter(shows, self.cases), None)
        if found is None:
            return None
        spent_s = 0.0
        smallest = self.shrink(found, shows)
        return Broken(name, said[-1], self.show(smallest))
