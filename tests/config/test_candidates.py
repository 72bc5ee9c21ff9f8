"""Candidates of `scheduling.shadow`: how they are written, and what a manifest says once one is in force."""

from pathlib import Path

import pytest

from pointsman.config import load_manifest
from pointsman.config.candidates import with_candidate
from pointsman.errors import ConfigError, PointsmanError

PICKER = """\
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer, weight: 2}]}]
"""
HEAD = """\
kind: Pointsman
deployments:
- name: chat
  model: m
  endpoints: [{url: "http://127.0.0.1:1"}]
"""
TAIL = """\
  # of the next
- name: other
  model: o
  endpoints: [{url: "http://127.0.0.1:2"}]
"""


def manifest(scheduling: str) -> str:
    return f"{HEAD}{scheduling}{TAIL}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "queue.yaml").write_text(PICKER, encoding="utf-8")
    (tmp_path / "aged.yaml").write_text("policy: priority\nparameters: {agingS: 30}\n", encoding="utf-8")
    return tmp_path


BLOCK = """\
  scheduling:   # how
    policy: fifo
    timeLimit: 20ms
    shadow:
    - queue.yaml
    - aged.yaml
    - slo-aware
    - {name: mine, policy: cost-optimized}
"""
FLOW = (
    "  scheduling: {policy: fifo, shadow: [queue.yaml, aged.yaml, slo-aware, {name: mine, policy: cost-optimized}]}\n"
)
both_styles = pytest.mark.parametrize("written", [BLOCK, FLOW], ids=["block", "flow"])


@both_styles
def test_a_candidate_is_a_file_a_name_or_a_section(folder: Path, written: str) -> None:
    plan = load_manifest(manifest(written), folder).deployments[0]
    assert [one.name for one in plan.shadow] == ["queue", "aged", "slo-aware", "mine"]
    assert [one.dispatch_plan().strategy for one in plan.shadow] == [
        "endpoint picker",
        "priority",
        "slo-aware",
        "cost-optimized",
    ]


@both_styles
@pytest.mark.parametrize("name", ["queue", "aged", "mine"])
def test_a_promoted_candidate_takes_the_place_of_the_policy(folder: Path, written: str, name: str) -> None:
    text = manifest(written)
    before = load_manifest(text, folder)
    plan = before.deployments[0]
    [candidate] = [one for one in plan.shadow if one.name == name]
    others = [one.name for one in plan.shadow if one.name != name]
    made = with_candidate(text, "chat", candidate, others)
    assert made.endswith(TAIL)
    after = load_manifest(made, folder)
    now = after.deployments[0]
    assert now.dispatch_plan().strategy == candidate.dispatch_plan().strategy
    assert [one.name for one in now.shadow] == others
    assert now.time_limit_s == plan.time_limit_s
    assert after.deployments[1].scheduling_recipe == before.deployments[1].scheduling_recipe


def test_candidates_leave_the_policy_in_force_as_it_is(folder: Path) -> None:
    plain = load_manifest(manifest("  scheduling: {policy: fifo}\n"), folder).deployments[0]
    shadowed = load_manifest(manifest("  scheduling: {policy: fifo, shadow: [priority]}\n"), folder).deployments[0]
    assert plain.scheduling_recipe == shadowed.scheduling_recipe
    assert plain.shadow_recipe != shadowed.shadow_recipe


def test_a_section_with_an_anchor_is_not_rewritten(folder: Path) -> None:
    text = manifest("  scheduling: &how {policy: fifo, shadow: [priority]}\n").replace(
        "model: o\n", "model: o\n  scheduling: *how\n"
    )
    plan = load_manifest(text, folder).deployments[1]
    with pytest.raises(PointsmanError, match="anchor"):
        with_candidate(text, "other", plan.shadow[0], [])


@pytest.mark.parametrize(
    ("shadow", "found"),
    [
        ("[nothing.yaml]", "nothing.yaml"),
        ("[fifoo]", "fifo"),
        ("[{name: x}]", "needs a policy or a config"),
        ("[fifo, fifo]", "fifo"),
        ("[{name: x, policy: fifo, parameters: {agingS: 1}}]", "agingS"),
    ],
)
def test_mistakes_are_reported(folder: Path, shadow: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_manifest(manifest(f"  scheduling: {{shadow: {shadow}}}\n"), folder)
    assert found in str(error.value)


def test_a_file_that_is_gone_does_not_keep_a_plane_from_starting(folder: Path) -> None:
    text = manifest("  scheduling: {policy: fifo, shadow: [gone.yaml, priority]}\n")
    plan = load_manifest(text, folder, was_in_force=True)
    assert [one.name for one in plan.deployments[0].shadow] == ["priority"]
    assert any("gone.yaml" in str(one) for one in plan.warnings)
