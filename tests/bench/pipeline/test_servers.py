"""The properties of the servers, without starting them."""

import json
from pathlib import Path

from bench.pipeline.apps import chain, diamond
from bench.pipeline.request_client import CHAIN, DIAMOND
from bench.pipeline.servers import Pointsman, RayServe, RayServeTuned, servers
from pointsman import build
from pointsman.config import load
from pointsman.config.plan import PointsmanPlan


def test_our_manifest_serves_the_application_beside_it(tmp_path: Path) -> None:
    for name, dag, nodes in ((DIAMOND, diamond.dag, 3), (CHAIN, chain.dag, 2)):
        application = build(dag, folder=tmp_path)
        assert application.name == name
        (tmp_path / f"{name}.yaml").write_text(application.to_yaml())
        plan = load(json.dumps(Pointsman().manifest(name, 9000)), folder=tmp_path)
        assert isinstance(plan, PointsmanPlan)
        assert [found.name for found in plan.applications] == [name]
        assert len(plan.deployments) == nodes
        assert plan.gateway.listen == "127.0.0.1:9000"


def test_without_ray_it_says_what_to_do(tmp_path: Path) -> None:
    ray = RayServe(tmp_path)
    assert "requirements/ray.txt" in ray.missing()
    assert ray.version() == ""


def test_ray_keeps_its_files_to_its_folder(tmp_path: Path) -> None:
    launch = RayServeTuned(Path("env")).launch(DIAMOND, 9000, tmp_path)
    assert launch.argv[-1] == str(tmp_path / "ray")
    places = [value for name, value in launch.env.items() if name.endswith(("_LOC", "_PATH", "_BASE", "_FILE"))]
    assert len(places) == 5
    assert all(Path(place).is_relative_to(tmp_path) for place in places)


def test_names_are_told_apart(tmp_path: Path) -> None:
    assert len({server.name for server in servers(tmp_path)}) == 4
