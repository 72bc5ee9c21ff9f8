"""The user's code, as a node of an application (`pointsman.replica`)."""

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from pointsman.engines.base import BYTECODE, Engine, LaunchSpec, ProbeRequest
from pointsman.errors import ConfigError
from pointsman.parameters import Count


class Python(Engine):
    """A class or function of the user, called as a node of an application."""

    name = "python"
    metrics_path = ""

    def __init__(
        self,
        *,
        kind: Literal["class", "function", "ingress"],
        app: str = "",
        node: str = "",
        code: str = "",
        folder: str = "",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        version: str = "",
        threads: Count = 1,
        rank: Annotated[int, msgspec.Meta(ge=0)] | None = None,
        shards: Count = 1,
        preprocessor: str = "",
        schema: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        if kind == "ingress" and not (preprocessor or schema):
            raise ConfigError(["an ingress runs your code: name a preprocessor, a schema, or both"])
        if kind != "ingress" and not code:
            raise ConfigError([f"a {kind} needs code: module:Name or path/to/file.py:Name"])
        if rank is not None and rank >= shards:
            raise ConfigError([f"rank must be below shards, which is {shards}, found {rank}"])
        self._env = dict(env or {})
        self._recipe = {
            "app": app,
            "node": node,
            "kind": kind,
            "code": code,
            "folder": folder,
            "args": list(args),
            "kwargs": dict(kwargs or {}),
            "version": version,
            "threads": threads,
            "rank": rank,
            "shards": shards,
            "preprocessor": preprocessor,
            "schema": schema,
        }

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        argv = (sys.executable, "-P", "-m", "pointsman.replica", "--host", host, "--port", str(port))
        recipe = msgspec.json.encode(self._recipe).decode()
        return LaunchSpec(argv, {**BYTECODE, **self._env, "POINTSMAN_REPLICA": recipe})

    def readiness(self, model: str) -> ProbeRequest:
        """A replica is ready when its code is loaded and configured; the code itself is not called."""
        return ProbeRequest("GET", "/ready")
