"""`pointsman rehearse scaling`, as it is typed: on files, and on what a real plane has seen."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx2 as httpx
import pytest

from bench.chaos.planes import LivePlane
from pointsman.cli.main import main
from pointsman.runtimes.machine.store import Store
from tests.cli.planes import Plane, pointsman
from tests.live.manifests import manifest, simulated

RATES = "time,rps\n" + "".join(f"2026-11-16T0{hour}:00:00Z,{10 + 20 * (hour % 2)}\n" for hour in range(6))
OWN = """
from pointsman.scaling import Wish


def steady(view, replicas: int = 3):
    return Wish(replicas, "as configured")


def follows(view):
    rate = view.arrivals_per_s[30.0]
    return Wish(round(rate / 10), f"{rate:g}/s come")


def sulks(view):
    raise RuntimeError("no idea")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one, with a recording and the user's own policies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "load.csv").write_text(RATES)
    (tmp_path / "rehearsed.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("rehearsed", None)


def rehearse(*args: str) -> int:
    return main(["rehearse", "scaling", *args])


FILE = ("--load", "load.csv", "--capacity", "10", "--start-up", "0s")


def test_policies_of_all_kinds(folder: Path) -> None:
    """The real command, in a process of its own."""
    own = ["rehearsed:steady", 'rehearsed.py:steady={"replicas": 1}']
    result = pointsman(
        "rehearse", "scaling", 'target-ongoing={"target": 10}', *own, *FILE, "--cost", "2", "--svg", "a.svg"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "load: 6 bins of 1 h, 6 h in all; 20/s on average, 30/s at the peak",
        "a replica serves 10/s and starts in 0 s: 2 needed on average, 3 at the peak, 12.0 replica-hours at least",
        "called every 1 min; at least 1 replica",
        "",
        "policy                          replica-hours  times the least  unserved  changes  most replicas   cost",
        "------------------------------  -------------  ---------------  --------  -------  -------------  -----",
        "target-ongoing target 10                 14.0            1.164     0.56%        5              3  27.93",
        "rehearsed:steady                         18.0            1.500     0.00%        1              3  36.00",
        "rehearsed.py:steady replicas 1            6.0            0.500    50.00%        0              1  12.00",
        "static peak                              18.0            1.500     0.00%        0              3  36.00",
        "clairvoyant with start-up                12.0            1.000     0.00%        5              3  24.00",
    ]
    assert len(ElementTree.parse("a.svg").getroot().findall("{http://www.w3.org/2000/svg}g")) == 2


def test_json_has_the_same_and_the_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse("rehearsed:steady", *FILE, "--parameters", '{"replicas": 4}', "--json", "--why", "5") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["load"]["name"], result["load"]["bins"], result["load"]["began"]) == ("load", 6, 1794787200.0)
    [steady] = result["policies"]
    assert (steady["policy"], steady["replica_hours"], steady["most"]) == ("rehearsed:steady", 24.0, 4)
    assert [(one["before"], one["after"], one["why"]) for one in steady["records"]] == [(1, 4, "as configured")]
    assert result["setting"]["limits"]["max_replicas"] == 1_000_000


def test_why_has_the_form_of_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "undated.csv").write_text("t_s,rps\n0,10\n86400,30\n172800,20\n")
    assert rehearse("rehearsed:follows", "--load", "undated.csv", "--capacity", "10", "--why", "1") == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "rehearsed:follows: the last 1 of 2 records",
        "day 3 00:00:00  3 -> 2  rehearsed:follows: 20/s come",
        "    from replicas 3, starting 0, ongoing 20, queued 0, arrivals_per_s 20",
    ]


def test_limits_are_those_of_a_manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = (
        "--min",
        "2",
        "--max",
        "8",
        "--up-delay",
        "2m",
        "--down-delay",
        "0s",
        "--max-step",
        "1",
        "--cooldown",
        "5m",
    )
    assert rehearse('rehearsed:steady={"replicas": 9}', *FILE, *limits, "--why", "9") == 0
    out = capsys.readouterr().out
    assert "called every 1 min; 2 to 8 replicas, upDelay 2 min, cooldown 5 min, maxStep 1\n" in out
    assert "2 -> 3  rehearsed:steady: as configured" in out
    assert "wanted 9; at most 8 (max)" in out


def test_load_of_single_requests(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "requests.jsonl").write_text("".join(f'{{"timestamp": {at}}}\n' for at in range(0, 60_001, 100)))
    asked = ("--load", "requests.jsonl", "--capacity", "5", "--interval", "10s")
    assert rehearse("rehearsed:steady", *asked, "--bin", "20s") == 0
    assert "requests: 3 bins of 20 s, 1 min in all; 10/s on average" in capsys.readouterr().out
    assert rehearse("rehearsed:steady", *asked) == 0
    assert "requests: 1 bin of 1 min" in capsys.readouterr().out


def test_invalid_answers_are_reported_and_set_the_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse("rehearsed:steady", "rehearsed:sulks", *FILE) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "rehearsed:sulks: 360 of 360 answers did not count; it raised RuntimeError: no idea"


