"""Every mistake in what should run is found before anything runs, with its line and what to do about it."""

from pathlib import Path

import pytest

from pointsman.config import load_endpoints, load_manifest
from pointsman.errors import ConfigError
from pointsman.parameters import base_url, host_and_port


def problems(text: str, folder: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_manifest(text, folder, "m.yaml")
    return str(raised.value).splitlines()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("engine: {type: vlm}", 'engine.type: there is no engine "vlm"; did you mean "vllm"?'),
        ("engine: {type: ''}", "engine.type: must not be empty"),
        ("engine: {}", 'engine: field "type" is missing'),
        ("engine: {type: 'nowhere:Engine'}", 'engine.type: there is no module "nowhere"'),
        (
            "engine: {type: 'pointsman.strategies:FIFOPolicy'}",
            'engine.type: "pointsman.strategies:FIFOPolicy" is not an engine: it must be a subclass',
        ),
        ("engine: {type: openai}", 'engine.type: engine "openai" cannot be started; list its servers under endpoints'),
        ("engine: {type: vllm}", 'engine.parameters: parameter "model" is missing'),
        (
            "engine: {type: simulated, parameters: {maxNumSeq: 3}}",
            'engine.parameters.maxNumSeq: unknown parameter; did you mean "maxNumSeqs"?',
        ),
        (
            "engine: {type: simulated, parameters: {maxNumSeqs: 0}}",
            "engine.parameters.maxNumSeqs: must be at least 1, found 0",
        ),
        (
            "engine: {type: llama.cpp, parameters: {model: gone.gguf}}",
            "engine.parameters.model: there is no file /nowhere/gone.gguf",
        ),
        ("engine: {type: llama.cpp, parameters: {model: /}}", "engine.parameters.model: / is not a file"),
        (
            "engine: {type: command, parameters: {command: serve}}",
            "engine: the command must contain {port}",
        ),
        ("replicas: -1, engine: {type: simulated}", "replicas: must be at least 0, found -1"),
        ("replicas: 2", "replicas: need an engine, and there is none; add one, or remove this"),
        ("replicas: 2, endpointsFile: e.yaml", "replicas: need an engine, and there is none"),
        ("labels: {}", "nothing serves this deployment; give it an engine to run, endpoints that run already, or an"),
        ("engine: {type: simulated}, maxConcurrency: 0", "maxConcurrency: must be at least 1, found 0"),
        ("engine: {type: simulated}, aliases: [m]", 'aliases[0]: this deployment already has a model or alias "m" on'),
        ("engine: {type: simulated}, aliases: ['']", "aliases[0]: must not be empty"),
        ("engine: {type: simulated}, lifecycle: {backoff: 0}", "lifecycle.backoff: must be above 0, found 0"),
        ("engine: {type: simulated}, lifecycle: {stopGrace: -5s}", 'lifecycle.stopGrace: must be above 0, found "-5s"'),
        (
            "engine: {type: simulated}, lifecycle: {backoff: 2m}",
            "lifecycle.backoffMax: must be at least backoff, which is 120s",
        ),
        (
            "engine: {type: simulated}, price: {perMillionInputTokens: -1}",
            "price.perMillionInputTokens: must be at least 0, found -1",
        ),
        (
            "endpoints: [{url: 'http://a:1', maxConcurrency: 0}]",
            "endpoints[0].maxConcurrency: must be at least 1, found 0",
        ),
        (
            "endpoints: [{url: 'http://a:1', engine: llama-cpp}]",
            'endpoints[0].engine: there is no engine "llama-cpp"; did you mean "llama.cpp"?',
        ),
        (
            "endpoints: [{url: 'http://a:1'}, {url: 'https://a:1'}]",
            'endpoints[1].name: there is already an endpoint "a:1" on line 3',
        ),
        ("endpoints: [{url: 'http://a:1', name: a/b}]", "endpoints[0].name: expected letters, digits and any of"),
        ("endpoints: [{name: a}]", 'endpoints[0]: field "url" is missing'),
    ],
)
def test_mistakes_in_deployments_and_instances(fields: str, problem: str) -> None:
    text = f"kind: Pointsman\ndeployments:\n- {{name: a, model: m, {fields}}}\n"
    [found] = problems(text, Path("/nowhere"))
    assert found.removeprefix("m.yaml:3: deployments[0]").lstrip(".: ").startswith(problem)


@pytest.mark.parametrize("name", ["../a", "a/b", "a b", "-a", "a" * 64, "é"])
def test_names_of_deployments_can_be_names_of_files(name: str) -> None:
    [found] = problems(f"deployments:\n- {{name: {name!r}, model: m, engine: {{type: simulated}}}}\n")
    assert found.startswith("m.yaml:2: deployments[0].name: expected letters, digits, dots, dashes and underscores")


