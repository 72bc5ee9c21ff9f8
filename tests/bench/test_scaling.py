from pathlib import Path

import pytest

from bench.scaling import __main__ as bench
from bench.scaling import choosing
from bench.scaling.recordings import ARRIVALS, RATES, VARIABLE, loads_in
from pointsman.lab.scaling import ReplayOutcome
from tests.lab.scaling.made_up import daily


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [f"made/up,{place * 600},{rate:.3f}" for place, rate in enumerate(daily(1).rates)]
    (tmp_path / RATES).write_text("\n".join(["model,t_s,rps", *rows]) + "\n")
    (tmp_path / ARRIVALS[1]).write_text("".join(f'{{"timestamp": {at * 250}}}\n' for at in range(2000)))
    return tmp_path


def test_the_tables_are_printed_and_pictures_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = folder / "pictures"
    assert bench.main(["--data", str(folder), "--start-up", "600", "--plots", str(pictures)]) == 0
    printed = capsys.readouterr().out
    assert sorted(file.name for file in pictures.iterdir()) == ["scaling-azure2023_conv-600.svg", "scaling-up-600.svg"]
    for words in ("static peak", "reactive 1.2", "predictive", "clairvoyant with start-up", "Leave one out"):
        assert words in printed


def test_without_data_it_is_skipped_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert bench.main([]) == 0
    assert capsys.readouterr().out == f"scaling: skipped: no folder is named; set it with --data or {VARIABLE}\n"
    assert bench.main(["--data", str(tmp_path)]) == 0
    assert f"neither {RATES}" in capsys.readouterr().out


def test_loads_keep_forty_replicas_busy(folder: Path) -> None:
    made, recorded = loads_in(folder)
    assert (made.short, recorded.short) == ("up", "azure2023_conv")
    assert made.capacity == pytest.approx(made.series.requests / made.series.seconds / 40)
    assert (recorded.series.bin_s, recorded.series.rates[0]) == (10.0, 4.0)


def test_choices_are_not_made_on_held_out_data() -> None:
    """On two of three the first choice is the cheapest; the third would have taken another, and has no say."""
    first, second = choosing.CHOICES[:2]

    def costs(ratio: float) -> ReplayOutcome:
        return ReplayOutcome(hours=1, ratio=ratio, unserved=0, changes=0, most=1, problems=0, line=[], records=[])

    results = {(name, choice): costs(9.0) for name in "abc" for choice in choosing.CHOICES}
    results |= {("a", first): costs(1.0), ("b", first): costs(1.0), ("c", second): costs(-99.0)}
    assert choosing.chosen_without("c", "abc", results) == first
    assert choosing.chosen_without("a", "abc", results) == second
