"""Pictures of a fleet: nothing is left out, nothing is too wide, and every name can be drawn."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.config.fleet import load_fleet
from pointsman.placement.asks import Claim, Place, Tier
from pointsman.placement.fleet import Fleet
from pointsman.render.fleet_svg import fleet_svg
from pointsman.render.fleet_text import BarPart, FleetView, PartKind, fleet_text, shared_out
from pointsman.render.svg import colour
from pointsman.types import Gpu, Worker, WorkerStatus
from tests.properties import examples

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"


def worker(name: str = "w", gpus: int = 2, *, used: int = 0, status: WorkerStatus = WorkerStatus.READY) -> Worker:
    return Worker(
        name=name,
        cpus=8,
        memory_bytes=64 * GIB,
        status=status,
        gpus=tuple(
            Gpu(index=index, memory_bytes=80 * GIB, model="H100", used_bytes=used * GIB) for index in range(gpus)
        ),
    )


def place(*gpus: tuple[str, int], gib: float = 40, exclusive: bool = False) -> Place:
    claims = tuple(
        Claim(worker=name, gpu=index, gpu_bytes=int(gib * GIB), exclusive=exclusive, memory_bytes=GIB)
        for name, index in gpus
    )
    return Place(tier=Tier.ONE_GPU, claims=claims)


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if "│" in line]


def bars(row: str) -> list[str]:
    return row.split("│")[1:-1]


# Text


def test_a_bar_shows_owners_and_free_memory() -> None:
    fleet = Fleet([worker(gpus=4, used=8)])
    fleet.claim("chat-1", place(("w", 0)), "chat")
    fleet.claim("chat-2", place(("w", 1), gib=72), "chat")
    fleet.claim("embed-1", place(("w", 2), gib=16), "embed")
    fleet.claim("alone", place(("w", 2), gib=16))
    text = fleet_text(fleet, width=126)  # 20 cells of 4 GiB each
    [row] = rows(text)
    assert bars(row) == [
        "xxAAAAAAAAAA      32",
        "xxAAAAAAAAAAAAAAAAAA",
        "xxBBBBCCCC        40",
        "xx                72",
    ]
    assert row.startswith("w       4 x H100 80GB  │")
    assert row.split()[-2:] == ["144", "72.0"]
    assert "A chat (2 instances, 112 GiB)   B embed (1 instance, 16.0 GiB)   C alone (1 instance, 16.0 GiB)" in text
    assert "x used by others   numbers: GiB free" in text
    assert text.splitlines()[0] == "1 worker, 4 GPUs with 320 GiB: 45 % claimed, 10 % used by others, 45 % free"


def test_reserved_held_and_overcommitted_memory() -> None:
    small = Worker(
        name="w",
        cpus=1,
        memory_bytes=GIB,
        reserved_gpu_bytes=10 * GIB,
        gpus=tuple(Gpu(index=index, memory_bytes=40 * GIB) for index in range(3)),
    )
    fleet = Fleet([small])
    fleet.claim("a-1", place(("w", 0), gib=10, exclusive=True), "a")
    fleet.claim("b-1", place(("w", 1), gib=60), "b")
    text = fleet_text(fleet, width=99)  # 20 cells of 2 GiB each
    [row] = rows(text)
    assert bars(row) == ["-----AAAAA~~~~~~~~20", "---BBBBBBBBBBBBBBBB!", "-----             30"]
    assert row.split()[-2:] == ["30.0", "30.0"]
    assert "- reserved for the system   ~ held by an exclusive instance" in text
    assert "! more is claimed than there is" in text


def test_workers_without_gpus_and_of_unified_memory_have_one_bar() -> None:
    nas = Worker(name="nas", cpus=4, memory_bytes=32 * GIB, used_memory_bytes=8 * GIB)
    mac = Worker(
        name="mac", cpus=4, memory_bytes=64 * GIB, unified_memory=True, gpus=(Gpu(index=0, memory_bytes=48 * GIB),)
    )
    fleet = Fleet([nas, mac])
    fleet.claim("a-1", Place(tier=Tier.CPU, claims=(Claim(worker="nas", memory_bytes=8 * GIB),)), "a")
    fleet.claim("b-1", place(("mac", 0), gib=31), "b")
    text = fleet_text(fleet, width=54)  # 16 cells
    first, second = rows(text)
    assert bars(first) == ["xxxxAAAA      16"]
    assert bars(second) == ["BBBBBBBB      32"]
    assert "2 workers, 1 GPU" in text
    assert "A a (1 instance, 8.0 GiB of memory)" in text


@pytest.mark.parametrize("status", [WorkerStatus.DRAINING, WorkerStatus.LOST])
def test_the_status_of_a_worker_is_shown(status: WorkerStatus) -> None:
    fleet = Fleet([worker(status=status)])
    assert f"w ({status.value})" in fleet_text(fleet)
    assert f">{status.value}</text>" in fleet_svg(fleet)


def test_a_place_that_an_instance_has_is_marked() -> None:
    fleet = Fleet([worker()])
    mine, twin = place(("w", 0)), place(("w", 1))
    fleet.claim("a-1", mine, "a")
    fleet.claim("a-2", twin, "a")
    [row] = rows(fleet_text(fleet, width=80, highlight=mine))
    first, second = bars(row)
    assert "#" in first
    assert "A" not in first
    assert "A" in second
    assert "#" not in second


def test_a_highlighted_place_without_an_instance_is_drawn() -> None:
    fleet = Fleet([worker()])
    [row] = rows(text := fleet_text(fleet, width=80, highlight=place(("w", 1), gib=30)))
    assert bars(row)[0].strip() == "80"
    assert bars(row)[1].count("#") > 3
    assert bars(row)[1].endswith("50")
    assert "# chosen" in text
    assert not fleet.occupants, "drawing changes nothing"
    assert ">chosen<" in fleet_svg(fleet, highlight=place(("w", 1), gib=30))


def test_a_large_fleet_is_summed_up_and_the_chosen_place_is_seen() -> None:
    fleet = Fleet([worker(f"w{number}", 8) for number in range(1000)])
    fleet.claim("a-1", place(("w0", 0)), "a")
    fleet.claim("far-1", place(("w555", 0), gib=0), "far")
    text = fleet_text(fleet, rows=10, highlight=place(("w777", 3)))
    drawn = [row.split()[0] for row in rows(text)]
    assert drawn == ["w777", *(f"w{number}" for number in range(9))]
    assert "... and 990 workers more" in text
    [line] = [line for line in text.splitlines() if line.startswith("H100 80GB ")]
    assert line.split()[2:] == ["8,000", "640,000", "40.0", "0.0", "639,960", "7,998", "80.0"]
    assert "a (1 instance, 40.0 GiB)" in text
    assert "far" not in text, "only drawn owners are in the legend"
    svg = ElementTree.fromstring(fleet_svg(fleet, rows=10, highlight=place(("w777", 3))))
    words = [element.text for element in svg.iter(f"{SVG}text")]
    assert "w777" in words
    assert "... and 990 workers more. All of them:" in words
    assert "639,960" in words
    assert "a (1 instance)" in words
    assert "far (1 instance)" not in words


@pytest.mark.parametrize("width", [60, 72, 80, 100, 140])
@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8, 16])
def test_lines_fit_the_width_and_show_every_gpu(width: int, gpus: int) -> None:
    fleet = Fleet([worker("a-worker-of-some-length", gpus)])
    for index in range(gpus):
        fleet.claim(f"i-{index}", place(("a-worker-of-some-length", index), gib=10 + index), f"deployment-{index}")
    text = fleet_text(fleet, width=width)
    assert max(map(len, text.splitlines()[1:])) <= width
    assert sum(len(bars(row)) for row in rows(text)) == max(gpus, 1)
    colored = fleet_text(fleet, width=width, color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == text
    assert ("\x1b[" in colored) == (gpus > 0)


def test_more_deployments_than_letters() -> None:
    fleet = Fleet([worker(gpus=1)])
    for number in range(60):
        fleet.claim(f"i{number}", place(("w", 0), gib=1), f"d{number}")
    text = fleet_text(fleet, width=120)
    assert "+ further deployments" in text or "+" not in rows(text)[0]
    assert len({colour(number) for number in range(60)}) == 60


KINDS = st.sampled_from(list(PartKind))


@given(
    st.lists(st.tuples(KINDS, st.integers(1, 10**12)), max_size=12).map(lambda made: [BarPart(*one) for one in made]),
    st.integers(1, 60),
)
def test_cells_are_shared_out_without_a_rest(parts: list[BarPart], cells: int) -> None:
    shares = shared_out(parts, cells)
    assert sum(shares) == (cells if parts else 0)
    assert min(shares, default=0) >= 0
    if len(parts) <= cells // 2:
        assert all(share for part, share in zip(parts, shares, strict=True) if part.kind is PartKind.CLAIMED)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90), st.booleans()), max_size=8), st.booleans())
def test_the_parts_of_a_bar_add_up(claims: list[tuple[int, int, bool]], highlighted: bool) -> None:
    fleet = Fleet([worker(gpus=4, used=5)])
    for number, (gpu, gib, exclusive) in enumerate(claims):
        fleet.claim(f"i{number}", place(("w", gpu), gib=gib, exclusive=exclusive), f"d{number % 2}")
    view = FleetView(fleet, place(("w", 0), gib=3) if highlighted else None)
    for bar in (*view.gpus(fleet["w"]), view.memory(fleet["w"])):
        assert sum(part.size_bytes for part in bar.parts) == bar.total_bytes - min(bar.free_bytes, 0)


# SVG


def test_an_svg_shows_every_worker_and_owner() -> None:
    fleet = Fleet([
        Worker(name="a", cpus=8, memory_bytes=64 * GIB, labels={"rack": "r1"}, gpus=worker().gpus),
        Worker(name="b", cpus=8, memory_bytes=64 * GIB, labels={"rack": "r2"}),
        Worker(name="c", cpus=8, memory_bytes=64 * GIB),
    ])  # fmt: skip
    fleet.claim("chat-1", place(("a", 1), gib=30), "chat")
    document = ElementTree.fromstring(fleet_svg(fleet))
    words = {element.text for element in document.iter(f"{SVG}text")}
    assert {"rack r1", "rack r2", "no rack", "a", "b", "c", "chat-1", "chat (1 instance)", "50.0 GiB free"} <= words
    tips = {element.text for element in document.iter(f"{SVG}title")}
    assert "chat-1 (chat): 30.0 GiB" in tips


def test_without_racks_there_are_no_headings() -> None:
    assert "rack" not in re.sub(r"<style>.*</style>", "", fleet_svg(Fleet([worker()])), flags=re.DOTALL)


def test_nothing_is_drawn_outside() -> None:
    fleet = Fleet([worker("w", 11), worker("v", 3)])
    fleet.claim("over", place(("w", 0), gib=300), "over")
    document = ElementTree.fromstring(fleet_svg(fleet))
    width, height = float(document.attrib["width"]), float(document.attrib["height"])
    for rect in document.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x >= 0
            assert y >= 0
            assert x + w <= width
            assert y + h <= height
    assert "220 GiB too much" in {element.text for element in document.iter(f"{SVG}text")}


@settings(max_examples=examples(60), deadline=None)
@given(st.text(min_size=1, max_size=20), st.text(max_size=20), st.text(max_size=10))
def test_any_name_can_be_drawn(name: str, deployment: str, rack: str) -> None:
    one = Worker(
        name=name,
        cpus=1,
        memory_bytes=GIB,
        labels={"rack": rack, "x": name},
        gpus=(Gpu(index=0, memory_bytes=80 * GIB, model=deployment, link=rack),),
    )
    fleet = Fleet([one])
    fleet.claim(name, place((name, 0)), deployment)
    ElementTree.fromstring(fleet_svg(fleet))
    fleet_text(fleet)


def test_a_deployment_may_be_called_chosen() -> None:
    fleet = Fleet([worker()])
    fleet.claim("chosen-1", place(("w", 0)), "chosen")
    text = fleet_text(fleet, highlight=place(("w", 1)))
    assert [set(bar) - set("0123456789 ") for bar in bars(rows(text)[0])] == [{"A"}, {"#"}]
    ElementTree.fromstring(fleet_svg(fleet, highlight=place(("w", 1))))


def test_an_empty_fleet() -> None:
    assert fleet_text(Fleet()).startswith("0 workers, 0 GPUs")
    ElementTree.fromstring(fleet_svg(Fleet()))


def test_the_same_fleet_gives_the_same_picture() -> None:
    def made() -> Fleet:
        fleet = Fleet([worker()])
        fleet.claim("a", place(("w", 0)), "x")
        return fleet

    assert fleet_svg(made()) == fleet_svg(made())
    assert fleet_text(made()) == fleet_text(made())


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "example"), [("docs/fleet.md", "mixed"), ("examples/fleets/README.md", "homelab")])
def test_the_pages_show_what_is_drawn(page: str, example: str) -> None:
    fleet = load_fleet(ROOT / "examples" / "fleets" / f"{example}.yaml").fleet()
    assert f"```text\n{fleet_text(fleet)}\n```" in (ROOT / page).read_text(encoding="utf-8")
