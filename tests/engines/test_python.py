"""The adapter of replicas: parameters -> the process that runs the user's code."""

import sys

import msgspec
import pytest

from pointsman.engines import ENGINES, Python
from pointsman.errors import ConfigError
from pointsman.replica.target import Recipe


def test_the_process() -> None:
    engine = Python(
        kind="class", app="diamond", node="m1", code="diamond.py:Model", args=[1], env={"A": "1"}, rank=1, shards=2
    )
    launch = engine.launch("diamond.m1", "127.0.0.1", 8001)
    assert " ".join(launch.argv) == (f"{sys.executable} -P -m pointsman.replica --host 127.0.0.1 --port 8001")
    assert launch.env["A"] == "1"
    assert launch.env["PYTHONDONTWRITEBYTECODE"] is None
    recipe = msgspec.json.decode(launch.env["POINTSMAN_REPLICA"] or "", type=Recipe)
    assert recipe == Recipe(app="diamond", node="m1", kind="class", code="diamond.py:Model", args=[1], rank=1, shards=2)


def test_every_parameter_reaches_the_replica() -> None:
    launch = Python(kind="function", code="m:f").launch("x", "h", 1)
    told = msgspec.json.decode(launch.env["POINTSMAN_REPLICA"] or "")
    assert told.keys() | {"env"} == set(Recipe.__struct_fields__)


def test_readiness_is_loaded_code() -> None:
    engine = Python(kind="ingress", preprocessor="m:f")
    assert (engine.readiness("x").method, engine.readiness("x").path) == ("GET", "/ready")
    assert engine.health.path == "/health"
    assert engine.metrics_path == ""
    assert engine.slots is None
    assert ENGINES["python"] is Python


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"kind": "class"}, "a class needs code"),
        ({"kind": "ingress", "code": "m:f"}, "name a preprocessor, a schema, or both"),
        ({"kind": "class", "code": "m:C", "rank": 2, "shards": 2}, "rank must be below shards, which is 2, found 2"),
    ],
)
def test_invalid_parameters(parameters: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Python(**parameters)  # type: ignore[arg-type]
