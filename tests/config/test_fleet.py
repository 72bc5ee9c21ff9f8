"""A fleet's file: every field takes effect, and all mistakes are reported at once, with their lines."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman.config.fleet import (
    FleetDocument,
    FleetInstanceSpec,
    FleetWorkerSpec,
    GpuSpec,
    ReservedSpec,
    load_fleet,
    size,
)
from pointsman.config.problems import Problem
from pointsman.config.validation import fields_of
from pointsman.errors import ConfigError
from pointsman.placement.asks import Claim, Place, Tier
from pointsman.placement.fleet import FREE_BYTES, FREE_CPUS, FREE_MEMORY, FREE_SHARE, Occupant
from pointsman.types import Gpu, Worker, WorkerStatus
from tests.properties import examples

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fleet.md"
EXAMPLES = [ROOT / "examples" / "fleets" / f"{name}.yaml" for name in ("homelab", "h100", "mixed")]
GIB = 2**30


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_fleet(text, "f.yaml")
    return str(raised.value).splitlines()


def workers(text: str) -> tuple[Worker, ...]:
    return load_fleet(f"kind: Fleet\nworkers:\n{text}").workers


def test_every_field_of_a_worker() -> None:
    [worker] = workers("""\
- name: w1
  cpus: 127.5
  memory: 2Ti
  labels: {rack: r1, zone: a}
  status: draining
  unifiedMemory: true
  reserved: {memory: 16Gi, gpuMemory: 1Gi}
  used: {memory: 10Gi}
  files: [llama-3.1-70b]
  gpus:
  - {model: My GPU, count: 2, memory: 80Gi, links: [a, b], used: 2Gi, shareable: false, vendor: me, pcie: p, numa: 1}
""")
    gpu = Gpu(
        index=0,
        memory_bytes=80 * GIB,
        model="My GPU",
        vendor="me",
        used_bytes=2 * GIB,
        link="a",
        pcie="p",
        numa=1,
        shareable=False,
    )
    second = Gpu(
        index=1,
        memory_bytes=80 * GIB,
        model="My GPU",
        vendor="me",
        used_bytes=2 * GIB,
        link="b",
        pcie="p",
        numa=1,
        shareable=False,
    )
    assert worker == Worker(
        name="w1",
        cpus=127.5,
        memory_bytes=2 * 2**40,
        gpus=(gpu, second),
        labels={"rack": "r1", "zone": "a"},
        status=WorkerStatus.DRAINING,
        used_memory_bytes=10 * GIB,
        reserved_memory_bytes=16 * GIB,
        reserved_gpu_bytes=GIB,
        unified_memory=True,
        files=frozenset({"llama-3.1-70b"}),
    )


def test_defaults_of_a_worker() -> None:
    [worker] = workers("- {name: w, cpus: 4, memory: 8Gi, gpus: [{memory: 24Gi}]}\n")
    assert worker == Worker(name="w", cpus=4.0, memory_bytes=8 * GIB, gpus=(Gpu(index=0, memory_bytes=24 * GIB),))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ("name: w", ["w"]),
        ("name: w, count: 1", ["w-1"]),
        ("name: w, count: 3", ["w-1", "w-2", "w-3"]),
        ("name: 'w{n}-x', count: 2", ["w1-x", "w2-x"]),
        ("name: 'w{n}'", ["w1"]),
    ],
)
def test_a_count_makes_names(fields: str, names: list[str]) -> None:
    assert [worker.name for worker in workers(f"- {{{fields}, cpus: 1, memory: 1Gi}}\n")] == names


def test_gpus_are_counted_over_all_entries() -> None:
    [worker] = workers("""\
- name: w
  cpus: 1
  memory: 1Gi
  gpus: [{model: NVIDIA L4, count: 2, link: x}, {model: Instinct MI300X}, {model: NVIDIA A100-SXM4-80GB}]
