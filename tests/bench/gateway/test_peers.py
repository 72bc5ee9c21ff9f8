"""The configurations that can be checked without starting anything."""

import json
from pathlib import Path

import pytest

from bench.gateway.peers import Envoy, Packaged, Pointsman, SglangRouter, VllmRouter, peers
from bench.gateway.scenarios import ALL, BIG
from bench.gateway.traffic import MODEL, body_bytes, small
from pointsman.config import load
from pointsman.config.plan import PointsmanPlan

ENDPOINTS = [9001, 9002]


def test_our_manifest_asks_for_full_scheduling() -> None:
    plan = load(Pointsman().manifest(9000, ENDPOINTS))
    assert isinstance(plan, PointsmanPlan)
    [deployment] = plan.deployments
    assert deployment.model == MODEL


@pytest.mark.parametrize("kind", [Envoy, VllmRouter, SglangRouter])
def test_a_missing_package_says_what_to_do(kind: type[Packaged], tmp_path: Path) -> None:
    peer = kind(tmp_path)
    assert "requirements/bench-gateway.txt" in peer.unavailable()
    assert peer.version() == ""


def test_routers_know_all_endpoints_and_their_policy(tmp_path: Path) -> None:
    argv = SglangRouter(tmp_path).launch(9000, ENDPOINTS, tmp_path).argv
    assert argv[-2:] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    assert argv[argv.index("--policy") + 1] == "cache_aware"


def test_envoy_has_one_worker_and_all_endpoints(tmp_path: Path) -> None:
    launch = Envoy(tmp_path).launch(9000, ENDPOINTS, tmp_path)
    assert launch.argv[launch.argv.index("--concurrency") + 1] == "1"
    resources = json.loads((tmp_path / "envoy.json").read_text())["static_resources"]
    [group] = resources["clusters"][0]["load_assignment"]["endpoints"]
    assert len(group["lb_endpoints"]) == len(ENDPOINTS)


def test_names_are_told_apart(tmp_path: Path) -> None:
    assert len({peer.name for peer in peers(tmp_path)}) == 5
    assert len({scenario.name for scenario in ALL}) == len(ALL)


def test_bodies_have_the_sizes_they_are_named_after() -> None:
    assert 450 < body_bytes(small()) < 550
    for size, scenario in BIG.items():
        assert abs(body_bytes(scenario.requests) - size * 1024) < 100
