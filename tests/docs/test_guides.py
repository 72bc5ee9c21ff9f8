"""The table of compatibility.md is what `check config` says of documents written from the guides of the router."""

from pathlib import Path

import pytest

from pointsman.cli.main import main

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "tests" / "config" / "guides").glob("*.yaml"))


def test_every_guide_has_a_document() -> None:
    assert {file.stem for file in GUIDES} == {
        "default", "lora", "prefill-decode", "precise-prefix", "slo", "flow-control", "session", "topology",
        "multimodal", "program-aware",
    }  # fmt: skip


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "config", "--markdown", *map(str, GUIDES)])
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "docs" / "plugins" / "compatibility.md").read_text(encoding="utf-8")
