"""Checks a policy in a separate process. Even if the policy hangs, prints, or ends that process, there is a report.

The parent writes one order as JSON to standard input. The child answers with lines of JSON. If a call exceeds its time
limit, `faulthandler` ends the child, and writes a traceback in place of the last line. It works outside the
interpreter, so it can also end code that never releases the interpreter.
"""

import faulthandler
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec

import pointsman
from pointsman.config import build_named
from pointsman.config.problems import Problem
from pointsman.errors import ConfigError, PluginError, PointsmanError
from pointsman.lab.check.checker import ANSWERS, CheckRest, check_with
from pointsman.lab.check.report import Broken, CheckEvent, PromiseChecked, Report, ReportBuilder
from pointsman.lab.check.scaling_promises import QUICK

ANSWER_TIMEOUT_S = 5.0
"""Time limit for each call. This is ten times as long as a plane waits for a scaling policy."""
BUILD_TIMEOUT_S = 60.0
"""Time limit for building the policy. It is long because the policy may have large imports."""
PACKAGE = str(Path(pointsman.__file__).parent)
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class CheckOrder(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any]
    examples: int
    answer_timeout_s: float
    path: list[str]
    """`sys.path` of the child."""
    left: CheckRest = CheckRest()


class CheckRefused(msgspec.Struct, frozen=True, tag=True):
    """The policy cannot be built."""

    message: str
    problems: list[Problem]


class CheckRaised(msgspec.Struct, frozen=True, tag=True):
    """The policy raised an exception that no promise catches, such as SystemExit."""

    error: str


class CheckEnded(msgspec.Struct, frozen=True, tag=True):
    """All promises have been tried."""


LastLine: TypeAlias = CheckRefused | CheckRaised | CheckEnded
Line: TypeAlias = CheckEvent | LastLine


MAX_PROCESSES = 12
"""Maximum number of processes for one check. It ends the check of a policy that hangs or exits again and again."""
LATER_TIMEOUT_S, LATER_EXAMPLES = 1.0, 50
"""Limits after a policy has hung or exited. They are lower because the policy may do so in many cases."""


def check_in_subprocess(
    name: str, parameters: Mapping[str, Any], examples: int = 200, *, answer_timeout_s: float = ANSWER_TIMEOUT_S
) -> Report:
    """Does the same as `check`, for a policy that is given by its name. Raises if the policy cannot be built.

    If the policy hangs or ends its process, another process continues the check and leaves out the case in which this
    happened.
    """
    report, avoid, hung = ReportBuilder(), set[str](), set[str]()
    for _ in range(MAX_PROCESSES):
        left = CheckRest(tuple(report.judged), frozenset(avoid), frozenset(hung))
        order = CheckOrder(name, dict(parameters), examples, answer_timeout_s, list(sys.path), left)
        case = None if _run(order, report) else report.last_case
        if case is None or (case.example in avoid and case.promise in hung):
            break
        avoid.add(case.example)
        hung.add(case.promise)
        examples, answer_timeout_s = min(examples, LATER_EXAMPLES), min(answer_timeout_s, LATER_TIMEOUT_S)
    return report.report()


def _run(order: CheckOrder, report: ReportBuilder) -> bool:
    """Run the check in one process. Returns whether the check finished."""
    argv = [sys.executable, "-u", "-P", "-m", "pointsman.lab.check.subprocess_runner"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(msgspec.json.encode(order))
            child.stdin.close()
            last = _read(child.stdout, report)
            status = child.wait() if last == "" else 0
        finally:
            child.kill()
    if isinstance(last, CheckRefused):
        raise ConfigError(last.problems) if last.problems else PointsmanError(last.message)
    if not isinstance(last, CheckEnded):
        _blame_the_policy(report, order, last, status)
    return isinstance(last, CheckEnded)


def _read(lines: IO[bytes], report: ReportBuilder) -> LastLine | str:
    """The last line from the child. It is a traceback if a call exceeded its time limit, and empty if the process ended
    by itself."""
    decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
    for line in lines:
        if not line.startswith(b"{"):
            return (line + lines.read()).decode(errors="replace")
        decoded = decoder.decode(line)
        if isinstance(decoded, CheckRefused | CheckRaised | CheckEnded):
            return decoded
        report.on_event(decoded)
    return ""


def _blame_the_policy(report: ReportBuilder, order: CheckOrder, last: CheckRaised | str, status: int) -> None:
    """Report the early end of the process as a broken promise."""
    case, calls = report.last_case, list[str]()
    if isinstance(last, CheckRaised):
        what = f"it raised {last.error}"
    elif last:
        timeout_s, calls = BUILD_TIMEOUT_S if case is None else order.answer_timeout_s, _calls(last)
        what = f"it had not returned after {timeout_s:g} s, and was ended: look at what it waits for, or why it loops"
    else:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        what = f"it ended its process ({how})"
    if report.started is None or case is None:
        raise PluginError(order.name, f"cannot be made: {'; '.join([what, *calls])}")
    candidates = (QUICK, ANSWERS) if calls else (ANSWERS,)
    promise = next((one for one in candidates if one in report.started.promises), case.promise)
    example = "\n".join([case.example, *(f"    {call}" for call in calls)])
    report.on_event(PromiseChecked(promise, Broken(promise, what, example)))


def _calls(thread_dump: str) -> list[str]:
    """The policy's own calls, innermost first. The dump ends with the thread that called the policy."""
    thread = thread_dump.rpartition("Thread ")[2]
    calls = [(found[1], f"in {found[3]}: {found[1]}, line {found[2]}") for found in FRAME.finditer(thread)]
    own = takewhile(lambda call: not call[0].startswith(PACKAGE), calls)
    return [words for _, words in own] or [words for _, words in calls[:1]]


class LineWriter:
    """Writes each event as a line, and enforces time limits. The child uses it."""

    def __init__(self, output: int, answer_timeout_s: float) -> None:
        self._output, self._answer_timeout_s = os.fdopen(output, "wb"), answer_timeout_s

    def on_event(self, event: Line) -> None:
        self._output.write(msgspec.json.encode(event) + b"\n")
        self._output.flush()

    def time_limit(self) -> AbstractContextManager[None]:
        return self.timeout(self._answer_timeout_s)

    @contextmanager
    def timeout(self, seconds: float) -> Iterator[None]:
        """End this process if the body of the `with` statement takes longer."""
        # A Python thread would not do: a call that holds the interpreter would not let the thread run.
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._output)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckOrder)
    writer = LineWriter(os.dup(1), order.answer_timeout_s)
    os.dup2(2, 1)  # output of the policy must not get between the lines
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends this process
    sys.path[:] = order.path
    try:
        writer.on_event(_check(order, writer))
    except BrokenPipeError:  # the parent has ended
        pass
    except BaseException as error:
        if isinstance(error, Exception):  # promises catch exceptions of a policy, so this one may be a bug in Pointsman
            traceback.print_exc()
        writer.on_event(CheckRaised(f"{type(error).__name__}: {error}".rstrip(": ")))
    finally:
        os._exit(0)  # do not wait for threads that the policy has started


def _check(order: CheckOrder, writer: LineWriter) -> LastLine:
    def build() -> Any:
        return build_named(order.name, order.parameters)

    try:
        with writer.timeout(BUILD_TIMEOUT_S):
            first = build()
    except PointsmanError as error:
        return CheckRefused(str(error), [one for one in getattr(error, "problems", ()) if isinstance(one, Problem)])
    check_with(first, build, order.examples, writer, order.left)
    return CheckEnded()


if __name__ == "__main__":
    main()
