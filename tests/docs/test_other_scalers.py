"""docs/scaling-others.md: what it hands to KEDA fits together, and is served under that address."""

import re
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from pointsman.gateway.admin import Admin
from tests.docs.test_code_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "scaling-others.md"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """The objects of Kubernetes, by kind."""
    [block] = [block for block in blocks(PAGE) if "keda.sh" in block.code]
    return {one["kind"]: one for one in yaml.safe_load_all(block.code)}


def test_the_objects_for_keda_refer_to_each_other(objects: dict[str, Any]) -> None:
    assert list(objects) == ["Secret", "TriggerAuthentication", "ScaledObject"]
    [trigger] = objects["ScaledObject"]["spec"]["triggers"]
    assert trigger["type"] == "metrics-api"
    assert trigger["metadata"]["authMode"] == "bearer"
    assert trigger["authenticationRef"]["name"] == objects["TriggerAuthentication"]["metadata"]["name"]
    [secret] = objects["TriggerAuthentication"]["spec"]["secretTargetRef"]
    assert (secret["parameter"], secret["name"]) == ("token", objects["Secret"]["metadata"]["name"])
    assert secret["key"] in objects["Secret"]["stringData"]


def test_every_address_of_the_page_is_served() -> None:
    asked = re.findall(r"https?://\S+?/admin/v1/\S+", PAGE.read_text(encoding="utf-8"))
    assert len(asked) >= 4
    gateway: Any = SimpleNamespace(pages=SimpleNamespace(trees={}))
    plane: Any = SimpleNamespace(events=None)
    admin = Admin(gateway, plane, dict, lambda: None)
    for url in asked:
        _, _, version, kind, *parts = urlsplit(url).path.split("/")
        assert (version, kind) == ("v1", "deployments")
        method = "GET" if parts[-1] == "scaling" else "POST"
        assert admin.handler(method, [kind, *parts]) is not None
