"""The process in which a policy is tried: it may hang, print, or end it, and whoever waits still gets a report.

A question that stays open ends the process from outside the interpreter, so that it also ends what never lets go of
it; where it was goes out in place of a last line.
"""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from pointsman.config import build_named
from pointsman.config.problems import Problem
from pointsman.errors import PointsmanError
from pointsman.lab.check.checking import check_watched
from pointsman.lab.check.lines import MADE_WITHIN_S, CheckEnded, CheckRefused, Last, Line, Order, Raised


class CheckProgress:
    """Tells all to the other process."""

    def __init__(self, output: int, answer_s: float) -> None:
        self._output, self._answer_s = os.fdopen(output, "wb"), answer_s

    def tell(self, line: Line) -> None:
        self._output.write(msgspec.json.encode(line) + b"\n")
        self._output.flush()

    def answering(self) -> AbstractContextManager[None]:
        return self.within(self._answer_s)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Ends this process if it takes longer."""
        # No thread of ours: a call that holds the interpreter would not let it run.
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._output)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Carry out one order."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    told = CheckProgress(os.dup(1), order.answer_s)
    os.dup2(2, 1)  # what the policy prints must not get among the lines
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this hears Ctrl-C too, and ends it
    sys.path[:] = order.path
    try:
        told.tell(_carried_out(order, told))
    except BrokenPipeError:  # nobody listens any more
        pass
    except BaseException as error:
        if isinstance(error, Exception):  # every promise expects those of a policy: this may be a mistake of ours
            traceback.print_exc()
        told.tell(Raised(f"{type(error).__name__}: {error}".rstrip(": ")))
    finally:
        os._exit(0)  # threads that the policy began are not waited for


def _carried_out(order: Order, told: CheckProgress) -> Last:
    def build() -> Any:
        return build_named(order.name, order.parameters)

    try:
        with told.within(MADE_WITHIN_S):
            first = build()
    except PointsmanError as error:
        return CheckRefused(str(error), [one for one in getattr(error, "problems", ()) if isinstance(one, Problem)])
    check_watched(first, build, order.examples, told)
    return CheckEnded()


if __name__ == "__main__":
    main()
