"""The `placement` of a deployment becomes an ask."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pointsman.config import load_manifest
from pointsman.errors import ConfigError
from pointsman.placement import Arrangement, Ask

TINY = Path(__file__).parents[1] / "models" / "tiny-pydoc-q8_0.gguf"
GIB = 1 << 30


def ask(placement: dict[str, Any], engine: dict[str, Any] | None = None) -> Ask | None:
    """What is asked for an instance with this placement."""
    engine = engine or {"type": "llama.cpp", "parameters": {"model": str(TINY), "contextTokens": 1024, "slots": 2}}
    document = {"deployments": [{"name": "d", "model": "m", "engine": engine, "placement": placement}]}
    [plan] = load_manifest(yaml.safe_dump(document)).deployments
    return plan.desired.ask


def problems(placement: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        ask(placement)
    return str(caught.value)


def test_the_need_is_estimated_from_the_files_of_the_engine() -> None:
    found = ask({})
    assert found is not None
    assert (found.deployment, found.need.context, found.arrangement) == ("d", 1024, Arrangement.SPREAD)
    assert TINY.stat().st_size * 0.9 < found.need.weight_bytes < TINY.stat().st_size
    assert found.need.kv_bytes > 0
    assert found.engine.partial_offload
    assert not found.engine.needs_gpu


def test_more_context_needs_more() -> None:
    little, much = ask({"context": 512}), ask({"context": 4096, "concurrency": 8})
    assert little is not None
    assert much is not None
    assert much.need.kv_bytes == little.need.kv_bytes * 8 * 4


def test_explicit_resources() -> None:
    found = ask({"resources": {"gpus": 2, "gpuMemory": "8Gi", "gpuShare": 0.5, "memory": "3Gi"}, "cpus": 4})
    assert found is not None
    assert (found.need.gpu_bytes(2), found.need.host_bytes) == (8 * GIB, 3 * GIB)
    assert (found.need.tensor_parallel_sizes, found.gpu_share, found.cpus) == ((2,), 0.5, 4.0)
    without = ask({"resources": {"gpus": 0, "memory": "3Gi"}})
    assert without is not None
    assert (without.need.tensor_parallel_sizes, without.need.cpu_bytes, without.cpu) == ((), 3 * GIB, True)


def test_everything_else_is_passed_on() -> None:
    found = ask(
        {
            "arrangement": "binpack",
            "selector": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c", "operator": "Exists"}]},
            "workers": ["w1"],
            "gpus": ["rack/w1/0"],
            "gpuModels": ["L4"],
            "severalGpus": False,
            "severalWorkers": True,
            "partialOffload": True,
            "cpu": True,
            "mixedGpus": True,
            "exclusive": True,
            "near": "other",
            "allOrNothing": True,
            "priority": 3,
            "preempts": True,
            "overcommit": True,
        }
    )
    assert found is not None
    assert [one.key for one in found.selector.expressions] == ["a", "c"]
    assert (found.workers, found.gpus) == (frozenset({"w1"}), frozenset({("rack/w1", 0)}))
    assert (found.gpu_models, found.near, found.priority) == (frozenset({"L4"}), "other", 3)
    assert found.arrangement is Arrangement.BINPACK
    assert (found.several_gpus, found.several_workers, found.partial_offload, found.cpu) == (False, True, True, True)
    assert (found.mixed_gpus, found.exclusive, found.preempts, found.overcommit) == (True, True, True, True)
    assert found.all_or_nothing


def test_equal_documents_ask_for_the_same() -> None:
    selector = {"selector": {"matchLabels": {"zone": "a"}}}
    assert ask(selector) == ask(selector)
    assert ask(selector) != ask({})


def test_a_model_that_is_elsewhere_asks_for_nothing() -> None:
    assert ask({}, {"type": "vllm", "parameters": {"model": "org/elsewhere"}}) is None


def test_unreadable_model_files_give_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF and then nothing")
    plan = load_manifest(
        f"deployments:\n- {{name: d, model: m, engine: {{type: llama.cpp, parameters: {{model: {file}}}}}}}\n"
    )
    assert plan.deployments[0].desired.ask is None
    [warning] = plan.warnings
    assert warning.field == "deployments[0].placement"
    assert warning.message.startswith("the need of d is not known (")
    assert "placement.resources" in warning.message


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        ({"gpus": ["w1"]}, 'expected a GPU as WORKER/INDEX, such as w1/0, found "w1"'),
        ({"arrangement": "scatter"}, "arrangement"),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}, 'values of "a" are missing'),
        ({"resources": {"gpuShare": 2}}, "gpuShare"),
        ({"severalWorker": True}, "severalWorkers"),
    ],
)
def test_mistakes(placement: dict[str, Any], problem: str) -> None:
    assert problem in problems(placement)


def test_named_model_files_must_be_readable(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"nothing of the kind")
    assert "placement.modelFiles" in problems({"modelFiles": str(file)})
