"""The tables of compatibility.md are what `check config` says of the documents of the router and of its guides."""

from pathlib import Path

import pytest

from pointsman.cli.main import main

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "tests" / "config" / "guides").glob("*.yaml"))
ROUTER = sorted((ROOT / "tests" / "config" / "router").glob("*.yaml"))


def test_every_guide_has_a_document() -> None:
    assert {file.stem for file in GUIDES} == {
        "default", "lora", "prefill-decode", "precise-prefix", "slo", "flow-control", "session", "topology",
        "multimodal", "program-aware",
    }  # fmt: skip


@pytest.mark.parametrize("documents", [GUIDES, ROUTER], ids=["guides", "router"])
def test_the_page_has_what_the_command_prints(documents: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "config", "--markdown", *map(str, documents)])
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "docs" / "plugins" / "compatibility.md").read_text(encoding="utf-8")


def test_which_documents_do_not_load(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "config", "--markdown", *map(str, (*GUIDES, *ROUTER))])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert {row[0].strip("|` ") for row in rows if row[1] == "no"} == {"thunderagent-config.yaml"}
