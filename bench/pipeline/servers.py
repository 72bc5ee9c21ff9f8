"""The servers: how each is found, configured and started.

To add one: a class with `name`, `missing` and `launch`, listed in `servers`.
"""

import json
import secrets
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from bench.gateway.processes import free_port
from bench.pipeline.serving import Launch, Server

HERE = Path(__file__).parent
BUILD_S = 30.0


class RayServe(Server):
    """Ray Serve as recommended today: deployments with handles, one of them the ingress."""

    name = "ray serve"

    def __init__(self, environment: Path) -> None:
        self._environment = environment

    def missing(self) -> str:
        if self.version():
            return ""
        return f"Ray is not installed in {self._environment} (pip install --no-deps -r requirements/ray.txt)"

    def version(self) -> str:
        folders = [str(folder) for folder in self._environment.glob("lib/python*/site-packages")]
        return next((found.version for found in distributions(name="ray", path=folders)), "")

    def launch(self, app: str, port: int, folder: Path) -> Launch:
        program = [self._environment / "bin" / "python", HERE / "ray_apps.py", app, port, folder / "ray"]
        # A separate token, so that Ray leaves none in the home folder.
        env = {"RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0", **self.settings(folder)}
        return Launch([str(word) for word in program], f"/{app}", env)

    def settings(self, folder: Path) -> Mapping[str, str]:
        """Further environment variables."""
        return {}


class RayServeTuned(RayServe):
    """The same with HAProxy (in C) instead of the proxy in Python, and with Ray's settings for throughput."""

    name = "ray serve, tuned"

    def settings(self, folder: Path) -> Mapping[str, str]:
        return {
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            # Replicas then call each other by gRPC, with messages of 4 MB at most by default.
            "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 * 2**20),
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "haproxy.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "1",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        }


class Pointsman(Server):
    """Our local runtime, as users start it."""

    name = "pointsman"

    def __init__(self) -> None:
        self._executable = Path(sys.executable).parent / "pointsman"

    def missing(self) -> str:
        return "" if self._executable.exists() else f"{self._executable} does not exist (run make)"

    def launch(self, app: str, port: int, folder: Path) -> Launch:
        build = [str(self._executable), "build", f"{HERE / 'apps' / app}.py:dag", "-o", str(folder / f"{app}.yaml")]
        built = subprocess.run(build, capture_output=True, text=True, check=False, timeout=BUILD_S)
        if built.returncode:
            raise RuntimeError(f"it cannot be built: {' / '.join(built.stderr.strip().splitlines()[-3:])}")
        manifest = folder / "pointsman.yaml"
        manifest.write_text(json.dumps(self.manifest(app, port), indent=2))  # JSON, which is YAML too
        up = [str(self._executable), "up", str(manifest), "--state", str(folder / "state")]
        return Launch([*up, *self.flags], f"/{app}", self.settings(folder))

    flags: ClassVar[list[str]] = []
    """Options of `pointsman up`."""

    def settings(self, folder: Path) -> Mapping[str, str]:
        """Environment variables."""
        return {}

    def manifest(self, app: str, port: int) -> dict[str, Any]:
        """In addition to the file of the application, which `pointsman build` has written."""
        return {
            "apiVersion": "pointsman/v1alpha1",
            "kind": "Pointsman",
            "applications": [f"{app}.yaml"],
            "gateway": {"listen": f"127.0.0.1:{port}"},
        }


class PointsmanOnRay(Pointsman):
    """Our Ray runtime on a cluster of one node, which it starts itself."""

    name = "pointsman on ray"
    flags: ClassVar[list[str]] = ["--runtime", "ray"]

    def missing(self) -> str:
        return super().missing() or ("" if find_spec("ray") else "Ray is not installed here (run make test)")

    def settings(self, folder: Path) -> Mapping[str, str]:
        return ray_of_its_own(folder)


def ray_of_its_own(folder: Path) -> dict[str, str]:
    """Environment variables for a Ray that leaves nothing outside a folder, whose path must be short."""
    return {
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "HOME": str(folder),
    }


def servers(environment: Path) -> list[Server]:
    """In the order of the tables."""
    return [RayServe(environment), RayServeTuned(environment), Pointsman(), PointsmanOnRay()]
