"""`status`, `explain`, `requests` and `logs`: what people see, and what programs get."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pointsman.cli.display import Paint, clock, deployments_of, duration, milliseconds, reason_text, status_text
from pointsman.cli.logs import new_lines
from pointsman.cli.main import main
from pointsman.errors import command
from pointsman.reasons import Reason
from tests.cli.planes import READY, Plane, deployment, instance, status, without_memory

MIXED = status(
    deployment(
        "chat",
        2,
        instance("chat-1"),
        instance("chat-2", "starting", url="", process=None, in_flight=0, max_concurrency=None, kv_cache_usage=None),
    ),
    deployment(
        "large",
        2,
        instance("gpu-1", url="http://gpu-1:8000", process=None, max_concurrency=None, kv_cache_usage=None),
        instance(
            "gpu-2",
            "unhealthy",
            url="https://gpu-2:8443",
            process=None,
            restarts=3,
            reason="connection refused",
            since_s=7.2,
        ),
        model="llama-70b",
        aliases=["llama"],
        strategy="slo-aware",
        waiting=12,
    ),
    url="http://127.0.0.1:8080",
    problems=[
        {
            "code": "endpoints-file-unreadable",
            "facts": {"file": "servers.yaml", "error": "No such file or directory", "kept": 0},
            "text": "servers.yaml: No such file or directory",
        }
    ],
)

PAGE = """\
plane partly ready, up for 5m, generation 3, requests to http://127.0.0.1:8080

deployment  model             ready   waiting  running  decided by
----------  ----------------  ------  -------  -------  ----------
chat        smollm2           1 of 2        0        2  slo-miss
large       llama-70b, llama  1 of 2       12        2  slo-aware

instance  state      at                       pid  requests  cache  restarts  for  reason
--------  ---------  ----------------------  ----  --------  -----  --------  ---  ------------------
chat-1    ready      http://127.0.0.1:40001  4242  1 of 4      25%            75s
chat-2    starting                                 0                          75s
gpu-1     ready      http://gpu-1:8000             1                          75s
gpu-2     unhealthy  https://gpu-2:8443            1 of 4      25%         3  7s   connection refused

