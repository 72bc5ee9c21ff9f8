"""How servers are reached: the name of the model, and where its key is. A key that is not there is found at once."""

from pathlib import Path

import pytest

from pointsman.config import load_endpoints, load_manifest
from pointsman.errors import ConfigError

ENDPOINT = "deployments: [{name: a, model: m, aliases: [b], endpoints: [{url: 'http://h:1', %s}]}]"
ENGINE = "deployments: [{name: a, model: m, engine: {type: %s, parameters: {%s}, %s}}]"


def problems(text: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_manifest(text, folder, "m.yaml")
    return str(raised.value)


def test_an_endpoint_with_a_name_and_a_key_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-secret\n")
    plan = load_manifest(ENDPOINT % "servedModel: org/M, apiKeyFile: key", tmp_path)
    [endpoint] = plan.deployments[0].desired.endpoints
    assert endpoint.names("m", ["b"]) == {"m": "org/M", "b": "org/M", "": "org/M"}
    assert endpoint.key == endpoint.address.key == f"file:{tmp_path / 'key'}"
    assert "sk-secret" not in repr(plan)


def test_paths_in_an_endpoints_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-secret")
    file = tmp_path / "servers.yaml"
    file.write_text("[{url: 'http://h:1', apiKeyFile: key}]")
    assert load_endpoints(file)[0].key == f"file:{tmp_path / 'key'}"
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigError, match="there is no file"):
        load_endpoints(file)


@pytest.mark.parametrize("text", [ENDPOINT, ENGINE.replace("%s", "vllm", 1).replace("%s", "model: x", 1)])
def test_a_missing_key(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GONE", raising=False)
    assert "apiKeyEnv: there is no API key: environment variable GONE is not set; export it" in problems(
        text % "apiKeyEnv: GONE", tmp_path
    )
    assert "apiKeyFile: there is no file" in problems(text % "apiKeyFile: gone", tmp_path)
    (tmp_path / "empty").write_text("\n")
    assert "is empty; write the API key into it" in problems(text % "apiKeyFile: empty", tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "cannot be read: it is not text" in problems(text % "apiKeyFile: bytes", tmp_path)
    monkeypatch.setenv("TWO_LINES", "sk-secret\r\nx: y")
    found = problems(text % "apiKeyEnv: TWO_LINES", tmp_path)
    assert "cannot be sent" in found
    assert "sk-secret" not in found
    (tmp_path / "key").write_text("sk-secret")
    assert "keep one of them" in problems(text % "apiKeyFile: key, apiKeyEnv: TWO_LINES", tmp_path)


def test_an_engine_that_cannot_be_started_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-secret")
    found = problems(ENGINE % ("sglang", "model: x", "apiKeyEnv: KEY"), tmp_path)
    assert 'engine.apiKeyEnv: engine "sglang" cannot be started with a key' in found


def test_names_are_unique_among_models_aliases_and_adapters(tmp_path: Path) -> None:
    text = "deployments: [{name: a, model: m, aliases: [b], adapters: [b], endpoints: [{url: 'http://h:1'}]}]"
    assert 'adapters[0]: this deployment already has a model or alias "b"' in problems(text, tmp_path)
