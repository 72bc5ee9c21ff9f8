"""Checks a policy by its name in a process of its own, and makes a report of what came from there."""

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import msgspec

import pointsman
from pointsman.errors import ConfigError, PluginError, PointsmanError
from pointsman.lab.check.checking import STOPS
from pointsman.lab.check.lines import MADE_WITHIN_S, CheckEnded, CheckRefused, Last, Line, Order, Raised
from pointsman.lab.check.report import Broken, Found, Gathered, Report

ANSWER_S = 5.0
"""Ten times what a plane waits for a scaling policy: whoever needs more will not come back."""
OURS = str(Path(pointsman.__file__).parent)
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def check_apart(name: str, parameters: Mapping[str, Any], examples: int = 200, *, answer_s: float = ANSWER_S) -> Report:
    """What `check` finds; also of what never returns, prints, or ends its process. Raises if it cannot be built."""
    order = Order(name, dict(parameters), examples, answer_s, list(sys.path))
    argv = [sys.executable, "-u", "-P", "-m", "pointsman.lab.check.child"]
    gathered = Gathered()
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(msgspec.json.encode(order))
            child.stdin.close()
            last = _heard(child.stdout, gathered)
            status = child.wait() if last == "" else 0
        finally:
            child.kill()
    if isinstance(last, CheckRefused):
        raise ConfigError(last.problems) if last.problems else PointsmanError(last.message)
    if not isinstance(last, CheckEnded):
        _lay_to_it(gathered, order, last, status)
    return gathered.report()


def _heard(lines: IO[bytes], gathered: Gathered) -> Last | str:
    """The last line; else the calls it was in when its time was over, or nothing if it ended on its own."""
    decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
    for line in lines:
        if not line.startswith(b"{"):
            return (line + lines.read()).decode(errors="replace")
        told = decoder.decode(line)
        if isinstance(told, CheckRefused | Raised | CheckEnded):
            return told
        gathered.tell(told)
    return ""


def _lay_to_it(gathered: Gathered, order: Order, last: Raised | str, status: int) -> None:
    """The process did not end as it should, and that was the policy."""
    trying, where = gathered.trying, list[str]()
    if isinstance(last, Raised):
        what = f"it raised {last.error}"
    elif last:
        within_s, where = MADE_WITHIN_S if trying is None else order.answer_s, _calls(last)
        what = f"it had not come back after {within_s:g} s, and was ended: look at what it waits for, or why it loops"
    else:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        what = f"it ended the process in which it was asked ({how})"
    if gathered.begun is None or trying is None:
        raise PluginError(order.name, f"cannot be made: {'; '.join([what, *where])}")
    candidates = STOPS if where else STOPS[1:]
    promise = next((one for one in candidates if one in gathered.begun.promises), trying.promise)
    example = "\n".join([trying.example, *(f"    {call}" for call in where)])
    gathered.tell(Found(promise, Broken(promise, what, example)))


def _calls(traceback: str) -> list[str]:
    """Its own calls, the innermost first. Of all threads, the one that asked is the last in the list."""
    thread = traceback.rpartition("Thread ")[2]
    calls = [(found[1], f"in {found[3]}: {found[1]}, line {found[2]}") for found in FRAME.finditer(thread)]
    own = takewhile(lambda call: not call[0].startswith(OURS), calls)
    return [words for _, words in own] or [words for _, words in calls[:1]]
