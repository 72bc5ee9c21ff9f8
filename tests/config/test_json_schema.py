"""The schema for editors accepts what loads, and points at what does not."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pointsman.config import json_schema
from pointsman.config.registry import engines, plugins
from tests.config.test_any_document import APPLICATION

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
PUBLISHED = sorted((Path(__file__).parent / "published").glob("*.yaml"))
KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "number": int | float, "integer": int, "boolean": bool,
}  # fmt: skip


def errors(data: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "$") -> Iterator[str]:
    """Enough of JSON schema for the one that we write."""
    if "$ref" in schema:
        yield from errors(data, root["$defs"][schema["$ref"].rpartition("/")[2]], root, path)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(data, KINDS[k]) and (k == "boolean") == isinstance(data, bool) for k in kinds):
        yield f"{path}: not {kinds}"
    if "enum" in schema and data not in schema["enum"]:
        yield f"{path}: not one of {schema['enum']}"
    if "const" in schema and data != schema["const"]:
        yield f"{path}: not {schema['const']}"
    if "pattern" in schema and not re.search(schema["pattern"], str(data)):
        yield f"{path}: not like {schema['pattern']}"
    if "anyOf" in schema and all(any(errors(data, one, root)) for one in schema["anyOf"]):
        yield f"{path}: none of {len(schema['anyOf'])}"
    if isinstance(data, int | float) and not isinstance(data, bool):
        if data < schema.get("minimum", data):
            yield f"{path}: below {schema['minimum']}"
        if data <= schema.get("exclusiveMinimum", data - 1):
            yield f"{path}: not above {schema['exclusiveMinimum']}"
    for part in schema.get("allOf", []):
        yield from errors(data, part, root, path)
    if "if" in schema:
        holds = not any(errors(data, schema["if"], root))
        yield from errors(data, schema.get("then" if holds else "else", {}), root, path)
    if isinstance(data, list):
        for place, item in enumerate(data):
            yield from errors(item, schema.get("items", {}), root, f"{path}[{place}]")
    if isinstance(data, dict):
        yield from (f"{path}: {name} is missing" for name in schema.get("required", []) if name not in data)
        others = schema.get("additionalProperties", {})
        for name, value in data.items():
            known = schema.get("properties", {}).get(name, others)
            yield from [f"{path}.{name}: unknown"] if known is False else errors(value, known, root, f"{path}.{name}")


def found(text: str, kind: str | None = None) -> list[str]:
    schema = json_schema(kind)
    return list(errors(yaml.safe_load(text), schema, schema))


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_published_documents_fit(file: Path) -> None:
    assert found(file.read_text()) == []
    assert found(file.read_text(), "EndpointPickerConfig") == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_fit(file: Path) -> None:
    assert found(file.read_text()) == []
    assert found(file.read_text(), "Pointsman") == []


def test_our_own_document_fits() -> None:
    text = """\