def test_no_two_deployments_share_a_name_for_their_models() -> None:
    text = """\
deployments:
- {name: a, model: m, aliases: [x], engine: {type: simulated}}
- {name: b, model: x, engine: {type: simulated}}
- {name: c, model: n, aliases: [y, m], engine: {type: simulated}}
"""
    assert problems(text) == [
        'm.yaml:3: deployments[1].model: deployment "a" already has a model or alias "x" on line 2',
        'm.yaml:4: deployments[2].aliases[1]: deployment "a" already has a model or alias "m" on line 2',
    ]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000", "http://localhost", "http://localhost:0", "http://localhost:70000", "ftp://localhost:21",
        "http://localhost:8000/v1", "http://user@localhost:80", "http://1.2.3:80", "http://[::1:80", "http://[1.2.3.4]:1",
        "http://::1:80", "http:// a:80", "http://:80", "",
    ],
)  # fmt: skip
def test_invalid_addresses(url: str) -> None:
    [found] = problems(f"deployments:\n- {{name: a, model: m, endpoints: [{{url: '{url}'}}]}}\n")
    wanted = "expected http://host:port or https://host:port, without a path, found"
    assert found.startswith(f"m.yaml:2: deployments[0].endpoints[0].url: {wanted}")


def test_addresses() -> None:
    assert base_url("HTTP://Example.ORG:080/") == ("http://example.org:80", "example.org:80")
    assert base_url("https://[::1]:443") == ("https://[::1]:443", "[::1]:443")
    assert host_and_port("[::1]:0") == ("::1", 0)
    assert host_and_port("localhost:8080") == ("localhost", 8080)


def test_mistakes_in_the_gateway() -> None:
    sha = "0a" * 32
    text = f"""\
gateway:
  listen: "8080"
  tls: {{certFile: gone.pem, keyFile: /}}
  adminKeySha256: abc
  tenants:
  - {{name: red, requestsPerMinute: 0}}
  - {{name: red, costBudget: -1, costPeriod: 0s}}
  - {{name: ""}}
  keys:
  - {{sha256: {sha}, tenant: red}}
  - {{sha256: {sha.upper()}, tenant: rde}}
  - {{sha256: {"x" * 64}, tenant: red}}
  limits: {{maxBodyBytes: 0, headerTimeout: 0, maxConnections: 0}}
  upstream: {{maxTries: 0, retryBudget: -0.1, stallTimeout: soon}}
  drainTimeout: -1s
  keepRecords: 0
"""
    expected = [
        '2: gateway.listen: expected host:port, such as 127.0.0.1:8080 or [::1]:8080, found "8080"',
        "3: gateway.tls.certFile: there is no file /nowhere/gone.pem",
        "3: gateway.tls.keyFile: / is not a file",
        "4: gateway.adminKeySha256: expected the SHA-256 of a key, 64 hex digits, found 3 characters; "
        "make a key and its hash with: pointsman key --admin",
        "6: gateway.tenants[0].requestsPerMinute: must be above 0, found 0",
        "7: gateway.tenants[1].costBudget: must be above 0, found -1",
        '7: gateway.tenants[1].costPeriod: must be above 0, found "0s"',
        '7: gateway.tenants[1].name: there is already a tenant "red" on line 6',
        "8: gateway.tenants[2].name: must not be empty",
        '11: gateway.keys[1].tenant: there is no tenant "rde"; did you mean "red"?',
        "11: gateway.keys[1].sha256: this key is on line 10 already",
        "12: gateway.keys[2].sha256: expected the SHA-256 of a key, 64 hex digits, found other characters; "
        "make a key and its hash with: pointsman key",
        "13: gateway.limits.maxBodyBytes: must be at least 1, found 0",
        "13: gateway.limits.headerTimeout: must be above 0, found 0",
        "13: gateway.limits.maxConnections: must be at least 1, found 0",
        "14: gateway.upstream.maxTries: must be at least 1, found 0",
        "14: gateway.upstream.retryBudget: must be at least 0, found -0.1",
        '14: gateway.upstream.stallTimeout: "soon" is not a duration; write for example 200ms, 60s or 1m30s',
        '15: gateway.drainTimeout: must be above 0, found "-1s"',
        "16: gateway.keepRecords: must be at least 1, found 0",
    ]
    found = [line.removeprefix("m.yaml:") for line in problems(text, Path("/nowhere"))]
    assert sorted(found) == sorted(expected)
    lines = [int(line.partition(":")[0]) for line in found]
    assert lines == sorted(lines)