""")
    found = [(gpu.index, gpu.vendor, gpu.link, gpu.memory_bytes // 2**20) for gpu in worker.gpus]
    assert found == [
        (0, "nvidia", "x", 23034),
        (1, "nvidia", "x", 23034),
        (2, "amd", "", 196592),
        (3, "nvidia", "", 81920),
    ]


def test_a_gpu_with_unified_memory_has_the_memory_of_the_machine() -> None:
    [worker] = workers("- {name: mac, cpus: 8, memory: 64Gi, unifiedMemory: true, gpus: [{model: Apple M3 Max}]}\n")
    assert (worker.gpus[0].memory_bytes, worker.gpus[0].vendor) == (64 * GIB, "apple")


WORKERS = """\
kind: Fleet
workers:
- {name: w, count: 2, cpus: 64, memory: 256Gi, gpus: [{memory: 80Gi, count: 4}]}
instances:
"""


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (
            "on: w-1, gpus: [0], gpuMemory: 40Gi, gpuShare: 0.5, memory: 4Gi, cpus: 2",
            Place(
                tier=Tier.ONE_GPU,
                claims=(
                    Claim(worker="w-1", gpu=0, gpu_bytes=40 * GIB, gpu_share=0.5, memory_bytes=4 * GIB, cpus=2.0),
                ),
            ),
        ),
        (
            "on: w-2, gpus: [1, 3], exclusive: true, memory: 4Gi",
            Place(
                tier=Tier.SEVERAL_GPUS,
                claims=(
                    Claim(worker="w-2", gpu=1, exclusive=True, memory_bytes=4 * GIB),
                    Claim(worker="w-2", gpu=3, exclusive=True),
                ),
                tensor_parallel_size=2,
            ),
        ),
        (
            "on: [w-1, w-2], gpus: [2], gpuMemory: 1Gi, cpus: 3",
            Place(
                tier=Tier.SEVERAL_WORKERS,
                claims=(
                    Claim(worker="w-1", gpu=2, gpu_bytes=GIB, cpus=3.0),
                    Claim(worker="w-2", gpu=2, gpu_bytes=GIB, cpus=3.0),
                ),
                pipeline_parallel_size=2,
            ),
        ),
        (
            "on: w-1, gpus: [0], gpuMemory: 8Gi, gpuLayers: 20, memory: 9Gi",
            Place(
                tier=Tier.PARTIAL_OFFLOAD,
                claims=(Claim(worker="w-1", gpu=0, gpu_bytes=8 * GIB, memory_bytes=9 * GIB),),
                gpu_layers=20,
            ),
        ),
        (
            "on: w-1, memory: 9Gi, cpus: 8",
            Place(tier=Tier.CPU, claims=(Claim(worker="w-1", memory_bytes=9 * GIB, cpus=8.0),)),
        ),
    ],
)  # fmt: skip
def test_running_instances(fields: str, place: Place) -> None:
    plan = load_fleet(f"{WORKERS}- {{name: chat-1, deployment: chat, {fields}}}\n")
    [running] = plan.occupants
    assert (running.instance_id, running.deployment, running.place) == ("chat-1", "chat", place)
    fleet = plan.fleet()
    assert fleet.occupants["chat-1"] == Occupant("chat-1", place, "chat")


def test_the_fleet_counts_running_instances() -> None:
    plan = load_fleet(
        f"{WORKERS}- {{name: a, on: w-2, gpus: [1], gpuMemory: 30Gi, gpuShare: 0.25, memory: 6Gi, cpus: 4}}\n"
    )
    fleet = plan.fleet()
    rows = fleet.gpus.columns[FREE_BYTES], fleet.gpus.columns[FREE_SHARE]
    assert [column[5] for column in rows] == [50 * GIB, 0.75]
    assert list(fleet.workers.columns[FREE_MEMORY]) == [256 * GIB, 250 * GIB]
    assert list(fleet.workers.columns[FREE_CPUS]) == [64, 60]
    plan.fleet().claim("b", plan.occupants[0].place)
    assert "b" not in plan.fleet().occupants, "each fleet is its own"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("80Gi", 80 * GIB),
        ("80GiB", 80 * GIB),
        ("80 GiB", 80 * GIB),
        ("80GB", 80 * 10**9),
        ("80G", 80 * 10**9),
        ("1.5Ti", 3 * 2**39),
        ("512", 512),
        ("512B", 512),
        (512, 512),
        (1e9, 10**9),
    ],
)
def test_sizes(written: Any, value: int) -> None:
    assert size(written) == value


@pytest.mark.parametrize("written", ["", "much", "80 gigs", "80Zi", "B", True, [], {}, None, float("nan"), "8GiBB"])
def test_invalid_sizes(written: Any) -> None:
    with pytest.raises(ValueError, match="expected a size such as 80Gi, 80GB or a number of bytes, found"):
        size(written)


def test_all_mistakes_are_reported_with_their_lines() -> None:
    text = """\