kind: Pointsman
deployments:
- {name: a, model: m, scheduling: {policy: slo-aware, parameters: {urgentBelowMs: 5}}}
- {name: b, model: m, scheduling: {policy: "mine:Policy", parameters: {whatever: 5}}}
- {name: c, model: m, scheduling: {config: {plugins: [{type: queue-scorer}]}}}
- {name: g, model: m, scaling: {max: 3, min: 0, policy: target-ongoing, parameters: {target: 5}}}
- {name: h, model: m, scaling: {max: 3, policy: "mine:policy", parameters: {whatever: 5}, upDelay: 5s}}
- {name: d, model: m, engine: {type: "mine:Engine", parameters: {whatever: 5}}}
- {name: e, model: m, replicas: 0, engine: {type: simulated}, lifecycle: {backoff: 100ms, stopGrace: 5}}
- {name: f, model: m, endpoints: [{url: "http://a:1", engine: "mine:Engine"}, {url: "http://a:2", engine: vllm}]}
gateway: {limits: {maxBodyBytes: 64Mi, headerTimeout: 5s}}
"""
    assert found(text) == []
    assert found(text, "Pointsman") == []


def test_applications_fit() -> None:
    assert found(APPLICATION) == []
    assert found(APPLICATION, "Application") == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{kind: Application, name: a, nodes: [{name: n, clas: x}], output: 1}", "$.nodes[0].clas: unknown"),
        ("{kind: Application, name: a, nodes: [{class: x}], output: 1}", "$.nodes[0]: name is missing"),
        ("{kind: Application, name: a, nodes: [], calls: [{id: c}]}", "$.calls[0]: node is missing"),
        (
            "{kind: Application, name: a, nodes: [{name: n, scheduling: {policy: fif}}], output: 1}",
            "$.nodes[0].scheduling.policy: none of",
        ),
        (
            "{kind: Application, name: a, nodes: [{name: n, scaling: {max: 2, policy: target-ongoin}}], output: 1}",
            "$.nodes[0].scaling.policy: none of",
        ),
        (
            "{kind: Application, name: a, nodes: [], output: 1, scaling: {min: 2}}",
            "$.scaling: max is missing",
        ),
        ("plugin: []", "$.plugin: unknown"),
        ("plugins: [{name: a}]", "$.plugins[0]: type is missing"),
        ("plugins: [{type: queue-scorrer}]", "$.plugins[0].type: none of"),
        (
            "plugins: [{type: load-aware-scorer, parameters: {treshold: 1}}]",
            "$.plugins[0].parameters.treshold: unknown",
        ),
        (
            "plugins: [{type: load-aware-scorer, parameters: {threshold: x}}]",
            "$.plugins[0].parameters.threshold: not ['integer']",
        ),
        ("plugins: [{type: priority-holdback-policy}]", "$.plugins[0]: parameters is missing"),
        (
            "plugins: [{type: concurrency-detector, parameters: {concurrencyMode: token}}]",
            "$.plugins[0].parameters.concurrencyMode: not one of",
        ),
        ("{kind: Pointsman, deployments: [{name: a}]}", "$.deployments[0]: model is missing"),
        ("{kind: Pointsman, gatway: {}}", "$.gatway: unknown"),
        ("{kind: Pointsman, gateway: {keys: [{tenant: a}]}}", "$.gateway.keys[0]: sha256 is missing"),
        ("{kind: Pointsman, gateway: {limits: {maxConnections: 0}}}", "$.gateway.limits.maxConnections: below 1"),
        ("{kind: Pointsman, gateway: {drainTimeout: 0}}", "$.gateway.drainTimeout: not above 0"),
        (
            "{kind: Pointsman, deployments: [{name: a, model: m, engine: {type: openai}}]}",
            "$.deployments[0].engine.type: none of",
        ),
        (
            "{kind: Pointsman, deployments: [{name: a, model: m, engine: {type: vllm}}]}",
            "$.deployments[0].engine: parameters is missing",
        ),
        (
            "{kind: Pointsman, deployments: [{name: a, model: m, engine: {type: simulated, parameters: {x: 1}}}]}",
            "$.deployments[0].engine.parameters.x: unknown",
        ),
        (
            "{kind: Pointsman, deployments: [{name: a, model: m, endpoints: [{url: 'http://a:1', engine: command}]}]}",
            "$.deployments[0].endpoints[0].engine: none of",
        ),
    ],
)
def test_mistakes_do_not_fit(text: str, error: str) -> None:
    assert any(one.startswith(error) for one in found(text)), found(text)


def test_every_built_in_plugin_completes_with_its_parameters() -> None:
    spec = json_schema("EndpointPickerConfig")["$defs"]["PluginSpec"]
    names = {choice["const"] for choice in spec["properties"]["type"]["anyOf"] if "const" in choice}
    assert {kind.name for kind in plugins()} <= names
    cases = {case["if"]["properties"]["type"]["const"]: case["then"]["properties"] for case in spec["allOf"]}
    assert set(cases) == {kind.name for kind in plugins() if kind.parameters}
    assert cases["prefix-cache-affinity-filter"]["parameters"]["properties"]["maxTTFTPenaltyMs"]["default"] == 18000.0


@pytest.mark.parametrize("kind", [None, "EndpointPickerConfig", "Pointsman", "Application"])
def test_all_references_of_the_schema_resolve(kind: str | None) -> None:
    schema = json.loads(json.dumps(json_schema(kind)))
    refs = set(re.findall(r"#/\$defs/(\w+)", json.dumps(schema)))
    assert refs <= set(schema["$defs"])


def test_every_engine_completes_with_its_parameters() -> None:
    spec = json_schema("Pointsman")["$defs"]["DesiredEngine"]
    names = {choice["const"] for choice in spec["properties"]["type"]["anyOf"] if "const" in choice}
    assert names == {"command", "llama.cpp", "python", "sglang", "simulated", "vllm"}
    cases = {case["if"]["properties"]["type"]["const"]: case["then"]["properties"] for case in spec["allOf"]}
    assert set(cases) == names
    for engine in engines():
        if engine.name in names:
            assert set(cases[engine.name]["parameters"]["properties"]) == set(engine.parameters)
    assert cases["llama.cpp"]["parameters"]["properties"]["slots"] == {"type": "integer", "minimum": 1, "default": 4}
