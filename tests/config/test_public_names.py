"""What the package offers; changing this list is a decision."""

import subprocess
import sys

import pointsman.config as config


def test_public_names() -> None:
    assert sorted(config.__all__) == [
        "ApplicationPlan", "ConfigWarning", "DeploymentPlan", "PickerPlan", "PointsmanPlan", "Problem",
        "build_named", "build_policy", "endpoint_engine", "json_schema",
        "load", "load_application", "load_endpoints", "load_manifest", "load_picker",
    ]  # fmt: skip
    assert all(hasattr(config, name) for name in config.__all__)


def test_importing_it_brings_nothing_along_that_it_does_not_need() -> None:
    code = "import sys, pointsman.config; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = {"pointsman.runtimes", "pointsman.gateway", "pointsman.lab", "pointsman.cli"}
    assert rooms.isdisjoint(loaded)
    assert {"hypothesis", "asyncio", "http.client", "httptools", "uvloop", "sqlite3"}.isdisjoint(loaded)
