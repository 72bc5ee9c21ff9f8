"""Placement on a running plane: an instance that fits nowhere waits and shows the reason."""

from bench.chaos.planes import LivePlane
from tests.live.manifests import llama, manifest, simulated

TOO_MUCH = {"resources": {"gpus": 0, "memory": "900Ti"}}
LITTLE = {"resources": {"gpus": 0, "memory": "1Mi"}}


def apply(plane: LivePlane, manifest: str) -> None:
    assert plane.pointsman("apply", plane.write(manifest), "--no-wait").returncode == 0


def test_an_engine_is_placed_by_the_needs_of_its_model(plane: LivePlane) -> None:
    plane.up(manifest(llama("tiny", 2)))
    places = [str(one["place"]) for one in plane.instances().values()]
    assert all(place.endswith(" MiB of memory") for place in places), places


def test_the_preview_takes_running_instances_into_account(plane: LivePlane) -> None:
    plane.up(manifest(llama("tiny", 2)))
    more = plane.write(manifest(llama("tiny", 3), llama("other", 1)), "more.yaml")
    result = plane.pointsman("place", more)
    assert result.returncode == 0, result.stderr
    assert "tiny: 2 of 3 are there already" in result.stdout
    assert "tiny-3: CPU\n" in result.stdout
    assert "other-1: CPU\n" in result.stdout


def test_an_instance_that_does_not_fit_waits_and_leaves_others_running(plane: LivePlane) -> None:
    plane.up(manifest(simulated("small", 1)))
    apply(plane, manifest(simulated("small", 1), simulated("huge", 1, placement=TOO_MUCH)))
    plane.until(lambda: "no place" in str(plane.instances()["huge-1"]["reason"]), "huge-1 is unplaced")
    instances = plane.instances()
    assert instances["small-1"]["phase"] == "ready"
    assert instances["huge-1"]["process"] is None
    assert "too little memory" in str(instances["huge-1"]["reason"])
    apply(plane, manifest(simulated("small", 1), simulated("huge", 1, placement=LITTLE)))
    plane.until(lambda: plane.instances()["huge-1"]["phase"] == "ready", "huge-1 is placed")
    assert plane.instances()["huge-1"]["restarts"] == 0


def test_placements_are_restored_after_the_plane_is_killed(plane: LivePlane) -> None:
    plane.up(manifest(llama("tiny", 1)))
    before = {name: (one["process"], one["place"]) for name, one in plane.instances().items()}
    plane.kill()
    plane.up(None)
    plane.until(lambda: plane.instances()["tiny-1"]["phase"] == "ready", "tiny-1 is ready again")
    assert {name: (one["process"], one["place"]) for name, one in plane.instances().items()} == before
