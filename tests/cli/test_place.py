"""`pointsman place` on the fleets of examples/, as it is typed."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pointsman.cli.main import main

FLEETS = Path(__file__).parents[2] / "examples" / "fleets"


def placed(name: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    """Exit code and output for the models of an example on its fleet."""
    code = main(["place", str(FLEETS / f"{name}-models.yaml"), "--fleet", str(FLEETS / f"{name}.yaml"), *more])
    return code, capsys.readouterr().out


def told(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The same as data, by instance."""
    _, out = placed(name, capsys, "--json")
    return {one["instance"]: one for one in json.loads(out)["instances"]}


def test_a_homelab(capsys: pytest.CaptureFixture[str]) -> None:
    """One is placed, one is partly on the CPU, and one is refused, with the reason of every worker."""
    code, out = placed("homelab", capsys)
    assert code == 1, "one has no place"
    assert "assistant-1: one GPU\n  mini: gpu0 (" in out
    assert "writer-1: partly on a GPU, partly on the CPU (" in out
    assert " of 40 layers on the GPU)\n  pc: gpu0 (" in out
    assert "giant-1: no place\n" in out
    for worker in ("pc", "mini", "nas"):
        assert f"    {worker} " in out
    assert "what would help: needs " in out


def test_over_several_workers(capsys: pytest.CaptureFixture[str]) -> None:
    instances = told("h100", capsys)
    chat = [instances[name]["place"]["claims"][0]["worker"] for name in ("chat-1", "chat-2")]
    assert chat[0][0] != chat[1][0], "in different racks"
    giant = instances["giant-1"]["place"]
    assert (giant["tensor_parallel_size"], giant["pipeline_parallel_size"]) == (8, 2)
    assert sum(giant["stage_layers"]) == 126
    assert len({claim["worker"] for claim in giant["claims"]}) == 2
    assert not instances["giant-2"]["placed"]
    assert set(instances["giant-2"]["reasons"]) == {
        "one GPU",
        "several GPUs of one worker",
        "several workers",
        "partly on a GPU, partly on the CPU",
        "CPU",
    }


def test_every_score_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    small = told("h100", capsys)["small-1"]
    [admission, run] = small["trace"]["profiles"]
    assert admission["profile"] == "admission"
    assert {one["candidate"] for one in run["scored"]} == {"a1", "a2", "b1", "b2"}
    best = max(run["scored"], key=lambda one: one["total"])
    assert best["candidate"] == small["place"]["claims"][0]["worker"]
    assert best["total"] == pytest.approx(small["score"])


def test_what_would_have_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    reasoner = told("mixed", capsys)["reasoner-1"]
    assert not reasoner["placed"]
    [needs, *others] = reasoner["what_would_help"]
    assert needs["code"] == "largest-free-gpu"
    assert needs["text"].startswith("needs 95.6 GiB on one GPU; largest free is 79.6 GiB on h100-")
    assert any("would fit" in hint["text"] for hint in others)
    assert reasoner["reasons"]["not considered"]["l4-old"] == {
        "code": "worker-not-ready",
        "facts": {"status": "draining"},
        "text": "not ready: draining",
    }


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "fleet.svg"
    _, out = placed("h100", capsys, "--svg", str(picture))
    assert "a1" in out
    words = "".join(ElementTree.fromstring(picture.read_text(encoding="utf-8")).itertext())
    assert "giant" in words


def test_what_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "deployments:\n- {name: chat, model: m, engine: {type: vllm, parameters: {model: org/elsewhere}}}\n"
    )
    assert main(["place", str(manifest), "--fleet", str(FLEETS / "h100.yaml")]) == 1
    assert "chat: its needs are not known; set placement.resources" in capsys.readouterr().out