SEVERAL = "model,t_s,rps\nchat,0,1\nchat,60,2\ncode,0,3\ncode,60,4\n"


def test_one_series_of_several(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "several.csv").write_text(SEVERAL)
    asked = ("rehearsed:steady", "--load", "several.csv", "--capacity", "1", "--interval", "10s")
    assert rehearse(*asked, "--series", "code") == 0
    assert capsys.readouterr().out.startswith("code: 2 bins of 1 min, 2 min in all; 3.5/s on average")
    assert rehearse(*asked) == 1
    assert capsys.readouterr().err == (
        "pointsman: several.csv: there are 2 series: chat, code; choose one with --series NAME\n"
    )
    assert rehearse(*asked, "--series", "cod") == 1
    assert 'several.csv: unknown series "cod"; did you mean "code"?' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["panic", "--load", "load.csv"],
            "the capacity of a replica is not known; give --capacity, in requests per second",
        ),
        (["predictiv", *FILE], 'pointsman: there is no scaling policy "predictiv"; did you mean "predictive"?'),
        (["fifo", *FILE], '"fifo" is a scheduling policy, not a scaling policy; known: budget, '),
        (["no_such:policy", *FILE], 'there is no module "no_such"'),
        (["rehearsed:stedy", *FILE], 'module "rehearsed" has no "stedy"; did you mean "steady"?'),
        (["no/such.py:policy", *FILE], "such.py: there is no directory "),
        (["rehearsed.py:stedy", *FILE], 'rehearsed.py has no "stedy"; did you mean "steady"?'),
        (['panic={"targt": 1}', *FILE], 'panic: parameters.targt: unknown parameter; did you mean "target"?'),
        (["panic", "--parameters", '{"target": -1}', *FILE], "must be above 0, found -1"),
        (["panic", "--load", "none.csv", "--capacity", "1"], "cannot read none.csv: there is no such file"),
        (["panic", "--load", "rehearsed.py", "--capacity", "1"], "rehearsed.py: there is no column of times"),
        (
            ["panic", "--load", "latin.csv", "--capacity", "1"],
            "cannot read latin.csv: it is not UTF-8 text",
        ),
        (["panic", *FILE, "--bin", "5s"], "--bin goes with requests, one per line (.jsonl or .ndjson)"),
        (
            ["panic", *FILE, "--interval", "7h"],
            "no policy would be called: the load lasts 21600 s, and --interval is 25200 s",
        ),
        (
            ["panic", *FILE, "--svg", "no/such/folder.svg"],
            "folder.svg: there is no directory no/such",
        ),
        (["panic", "--of", "chat"], "no plane is running in "),
    ],
)
def test_invalid_input_is_a_message(
    folder: Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "latin.csv").write_bytes("t_s,rps\n0,½\n".encode("latin-1"))
    monkeypatch.setenv("POINTSMAN_STATE", str(folder / "nobody"))
    assert rehearse(*args) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert rehearse(*args, "--json") == 1
    assert words.removeprefix("pointsman: ") in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([*FILE], "name a policy to rehearse: budget, "),
        (["panic", *FILE, "--min", "3", "--max", "2"], "--min is 3, and above --max, which is 2"),
        (["panic", "--of", "chat", "--series", "x"], "--series and --bin are about a file, and go with --load"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(
    folder: Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse(*args) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["panic", "--capacity", "1"], "one of the arguments --load --of is required"),
        (["panic", *FILE, "--of", "chat"], "not allowed with argument --load"),
        (['panic={"target": 4', *FILE], "is not JSON"),
        (['={"target": 4}', *FILE], "names no policy"),
        (["panic", "--load", "load.csv", "--capacity", "0"], '"0" is not a number above 0'),
        (["panic", "--load", "load.csv", "--capacity", "much"], '"much" is not a number above 0'),
        (["panic", *FILE, "--down-delay=-5s"], '"-5s" is below 0'),
        (["panic", *FILE, "--interval", "0s"], '"0s" is not above 0'),
        (["panic", *FILE, "--up-factor", "1.5"], '"1.5" is not a number above 0, and at most 1'),
        (["panic", *FILE, "--max", "0"], '"0" is not a whole number of at least 1'),
    ],
)
def test_wrong_usage_exits_with_2(
    folder: Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        rehearse(*args)
    assert exited.value.code == 2
    assert words in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rehearse("--help")
    out = capsys.readouterr().out
    assert "  pointsman rehearse scaling" in out.partition("examples:")[2]
    assert all(option in out for option in ("--json", "--state DIR", "--url URL", "--down-delay TIME"))


def test_progress_on_a_terminal(folder: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "pointsman.cli.main", "rehearse", "scaling", "rehearsed:steady", *FILE]
    try:
        done = subprocess.run(
            [*command, "--interval", "10s"], stderr=slave, stdout=subprocess.PIPE, check=True, timeout=60
        )
        heard = os.read(master, 10_000).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert "\r\x1b[Krehearsed:steady: 46%" in heard
    assert heard.endswith("\r\x1b[K"), "and in the end the line is empty again"
    assert b"\x1b" not in done.stdout


# On what a plane has seen

BIN_S = 600.0
DAY = 144


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LivePlane]:
    """A real plane with two deployments: of one it remembers two days, and the other is new."""
    made = LivePlane(tmp_path)
    made.state.mkdir(mode=0o700)
    first = int(time.time() // BIN_S) - 2 * DAY
    counts = [int(BIN_S) * (30 if place % DAY >= DAY // 2 else 5) for place in range(2 * DAY)]
    bins = [(first + place, count) for place, count in enumerate(counts)]
    measured = {"arrivals": {"bin_s": BIN_S, "bins": bins, "first": first}, "start_ups": [300.0] * 20}
    store = Store(made.state)
    store.targets.save_scaling({"chat": json.dumps({"measured": measured})})
    store.close()
    scaling = {"min": 2, "max": 20, "downDelay": "15m", "parameters": {"target": 4}, "costPerReplicaHour": 2}
    slow = {"firstTokenMs": 500, "maxNumSeqs": 4}
    deployments = [
        {**simulated(name, parameters=slow), "replicas": 2, "scaling": scaling} for name in ("chat", "young")
    ]
    made.up(manifest(*deployments))
    yield made
    made.close()


def test_the_load_that_a_plane_has_seen(live: LivePlane) -> None:
    unknown = live.pointsman("rehearse", "scaling", "--of", "chat")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "is not known: no request has come in the last hour; give --capacity" in unknown.stderr
    young = live.pointsman("rehearse", "scaling", "--of", "young", "--capacity", "5")
    seen = (
        'the plane has not seen "young" for long enough' if young.returncode else 'of "young" so far; a longer history'
    )
    assert seen in young.stdout + young.stderr
    assert (
        'unknown deployment "chut"; did you mean "chat"?'
        in live.pointsman("rehearse", "scaling", "--of", "chut").stderr
    )

    body = {"model": "chat", "prompt": "hello", "max_tokens": 3}
    assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).status_code == 200
    result = live.pointsman("rehearse", "scaling", "--of", "chat", "--why", "1")
    assert (result.returncode, result.stderr) == (0, "")
    _, serves, limits, *_, note, _, _, last, _ = lines = result.stdout.splitlines()
    # One more if a bin ends meanwhile.
    assert re.match(r"chat: 28[89] bins of 10 min, 2(\.01)? days in all; 17\.[45]\d*/s on average, 30/s at", lines[0])
    assert "and starts in 5 min: " in serves
    assert limits == "called every 30 s; 2 to 20 replicas, downDelay 15 min"
    assert lines[6].startswith("target-ongoing target 4  ")
    assert lines[4].endswith("cost")
    assert note.startswith("note: a replica takes 4 at once, and a recent request 0.5")
    assert last[:4] == time.strftime("%Y"), "on the clock of the plane"

    mine = live.pointsman(
        "rehearse", "scaling", "predictive", "--of", "chat", "--capacity", "5", "--max", "9", "--json"
    )
    found: dict[str, Any] = json.loads(mine.stdout)
    assert [one["policy"] for one in found["policies"]] == ["predictive"]
    assert (found["setting"]["capacity"], found["setting"]["start_up_s"]) == (5, 300)
    assert (found["setting"]["limits"]["min_replicas"], found["setting"]["limits"]["max_replicas"]) == (2, 9)
    assert found["load"]["needed_at_peak"] == 6
    assert 6 <= found["policies"][0]["most"] <= 9


def answer(**facts: Any) -> dict[str, Any]:
    """What a plane tells of a deployment."""
    bins = [{"began": 1e9 + place * 600, "per_second": 10.0} for place in range(12)]
    result = {"deployment": "app.node", "bin_s": 600.0, "bins": bins, "start_up_s": 60.0, "request_s": 0.5}
    result |= {"max_concurrency": 8, "cost_per_replica_hour": None, "limits": {"max_replicas": 4, "interval_s": 90.0}}
    return result | {"policy": "target-ongoing", "parameters": {"target": 4}} | facts


def test_unknown_settings_of_a_plane_are_reported(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    target = "deployments/app%2Fnode/load"
    plane.answers["GET", target] = answer(start_up_s=None)
    assert rehearse("--of", "app/node") == 0
    out = capsys.readouterr().out
    assert "a replica serves 16/s and starts in 10 min" in out
    assert "note: no start of an instance was measured; 600 s is a guess (--start-up)\n" in out
    assert "called every 90 s; 1 to 4 replicas, downDelay 5 min\n" in out
    assert rehearse("--of", "app/node", "--start-up", "5s", "--capacity", "3") == 0
    assert "note:" not in capsys.readouterr().out
    plane.answers["GET", target] = answer(max_concurrency=None)
    assert rehearse("--of", "app/node") == 1
    assert "is not known: its maximum concurrency is not known; give --capacity" in capsys.readouterr().err
    plane.answers["GET", target] = answer(policy="mine:all", parameters=None)
    assert rehearse("--of", "app/node") == 1
    assert 'the policy of its application decides about "app/node" and others' in capsys.readouterr().err
    assert rehearse("panic", "--of", "app/node") == 0
