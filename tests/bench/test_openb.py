import random
from pathlib import Path

import pytest

from bench.placement import openb
from bench.placement.methods import METHODS, Setting, share_of
from pointsman.placement.fleet import FREE_CPUS, FREE_MEMORY, FREE_SHARE, Fleet

NODES = """sn,cpu_milli,memory_mib,gpu,model
n0,16000,65536,2,P100
n1,96000,393216,8,G2
n2,96000,393216,8,G2
n3,104000,524288,2,T4
"""
SHARES = ((1, 1000), (1, 810), (1, 470), (1, 160), (2, 1000), (0, 0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(4)
    pods = ["name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"]
    for number in range(40):
        gpus, milli = rng.choice(SHARES)
        models = "G2|T4" if number % 10 == 0 else ""
        pods.append(f"p{number},{rng.choice((3000, 8000, 12000))},8192,{gpus},{milli},{models}")
    (tmp_path / openb.NODES).write_text(NODES)
    (tmp_path / openb.PODS).write_text("\n".join(pods) + "\n")
    return tmp_path


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_allocated_twice(method: str, folder: Path) -> None:
    workers, asks = (
        openb.workers_of(openb.rows_of(folder / openb.NODES)),
        openb.asks_of(openb.rows_of(folder / openb.PODS)),
    )
    fleet = Fleet(workers)
    choose = METHODS[method](Setting(fleet, asks, 1))
    placed = 0.0
    for number, ask in enumerate(openb.stream(asks, 26, 1)):
        place = choose(ask)
        if place is None:
            continue
        assert len(place.gpus) == len(set(place.gpus)) == ask.need.tensor_parallel_sizes[0]
        assert all(not ask.gpu_models or fleet[name].worker.gpus[0].model in ask.gpu_models for name in place.workers)
        fleet.claim(str(number), place)
        placed += share_of(ask)
        assert min(fleet.gpus.columns[FREE_SHARE]) >= -1e-9
        assert min(fleet.workers.columns[FREE_CPUS]) >= -1e-9
        assert min(fleet.workers.columns[FREE_MEMORY]) >= 0
    run = openb.Run(method, workers, asks, 1)
    assert run.share == pytest.approx(placed / 20)  # 26 is 1.3 times 20
    assert 0.5 < run.before_refusal <= run.share <= 1


def test_asks_are_shuffled(folder: Path) -> None:
    asks = openb.asks_of(openb.rows_of(folder / openb.PODS))
    one, same, other = (list(openb.stream(asks, 60, seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert 60 <= sum(map(share_of, one)) < 62
    assert sum(map(share_of, one[:-1])) < 60


def test_the_bound_counts_what_cannot_be_filled() -> None:
    row = {"name": "p", "cpu_milli": "1000", "memory_mib": "1", "num_gpu": "1", "gpu_milli": "810", "gpu_spec": ""}
    assert openb.bound(openb.asks_of([row])) == pytest.approx(0.81)
    assert openb.bound(openb.asks_of([row, {**row, "gpu_milli": "190"}])) == pytest.approx(1.0)


def test_the_table_has_a_row_for_each_method(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert openb.main(["--data", str(folder), "--seeds", "2", "--methods", "random", "binpack"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["random", "binpack"]


def test_the_environment_names_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(openb.VARIABLE, str(folder.parent))
    folder.rename(folder.parent / "openb")
    assert openb.main(["--seeds", "1", "--methods", "random"]) == 0
    assert "random" in capsys.readouterr().out


@pytest.mark.parametrize("named", [True, False])
def test_without_data_it_is_skipped(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(openb.VARIABLE, raising=False)
    assert openb.main(["--data", str(tmp_path)] if named else []) == 0
    assert "skipped" in capsys.readouterr().out