kind: Fleet
workers:
- {name: w, count: 0, cpus: -1, memory: 1Zi, status: redy, unified: true}
- name: w1
  cpus: 1
  memory: 8Gi
  used: {memory: 9Gi}
  reserved: {memory: much, gpuMemory: 30Gi, gpu: 1}
  labels: {a: 1}
  gpus:
  - {memory: 24Gi, count: 3, link: x, links: [a, b], used: 25Gi}
- {name: w1, cpus: 1}
- {name: a/b, cpus: 1, memory: 0}
"""
    assert sorted(problems(text)) == sorted([
        'f.yaml:3: workers[0].unified: unknown field; did you mean "unifiedMemory"?',
        "f.yaml:3: workers[0].count: must be at least 1, found 0",
        "f.yaml:3: workers[0].cpus: must be at least 0, found -1",
        'f.yaml:3: workers[0].status: expected "ready", "draining" or "lost", found "redy"; did you mean "ready"?',
        'f.yaml:3: workers[0].memory: expected a size such as 80Gi, 80GB or a number of bytes, found "1Zi"',
        'f.yaml:7: workers[1].used.memory: is more than there is (8.0 GiB), found "9Gi"',
        'f.yaml:8: workers[1].reserved.memory: expected a size such as 80Gi, 80GB or a number of bytes, found "much"',
        'f.yaml:8: workers[1].reserved.gpuMemory: is more than there is (24.0 GiB), found "30Gi"',
        "f.yaml:8: workers[1].reserved.gpu: unknown field; known: gpuMemory, memory",
        "f.yaml:9: workers[1].labels.a: expected text, found 1; put it in quotes",
        'f.yaml:11: workers[1].gpus[0].used: is more than there is (24.0 GiB), found "25Gi"',
        "f.yaml:11: workers[1].gpus[0].links: link is given too; write link if all are on one, else links",
        "f.yaml:11: workers[1].gpus[0].links: expected one for each of 3 GPUs, found 2",
        'f.yaml:12: workers[2]: field "memory" is missing',
        'f.yaml:12: workers[2].name: there is already a worker "w1" on line 4',
        "f.yaml:13: workers[3].memory: must be at least 1, found 0",
        "f.yaml:13: workers[3].name: expected letters, digits, dots, dashes and underscores, "
        'and {n} for the number, found "a/b"',
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("on: w-3, gpus: [0], gpuMemory: 1Gi", '.on: there is no worker "w-3"; did you mean "w-2"?'),
        ("on: [w-1, w-1], gpus: [0], gpuMemory: 1Gi", '.on[1]: worker "w-1" is listed twice'),
        ("on: []", ".on: must not be empty"),
        ("gpus: []", ': field "on" is missing'),
        ("on: w-1, gpus: [4], gpuMemory: 1Gi", '.gpus[0]: worker "w-1" has 4 GPUs, counted from 0; found 4'),
        ("on: w-1, gpus: [1, 1], gpuMemory: 1Gi", ".gpus[1]: GPU 1 is listed twice"),
        ("on: w-1, gpus: [1]", ': field "gpuMemory" is missing: how much it takes on each of its GPUs'),
        ("on: w-1, gpuMemory: 1Gi", ".gpuMemory: is given without gpus; list their indices"),
        ("on: w-1, gpuShare: 0.5", ".gpuShare: is given without gpus; list their indices"),
        ("on: w-1, gpus: [1], gpuShare: 1.5", ".gpuShare: must be at most 1, found 1.5"),
        ("on: w-1, memory: [1]", ".memory: expected a size such as 80Gi, 80GB or a number of bytes, found a list"),
        ("on: w-1, deploymnt: a", '.deploymnt: unknown field; did you mean "deployment"?'),
    ],
)
def test_mistakes_in_deployments_and_instances(fields: str, problem: str) -> None:
    assert problems(f"{WORKERS}- {{name: a, {fields}}}\n") == [f"f.yaml:5: instances[0]{problem}"]


def test_an_instance_on_a_worker_that_has_no_name_is_not_a_second_mistake() -> None:
    text = "workers:\n- {name: 'w w', cpus: 1, memory: 1Gi}\ninstances:\n- {name: a, on: w w}\n"
    assert [line.partition(": ")[0] for line in problems(text)] == ["f.yaml:2"]


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        ("{}", ": needs a model that is known, or memory, such as 24Gi"),
        ("{model: Voodoo}", '.model: how much memory "Voodoo" has is not known; add memory, such as 24Gi'),
        (
            "{model: NVIDIA A100}",
            '.model: how much memory "NVIDIA A100" has is not known; add memory, such as 24Gi; '
            'did you mean "A100 80GB"?',
        ),
        ("{model: RTX 3080 Ti}", '.model: how much memory "RTX 3080 Ti" has is not known; add memory, such as 24Gi; '
         'did you mean "RTX 3080 10GB"?'),
    ],
)  # fmt: skip
def test_gpus_of_unknown_memory(gpu: str, problem: str) -> None:
    text = f"workers:\n- {{name: a, cpus: 1, memory: 1Gi, gpus: [{gpu}]}}\n"
    assert problems(text) == [f"f.yaml:2: workers[0].gpus[0]{problem}"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", 'f.yaml: field "workers" is missing'),
        ("kind: Fleet\n", 'f.yaml:1: field "workers" is missing'),
        ("workers: []\n", "f.yaml:1: workers: must not be empty"),
        ("kind: Pointsman\ndeployments: []\n", 'f.yaml:1: kind: expected "Fleet", found "Pointsman"'),
        ("[]\n", "f.yaml:1: expected a mapping (field: value), found a list"),
        ("workers: {a: 1}\n", "f.yaml:1: workers: expected a list, found a mapping"),
    ],
)
def test_documents_that_are_not_fleets(text: str, problem: str) -> None:
    assert problems(text) == [problem]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: there is no such file"):
        load_fleet(tmp_path / "gone.yaml")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_load_and_nothing_in_them_is_overcommitted(file: Path) -> None:
    fleet = load_fleet(file).fleet()
    assert min(fleet.gpus.columns[FREE_BYTES]) >= 0
    assert min(fleet.workers.columns[FREE_MEMORY]) >= 0
    assert min(fleet.workers.columns[FREE_CPUS]) >= 0


# Anything

WRONG = st.sampled_from([None, "", "x", 0, -1, 1.5, True, [], {}, [None], {"x": 1}, ["x"], "8Gi", float("nan"), "{n}"])


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    text = draw(st.sampled_from(EXAMPLES)).read_text()
    data = copy.deepcopy(yaml.load(text, yaml.BaseLoader))  # everything is text there, also `on`
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(data)[1:]))
        parent = data
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = draw(WRONG)
    return data


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged())
def test_a_damaged_file_gives_a_plan_or_problems_with_lines(data: Any) -> None:
    text = yaml.safe_dump(data, sort_keys=False)
    found: tuple[object, ...] = ()
    try:
        load_fleet(text).fleet()
    except ConfigError as error:
        found = error.problems or pytest.fail("refused without a problem")
    for problem in found:
        assert isinstance(problem, Problem)
        assert 1 <= problem.line <= text.count("\n") + 1


# The page

ROW = re.compile(r"^\| `([^`]+)` \| (.+?) \|", re.MULTILINE)
PARTS: dict[str, Any] = {
    "`workers[]`": FleetWorkerSpec,
    "`workers[].gpus[]`": GpuSpec,
    "`workers[].reserved`": ReservedSpec,
    "`instances[]`": FleetInstanceSpec,
}


@pytest.mark.parametrize("heading", PARTS)
def test_the_page_has_every_field(heading: str) -> None:
    section = PAGE.read_text(encoding="utf-8").split(f"\n### {heading}\n")[1].split("\n#")[0]
    rows = dict(ROW.findall(section))
    fields = fields_of(PARTS[heading])
    assert rows.keys() == fields.keys()
    for name, field in fields.items():
        assert (rows[name] == "required") == (not field.optional), name


def test_the_documents_on_the_page_load() -> None:
    blocks = re.findall(r"^```text\n(apiVersion: .*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    for block in blocks:
        load_fleet(block)
    assert fields_of(FleetDocument).keys() == {"apiVersion", "kind", "workers", "instances"}