def test_keys_without_tenants() -> None:
    [found] = problems(f"gateway:\n  keys: [{{sha256: {'0a' * 32}, tenant: red}}]\n")
    assert found == 'm.yaml:2: gateway.keys[0].tenant: there is no tenant "red"; list it under gateway.tenants'


@pytest.mark.parametrize(
    "listen", ["127.0.0.1", ":8080", "127.0.0.1:99999", "http://localhost:80", "::1:80", "127.0.0:80"]
)
def test_invalid_listen_addresses(listen: str) -> None:
    [found] = problems(f"gateway: {{listen: '{listen}'}}\n")
    assert found.startswith("m.yaml:1: gateway.listen: expected host:port, such as")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("runtime: rey", "runtime: expected "),
        ("runtime: {type: rey}", 'runtime.type: expected "local" or "ray", found "rey"'),
        ("runtime: {type: ray, lease: 1s}", "runtime.lease: "),
        ("runtime: {type: ray, orphanGrace: 1s}", "runtime.orphanGrace: "),
        ("runtime: {type: ray, namespace: a/b}", "runtime.namespace: expected"),
        ("runtime: {type: ray, adress: h}", 'runtime.adress: unknown field; did you mean "address"?'),
        ("runtime: {address: 'h:1'}", "runtime.address: is for a cluster; add: type: ray"),
        ("runtime: {namespace: n}", "runtime.namespace: is for a cluster; add: type: ray"),
        ("gateway: {listen: 'node:80', keys: []}", 'gateway.listen: "node" is the address of each node that has'),
        ("gateway: {nodes: [a, a]}", "gateway.nodes[1]: is there already"),
        ("gateway: {nodes: ['']}", "gateway.nodes[0]: must not be empty"),
        ("gateway: {nodes: [a], processes: 2, listen: '127.0.0.1:0'}", "gateway.listen: the processes of a node share"),
    ],
)
def test_mistakes_about_clusters(section: str, problem: str) -> None:
    [found] = problems(f"{section}\n")
    assert found.startswith(f"m.yaml:1: {problem}"), found


def test_other_machines_come_later() -> None:
    found = problems("workers:\n- {name: localhost}\n- {name: gpu-box}\n- {name: localhost}\n")
    assert [line.partition(": ")[0] for line in found] == ["m.yaml:3", "m.yaml:3", "m.yaml:4"]
    assert found[0].startswith('m.yaml:3: workers[1].name: "gpu-box" is not this machine (localhost or ')
    assert found[0].endswith("; other machines come with the Ray runtime")
    assert "found 3 workers; the local runtime has one, this machine; other machines come with the Ray" in found[1]
    assert found[2] == 'm.yaml:4: workers[2].name: there is already a worker "localhost" on line 2'


def test_problems_of_a_file_of_endpoints_are_found_with_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text("- {url: 'http://a:1'}\n- {url: 'http://b:2', name: gpu}\n- {url: b, enginee: vllm}\n")
    text = """\
deployments:
- name: a
  model: m
  endpointsFile: servers.yaml
  endpoints:
  - {url: "http://c:3", name: gpu}
"""
    assert problems(text, tmp_path) == [
        f'{file}:2: [1].name: there is already an endpoint "gpu"',
        f'{file}:3: [2].enginee: unknown field; did you mean "engine"?',
        f'{file}:3: [2].url: expected http://host:port or https://host:port, without a path, found "b"',
    ]
    file.write_text("endpoints: [{name: a, address: 10.0.0.1}, {name: gpu, address: 10.0.0.1, port: x, lables: {}}]\n")
    assert problems(text, tmp_path) == [
        f'{file}:1: endpoints[0]: field "port" is missing',
        f'{file}:1: endpoints[1].lables: unknown field; did you mean "labels"?',
    ]
    file.write_text("endpoints: [{name: gpu, address: 10.0.0.1, port: x}]\n")
    assert problems(text, tmp_path) == [
        f"{file}:1: endpoints[0].url: expected http://host:port or https://host:port, without a path, found "
        '"http://10.0.0.1:x"',
        f'{file}:1: endpoints[0].name: there is already an endpoint "gpu"',
    ]
    file.write_text("servers\n")
    assert problems(text, tmp_path) == [f'{file}:1: expected a list, found "servers"']
    file.unlink()
    file.mkdir()
    assert problems(text, tmp_path) == [f"{file}: cannot be read: it is a directory; name a file"]
    with pytest.raises(ConfigError, match="cannot be read"):
        load_endpoints(file)
