"""API keys and tenant limits apply to pipelines, and to the models that pipelines call."""

from typing import Any

import httpx2 as httpx
import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import hashed, llama, manifest

KEYS = [{"sha256": hashed("good"), "tenant": "team"}, {"sha256": hashed("limited"), "tenant": "limited"}]
TENANTS = [{"name": "team"}, {"name": "limited", "requestsPerMinute": 2}]


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> LivePlane:
    module_plane.up(manifest(llama("tiny", 1), keys=KEYS, tenants=TENANTS))
    for name, root in (("calls", nodes.Caller.bind(pm.model("tiny"))), ("diamond", nodes.diamond())):
        text = pm.build(root, name=name, folder=module_plane.folder).to_yaml()
        module_plane.admin.post("applications", body={"text": text, "folder": str(module_plane.folder)})
    module_plane.until(module_plane.is_settled, "applications ready")
    return module_plane


def post(plane: LivePlane, path: str, body: Any, key: str = "", **headers: str) -> httpx.Response:
    sent = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{plane.url}{path}", json=body, headers={**sent, **headers}, timeout=30)


def test_a_pipeline_requires_a_key(plane: LivePlane) -> None:
    assert post(plane, "/diamond", [1, 2, 3]).status_code == 401
    assert post(plane, "/diamond", [1, 2, 3], "wrong").status_code == 401
    assert post(plane, "/diamond", [1, 2, 3], "good").json() == 8


def test_a_pipeline_counts_as_one_request_of_its_tenant(plane: LivePlane) -> None:
    statuses = [post(plane, "/diamond", [1, 2, 3], "limited").status_code for _ in range(4)]
    assert statuses == [200, 200, 429, 429], "one request, whatever the number of steps"


def test_models_that_a_node_calls_need_no_key_and_are_charged_to_the_tenant(plane: LivePlane) -> None:
    answer = post(plane, "/calls", "def ", "good", **{"x-request-id": "calls-1"})
    assert answer.status_code == 200, answer.text
    record = plane.admin.get("requests", "calls-1.caller.1")
    assert record["tenant"] == "team"


def test_clients_cannot_use_the_endpoints_of_replicas(plane: LivePlane) -> None:
    for path in ("/pipelines/call", "/pipelines/v1/completions"):
        answer = post(plane, path, {"model": "tiny", "prompt": "def "}, "good")
        assert answer.status_code == 403
    replica = next(one["url"] for one in plane.instances("diamond.m1").values())
    assert httpx.post(f"{replica}/call", content=b"").status_code == 403
    assert httpx.get(f"{replica}/health").status_code == 200
