"""The commands of the lab, the policy of its page, regret, and changed manifests."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from pointsman import ExecutionInstance, RequestMetadata
from pointsman.cli.main import main
from pointsman.errors import PointsmanError
from pointsman.lab.traffic import (
    Objectives,
    Trial,
    TrialCache,
    capacities,
    policy_of,
    regret,
    replay,
    requests_of_plane,
)
from pointsman.lab.traffic.replay import Substitution
from tests.lab.traffic.workloads import FLEET, conversations, recorded, setting, written

DOC = Path(__file__).parents[3] / "docs" / "lab.md"


@pytest.fixture
def requests(tmp_path: Path) -> str:
    return str(written(tmp_path / "requests.jsonl", conversations()))


@pytest.fixture
def own_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The policy of the page, in a module of the user's."""
    found = re.search(r"^```python\n(.*?)^```$", DOC.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    (tmp_path / "shortest.py").write_text(found[1], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shortest", raising=False)
    return "shortest:ShortestFirst"


def test_the_policy_of_the_page_runs_in_a_unit_test(own_policy: str) -> None:
    module, _, name = own_policy.partition(":")
    policy = getattr(importlib.import_module(module), name)()
    instances = [
        ExecutionInstance(instance_id="a", max_concurrency=2),
        ExecutionInstance(instance_id="b", max_concurrency=1),
    ]
    waiting = [RequestMetadata(f"r{size}", prompt_tokens=size) for size in (900, 20, 300, 5)]
    decided = policy.schedule(waiting, instances)
    assert [(one.request_id, one.target_instance_id) for one in decided] == [("r5", "a"), ("r20", "b"), ("r300", "a")]


def test_the_policy_of_the_page_runs_in_a_comparison(
    own_policy: str, requests: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ["--policy", "round-robin", "--policy", own_policy]
    options = ["--fleet", FLEET, "--cache", str(tmp_path / "cache"), "--processes", "1", "--json"]
    assert main(["lab", "compare", requests, *policies, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policies"] == ["round-robin", own_policy]
    assert found["errors"] == []
    assert found["cells"][1]["measures"]["rejected"]["mean"] == 0.0
    assert 0.9 < found["cells"][1]["share_of_bound"] <= 1.0
    assert main(["lab", "compare", requests, *policies, *options]) == 0
    assert json.loads(capsys.readouterr().out)["cached"] == 2


def test_policies_of_files(requests: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "picker.yaml").write_text("kind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n")
    (tmp_path / "section.yaml").write_text("scheduling: {policy: slo-aware}\n")
    (tmp_path / "wrong.yaml").write_text("plugins:\n- type: queue-score\n")
    named = [str(tmp_path / name) for name in ("picker.yaml", "section.yaml")]
    assert [policy_of(one).name for one in named] == ["picker", "section"]
    for one in named:
        assert main(["lab", "run", requests, "--policy", one, "--fleet", FLEET, "--no-cache"]) == 0
    assert main(["lab", "run", requests, "--policy", str(tmp_path / "wrong.yaml"), "--fleet", FLEET, "--no-cache"]) == 1
    assert re.search(r"wrong.yaml:2.*queue-scorer", capsys.readouterr().err)
    assert main(["lab", "run", requests, "--policy", "round-robbin", "--fleet", FLEET]) == 1
    assert 'did you mean "round-robin"' in capsys.readouterr().err
    assert main(["lab", "run", requests, "--fleet", "4x8B"]) == 1
    assert "hardware" in capsys.readouterr().err


def test_a_capacity_lies_between_enough_and_too_much(requests: str) -> None:
    base = Trial(source=requests, policy=None, setting=setting(), objectives=Objectives(ttft_s=0.3))
    policies = [policy_of("round-robin"), policy_of("pending-work")]
    for one in capacities(base, policies, TrialCache(None), start=4.0, tolerance=0.2, processes=1):
        assert one.beyond is not None
        assert 0 < one.speed < one.beyond <= one.speed * 1.25
        assert one.tried[one.speed] >= 0.9 > one.tried[one.beyond]


def test_a_substituted_decision_changes_that_one_and_nothing_before_it() -> None:
    load = recorded(*conversations())
    own = replay(load, setting(speed=4.0), policy_of("pending-work"), 1)
    decided = own.ended[30]
    other = next(name for name in own.line.load if name != decided.instance)
    branch = replay(load, setting(speed=4.0), policy_of("pending-work"), 1, substitution=Substitution(30, other))
    assert branch.ended[30].instance == other
    assert [one.instance for one in branch.ended[:30]] == [one.instance for one in own.ended[:30]]
    same = replay(
        load, setting(speed=4.0), policy_of("pending-work"), 1, substitution=Substitution(30, decided.instance)
    )
    assert same == own, "the policy goes on as before"


def test_regret_compares_all_instances(requests: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run.json")
    fleet = "3x8B|h100_sxm|vllm|tp1"
    assert (
        main(["lab", "run", requests, "--policy", "pending-work", "--fleet", fleet, "--save", run, "--no-cache"]) == 0
    )
    capsys.readouterr()
    assert main(["lab", "regret", run, "--request", "40", "--processes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["chosen"] for one in found["branches"]] == [True, False, False]
    assert len({one["instance"] for one in found["branches"]}) == 3
    assert found["misses"] == 0
    assert main(["lab", "regret", run, "--request", "4000", "--processes", "1"]) == 1
    assert "numbered from 0 to 79" in capsys.readouterr().err


def test_no_single_decision_of_a_batch_policy_can_be_substituted(own_policy: str, requests: str) -> None:
    trial = Trial(source=requests, policy=policy_of(own_policy), setting=setting())
    with pytest.raises(PointsmanError, match="all waiting requests at once"):
        regret(trial, 3, processes=1)


MANIFEST = """
deployments:
- name: chat
  model: chat
  replicas: {replicas}
  engine: {{type: simulated, parameters: {{hardware: "8B|l4|roofline|tp1", maxNumSeqs: 8}}}}
"""


def test_a_manifest_that_serves_worse_is_not_to_be_applied(
    requests: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, many = tmp_path / "few.yaml", tmp_path / "many.yaml"
    few.write_text(MANIFEST.format(replicas=1))
    many.write_text(MANIFEST.format(replicas=6))
    options = ["--recording", requests, "--cache", str(tmp_path / "cache"), "--processes", "1", "--ttft", "1s"]
    assert main(["lab", "whatif", str(few), "--against", str(many), *options]) == 1
    assert "do not apply it" in capsys.readouterr().out
    assert main(["lab", "whatif", str(many), "--against", str(few), *options]) == 0
    shown = capsys.readouterr().out
    assert "it may be applied" in shown
    assert "2 of 2 replays cached" in shown


def test_records_of_a_plane_are_a_recording() -> None:
    row = {"model": "chat", "tenant": "a", "priority": 1, "deadline_ms": None, "output_tokens": 7, "input_tokens": 90}
    answer = {
        "requests": [
            row | {"arrived": "2026-11-18T10:00:02.000+00:00"},
            row | {"arrived": "2026-11-18T10:00:00.500+00:00"},
            row | {"arrived": "2026-11-18T10:00:01.000+00:00", "output_tokens": None},
        ]
    }
    first, second = requests_of_plane(answer)
    assert second.timestamp - first.timestamp == 1500
    assert (first.model, first.tenant, first.input_length, first.output_length) == ("chat", "a", 90, 7)
    with pytest.raises(PointsmanError, match="give a recording"):
        requests_of_plane({"requests": []})
