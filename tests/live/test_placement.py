"""Instances of a running plane have places; one for which there is none waits, and says why."""

from bench.chaos.planes import LivePlane
from tests.live.manifests import llama, manifest, simulated

TOO_MUCH = {"resources": {"gpus": 0, "memory": "900Ti"}}
LITTLE = {"resources": {"gpus": 0, "memory": "1Mi"}}


def apply(plane: LivePlane, manifest: str) -> None:
    assert plane.pointsman("apply", plane.write(manifest), "--no-wait").returncode == 0


def test_an_engine_is_placed_by_what_its_model_needs(plane: LivePlane) -> None:
    plane.up(manifest(llama("tiny", 2)))
    places = [str(one["place"]) for one in plane.instances().values()]
    assert all(place.endswith(" MiB of memory") for place in places), places


def test_the_next_one_is_placed_beside_those_that_run(plane: LivePlane) -> None:
    plane.up(manifest(llama("tiny", 2)))
    more = plane.write(manifest(llama("tiny", 3), llama("other", 1)), "more.yaml")
    told = plane.pointsman("place", more)
    assert told.returncode == 0, told.stderr
    assert "tiny: 2 of 3 are there already" in told.stdout
    assert "tiny-3: CPU\n" in told.stdout
    assert "other-1: CPU\n" in told.stdout


def test_what_does_not_fit_waits_and_disturbs_nobody(plane: LivePlane) -> None:
    plane.up(manifest(simulated("small", 1)))
    apply(plane, manifest(simulated("small", 1), simulated("huge", 1, placement=TOO_MUCH)))
    plane.until(lambda: "no place" in str(plane.instances()["huge-1"]["reason"]), "it has no place")
    found = plane.instances()
    assert found["small-1"]["phase"] == "ready"
    assert found["huge-1"]["pid"] is None
    assert "too little memory" in str(found["huge-1"]["reason"])
    apply(plane, manifest(simulated("small", 1), simulated("huge", 1, placement=LITTLE)))
    plane.until(lambda: plane.instances()["huge-1"]["phase"] == "ready", "it is placed")
    assert plane.instances()["huge-1"]["restarts"] == 0


def test_places_are_known_again_after_the_plane_was_killed(plane: LivePlane) -> None:
    plane.up(manifest(llama("tiny", 1)))
    before = {name: (one["pid"], one["place"]) for name, one in plane.instances().items()}
    plane.kill()
    plane.up(None)
    plane.until(lambda: plane.instances()["tiny-1"]["phase"] == "ready", "it is ready again")
    assert {name: (one["pid"], one["place"]) for name, one in plane.instances().items()} == before
