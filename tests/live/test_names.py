"""Names of any length and form, sent to a real plane: to its admin API and to an application."""

from urllib.parse import quote

import httpx2 as httpx
import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from pointsman.types import MAX_NAME
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import hashed, manifest, simulated

ADMIN_KEY = "key-of-admin"
NAMES = ["n" * 5000, "n" * 300, "ü" * 200, "a/b", "../lock", ".hidden", "a\0b", "\n", " ", "m-", "'; drop table", "\\"]


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> LivePlane:
    module_plane.up(manifest(simulated("m", 1), adminKeySha256=hashed(ADMIN_KEY)))
    text = pm.build(nodes.diamond(), name="diamond", folder=module_plane.folder).to_yaml()
    module_plane.admin.post("applications", body={"text": text, "folder": str(module_plane.folder)})
    module_plane.until(module_plane.is_settled, "application ready")
    return module_plane


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name[:10]!a} x {len(name)}")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "instances/{}/logs"),
        ("POST", "instances/{}/drain"),
        ("GET", "deployments/{}/scaling"),
        ("GET", "deployments/{}/load"),
        ("GET", "applications/{}"),
        ("POST", "applications/{}/rollback"),
        ("DELETE", "applications/{}"),
        ("GET", "requests/{}"),
    ],
)
def test_a_name_that_does_not_exist_is_not_found(plane: LivePlane, method: str, path: str, name: str) -> None:
    url = f"{plane.url}/admin/v1/{path.format(quote(name, safe=''))}"
    answer = httpx.request(method, url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=30)
    assert answer.status_code == 404, answer.text
    assert len(answer.content) < 2000


@pytest.mark.parametrize(
    "header", ["x-request-id", "x-pointsman-tenant", "x-pointsman-priority", "x-pointsman-session", "x-session-id"]
)
def test_names_sent_to_an_application_are_bounded(plane: LivePlane, header: str) -> None:
    answer = httpx.post(f"{plane.url}/diamond", json=[1, 2, 3], headers={header: "1" * (MAX_NAME + 1)}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")
    assert str(MAX_NAME) in answer.text