problem: servers.yaml: No such file or directory"""


def test_status_on_one_page() -> None:
    assert status_text(MIXED).splitlines() == PAGE.splitlines()


def test_how_the_plane_is_as_a_whole() -> None:
    def head(*deployments: dict[str, Any], **facts: Any) -> str:
        return status_text(status(*deployments, **facts)).splitlines()[0].partition(",")[0]

    ready, starting = instance("a-1"), instance("a-2", "starting")
    assert head(deployment("a", 1, ready)) == "plane ready"
    assert head(deployment("a", 2, ready, starting)) == "plane partly ready"
    assert head(deployment("a", 1, starting)) == "plane not ready"
    assert head(deployment("a", 2)) == "plane not ready"
    assert head(deployment("a", 1, ready), deployment("b", 1)) == "plane not ready"
    assert head(deployment("a", 0)) == "plane ready"
    assert status_text(status()).splitlines()[-1] == f"no deployments; add some with: {command('apply', 'FILE')}"


def test_an_instance_without_a_place_shows_why() -> None:
    waits = instance("a-1", "backing off", **without_memory(10.6))
    [line] = [line for line in status_text(status(deployment("a", 1, waits))).splitlines() if line.startswith("a-1")]
    assert line.removeprefix("a-1").strip().startswith("waiting for a place  ")
    assert line.endswith("  too little memory: needs 12.0 GiB, 10.6 GiB free")
    [told] = deployments_of(status(deployment("a", 1, waits)))
    assert told.in_words() == (
        "0 of 1 ready; a-1 is waiting for a place (too little memory: needs 12.0 GiB, 10.6 GiB free)"
    )
    less = instance("a-1", "backing off", **without_memory(10.5))
    [other] = deployments_of(status(deployment("a", 1, less)))
    assert other.in_words() != told.in_words()
    assert other.condition == told.condition, "a little more or less is no news"


def test_reasons_stay_on_one_line() -> None:
    long = status(deployment("a", 1, instance("a-1", "backing off", reason="it said:\n" + "no " * 100)))
    [line] = [line for line in status_text(long).splitlines() if line.startswith("a-1")]
    assert "waiting to restart" in line
    assert line.endswith("...")
    assert len(line) < 220


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tenants_with_limits_have_a_table() -> None:
    unlimited = {
        "name": "free", "in_flight": 0, "spent": 0.0, "reserved": 0.0, "budget": None, "period_ends": None,
        "tokens_per_minute": None, "tokens_left": None, "tokens_reserved": 0.0, "requests_per_minute": None,
        "requests_left": None,
    }  # fmt: skip
    budget = {"name": "red", "in_flight": 2, "spent": 1.25, "reserved": 0.5, "budget": 5.0, "period_ends": 1.8e9}
    rate = {"name": "blue", "tokens_per_minute": 1000, "tokens_left": -20.4, "requests_per_minute": 60}
    text = status_text(status(tenants=[unlimited, unlimited | budget, unlimited | rate | {"requests_left": 59.9}]))
    head, _, red, blue = text.splitlines()[-4:]
    assert head.split("  ")[0] == "tenant"
    until = datetime.fromtimestamp(1.8e9).strftime("%Y-%m-%d %H:%M")
    assert red.split() == ["red", "2", "1.25", "0.5", "5", *until.split()]
    assert blue.split() == ["blue", "0", "0", "0", "-20", "of", "1000", "60", "of", "60"]
    assert "free" not in text


def test_workers_of_a_cluster_have_a_table() -> None:
    here = {"name": "n1", "answers": True, "instances": 2, "host": "10.0.0.1", "cpus": 8.0, "memory_bytes": 2**34}
    text = status_text(status(workers=[
        here | {"gpus": 2, "labels": {"zone": "b"}}, {"name": "n2", "answers": False, "instances": 0}
    ]))  # fmt: skip
    head, _, ready, silent = text.splitlines()[-4:]
    assert head.split() == ["worker", "state", "cpus", "gpus", "memory", "instances", "labels"]
    assert ready.split() == ["n1", "ready", "8", "2", "16.0", "GiB", "2", "zone=b"]
    assert silent.split() == ["n2", "silent", "0"]


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    painted = status_text(MIXED, Paint(Terminal()))
    assert "\x1b[32mready\x1b[0m      http" in painted
    assert "\x1b[31munhealthy\x1b[0m  http" in painted
    plain = painted
    for code in ("\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"):
        plain = plain.replace(code, "")
    assert plain == status_text(MIXED)
    assert status_text(MIXED, Paint(io.StringIO())) == plain
    monkeypatch.setenv("TERM", "dumb")
    assert status_text(MIXED, Paint(Terminal())) == plain
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert status_text(MIXED, Paint(Terminal())) == plain


def test_status(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == status_text(READY) + "\n"
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == READY


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watching_goes_on(plane: Plane, flags: list[str]) -> None:
    plane.answers["GET", "status"] = [MIXED, READY]
    command = [sys.executable, "-m", "pointsman.cli.main", "status", "--watch", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        seen = ""
        while seen.count("generation") < 2:
            seen += watching.stdout.readline()
        watching.terminate()
    if flags:
        assert [json.loads(line) for line in seen.splitlines()] == [MIXED, READY]
    else:
        assert seen.startswith(status_text(MIXED) + "\n\n")


def test_watching_on_a_terminal_draws_over_what_was_there(plane: Plane) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pointsman.cli.main", "status", "--watch"]
    with subprocess.Popen(command, stdout=theirs, env={**os.environ, "TERM": "xterm"}) as watching:
        os.close(theirs)
        seen, until = b"", time.monotonic() + 30
        while seen.count(b"\x1b[H\x1b[J") < 2 and time.monotonic() < until:
            if select.select([ours], [], [], 0.5)[0]:
                seen += os.read(ours, 65536)
        watching.terminate()
    os.close(ours)
    assert seen.startswith(b"\x1b[H\x1b[Jplane \x1b[32mready\x1b[0m")
    assert seen.count(b"\x1b[H\x1b[J") == 2


def test_times_in_short() -> None:
    spans = [None, 0.0, 1.4, 75, 119, 180, 7199, 7200, 3 * 86400]
    assert [duration(span) for span in spans] == ["", "0s", "1s", "75s", "119s", "3m", "120m", "2h", "3d"]
    assert duration(0.3) == "300ms"
    assert [milliseconds(value) for value in (None, 0.04, 12.3, 1500)] == ["", "0 ms", "12 ms", "1.5 s"]


# explain and requests


def test_explain(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"request_id": "r-1", "state": "served", "text": 'request "r-1" is served\nsent to chat-1: best of 2'}
    plane.answers["GET", "requests/r-1"] = record
    assert main(["explain", "r-1"]) == 0
    assert capsys.readouterr().out == f"{record['text']}\n"
    assert main(["explain", "r-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record


REQUEST = {
    "request_id": "r-1", "model": "smollm2", "tenant": "red", "priority": 0, "state": "served", "status": 200,
    "instance": "chat-1", "tries": 1, "waited_ms": 0.3, "first_token_ms": 45.0, "total_ms": 2100.0, "input_tokens": 12,
    "output_tokens": 64,
}  # fmt: skip
WAITS = REQUEST | {
    "request_id": "r-2", "tenant": "", "state": "waiting", "status": None, "instance": "", "tries": 0,
    "waited_ms": None, "first_token_ms": None, "total_ms": None, "output_tokens": None,
}  # fmt: skip
LIST = """\
request  model    tenant  state    status  instance  tries  waited  first token  total  tokens
-------  -------  ------  -------  ------  --------  -----  ------  -----------  -----  -------
r-2      smollm2          waiting                                                       12
r-1      smollm2  red     served      200  chat-1        1  0 ms    45 ms        2.1 s  12 + 64
3 more; see -n
"""


def test_requests(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"requests": [WAITS, REQUEST], "found": 5}
    plane.answers["GET", "requests?limit=20"] = answer
    assert main(["requests"]) == 0
    assert capsys.readouterr().out == LIST
    assert main(["requests", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer


def test_requests_that_are_looked_for(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    target = "requests?model=a%2Fb&state=refused&instance=i&tenant=t&limit=3"
    plane.answers["GET", target] = {"requests": [], "found": 0}
    filters = ["--model", "a/b", "--only", "refused", "--instance", "i", "--tenant", "t", "-n", "3"]
    assert main(["requests", *filters]) == 0
    wanted = 'model "a/b", state "refused", instance "i", tenant "t"'
    assert capsys.readouterr().out == f"no requests found with {wanted}\n"


# logs


def test_logs(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"instance": "chat-1", "text": "one\ntwo\n"}
    plane.answers["GET", "instances/chat-1/logs?lines=100"] = answer
    plane.answers["GET", "instances/chat-1/logs?lines=2"] = answer
    assert main(["logs", "chat-1"]) == 0
    assert main(["logs", "chat-1", "-n", "2"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n" * 2
    assert main(["logs", "chat-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_logs_that_are_followed(plane: Plane, flags: list[str]) -> None:
    def text(*lines: str) -> dict[str, str]:
        return {"instance": "chat-1", "text": "".join(f"{line}\n" for line in lines)}

    plane.answers["GET", "instances/chat-1/logs?lines=1000"] = [
        text("a", "b", "c"),
        text("a", "b", "c", "d"),
        text("a", "b", "c", "d"),
        text("c", "d", "e", "f"),
    ]
    command = [sys.executable, "-m", "pointsman.cli.main", "logs", "chat-1", "-n", "2", "-f", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        seen = [following.stdout.readline().strip() for _ in range(5)]
        following.terminate()
    assert [json.loads(line)["line"] if flags else line for line in seen] == ["b", "c", "d", "e", "f"]


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ("", "", ""),
        ("", "ab", "ab"),
        ("ab", "ab", ""),
        ("ab", "abc", "c"),
        ("abc", "bcd", "d"),
        ("abc", "xyz", "xyz"),
        ("aab", "aabaab", "aab"),
        ("abc", "", ""),
    ],
)
def test_what_is_new_in_a_log(before: str, after: str, new: str) -> None:
    assert list(new_lines(list(before), list(after))) == list(new)


def test_nothing_is_asked_of_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "chat-1", "--state", str(tmp_path / "no" / "such")]) == 1
    assert "no plane is running in" in capsys.readouterr().err


REASON = Reason("target-ongoing", {"text": "as many as that"})
OVERRIDE = {"replicas": 3, "by": "Ada", "until": "2025-03-05T13:00:05Z"}


def record(before: int, after: int, why: Reason | None = REASON, **facts: Any) -> dict[str, Any]:
    reasons = [] if why is None else [why.as_dict()]
    data = {"at": 0.0, "policy": "target-ongoing", "by": "", "before": before, "after": after, "wanted": after,
            "reasons": {"why": reasons}, "numbers": {}, "bounded": [], "refused": "", "problem": ""}  # fmt: skip
    return data | facts


SCALING: dict[str, Any] = {
    "policy": "target-ongoing", "desired": 3, "wanted": 6, "min": 0, "max": 3, "problem": "", "trouble": "",
    "override": None,
    "last": record(1, 3, Reason("target-ongoing", {"text": "12.0 requests, 2 per replica: 6"}),
                   bounded=["at most 3 (max)"]),
}  # fmt: skip
SCALING_TABLE = """\
scaled  target  of      by              last change
------  ------  ------  --------------  --------------------------------------------------------
chat         3  0 to 3  target-ongoing  1 -> 3: 12.0 requests, 2 per replica: 6; at most 3 (max)
"""


def test_deployments_that_are_scaled_have_a_table_of_their_own() -> None:
    shown = status_text(status(deployment("chat", 3, instance("chat-1"), scaling=SCALING), deployment("fixed", 0)))
    assert SCALING_TABLE in shown
    assert "scaled" not in status_text(READY)
    last = record(1, 3, Reason("override", OVERRIDE))
    held = SCALING | {"override": {"replicas": 3, "by": "Ada", "until": None}, "last": last}
    shown = status_text(status(deployment("chat", 3, scaling=held)))
    assert "order of Ada, not target-ongoing" in shown
    assert "3 ordered by Ada until 2025-03-05 " in shown, "in local time"


def test_times_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        reason = Reason("override", {"replicas": 3, "by": "Ada", "until": "2025-07-01T23:30:00Z"})
        assert reason_text(reason.as_dict()) == "3 ordered by Ada until 2025-07-02 08:30:00"
        assert reason_text(Reason("request-waits").as_dict()) == "a request waits, and there is no instance"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_why_there_are_so_many_of_a_deployment(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        record(0, 1, numbers={"queued": 1.0, "arrivals_per_s": 0.51234567}),
        record(1, 3, wanted=6, bounded=["at most 3 (max)"], refused="2 of 8"),
        record(3, 3, None, wanted=None, problem="raised KeyError"),
        record(3, 2, Reason("override", OVERRIDE | {"replicas": 2}), wanted=None, by="Ada"),
        record(0, 1, Reason("request-waits"), wanted=0, by="pointsman", numbers={"latency_p90_ms": 13170.4}),
    ]
    told = SCALING | {
        "deployment": "chat",
        "ongoing": 6,
        "queued": 4,
        "ready": 2,
        "starting": 1,
        "unplaced": 0,
        "records": records,
    }
    plane.answers["GET", "deployments/chat/scaling"] = told
    assert main(["explain", "deployment", "chat"]) == 0
    head, now, empty, *lines = capsys.readouterr().out.splitlines()
    assert head == "chat: target 3 (0 to 3), decided by target-ongoing, which wants 6; 2 ready, 1 starting"
    assert now == "now 6 requests on instances, 4 waiting"
    assert empty == ""
    assert [line[21:] if line[0] != " " else line for line in lines] == [
        "0 -> 1  target-ongoing: as many as that",
        "    from queued 1, arrivals_per_s 0.5123",
        "1 -> 3  target-ongoing: as many as that",
        "    wanted 6; at most 3 (max)",
        "    refused: 2 of 8",
        "stays at 3",
        "    problem: raised KeyError",
        f"3 -> 2  2 ordered by Ada until {clock(1741179605.0)}",
        "0 -> 1  a request waits, and there is no instance",
        "    wanted 0",
        "    from latency_p90_ms 13170",
    ]
    held = {"replicas": 3, "by": "Ada", "until": 9.0, "for_s": 7200.0}
    other = {"override": held, "records": [], "problem": "is wrong", "starting": 5, "unplaced": 2}
    plane.answers["GET", "deployments/chat/scaling"] = told | other
    assert main(["explain", "deployment", "chat"]) == 0
    shown = capsys.readouterr().out
    assert "chat: target 3 (0 to 3), 3 ordered by Ada for another 2h; target-ongoing wants 6; 2 ready" in shown
    assert "2 ready, 3 starting, 2 without a place\n" in shown
    assert "problem: target-ongoing is wrong" in shown
    assert "nothing has changed yet" in shown
    assert main(["explain", "deployment", "chat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == []
    assert main(["explain", "req-1", "chat"]) == 2
    assert "use: pointsman explain deployment chat" in capsys.readouterr().err
    asked = len(plane.asked)
    assert main(["explain", "deployment"]) == 2
    assert "explain deployment NAME: NAME is missing" in capsys.readouterr().err
    assert len(plane.asked) == asked, "nobody is asked for a request of that name"
