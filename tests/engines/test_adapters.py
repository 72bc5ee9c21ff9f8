"""Parameters -> the command that starts a server, and the requests that probe it."""

import sys
from typing import get_args

import msgspec
import pytest

from pointsman.config.registry import plugin_type
from pointsman.engines import (
    ENGINES,
    Command,
    Engine,
    LlamaCpp,
    OpenAI,
    ProbeRequest,
    ProcessEnd,
    Sglang,
    Simulated,
    Vllm,
)
from pointsman.engines.simulated import MID_RESPONSE, Fault, FaultSpec, MeasuredHardware
from pointsman.errors import ConfigError
from pointsman.simulator.faults import ANY_TIME, AT_ONCE, AT_THE_START
from pointsman.simulator.performance import constants

OWN = {"A": "1"}
COMMANDS: list[tuple[Engine, str]] = [
    (
        LlamaCpp("/w/m.gguf", slots=2, context_tokens=512, threads=3),
        f"{sys.executable} -P -m pointsman.engines.llama_cpp_server --alias chat --host 127.0.0.1 --port 8001 "
        "--model /w/m.gguf --context-tokens 512 --slots 2 --threads 3 --batch-tokens 256 --prompt-cache-mib 256",
    ),
    (
        Vllm("org/model"),
        "vllm serve org/model --served-model-name chat --host 127.0.0.1 --port 8001",
    ),
    (
        Vllm("org/model", executable="/opt/vllm", tensor_parallel_size=2, max_num_seqs=64, args=["--dtype", "half"]),
        "/opt/vllm serve org/model --served-model-name chat --host 127.0.0.1 --port 8001 "
        "--tensor-parallel-size 2 --max-num-seqs 64 --dtype half",
    ),
    (
        Vllm("org/model", python="/opt/python"),
        "/opt/python -m vllm.entrypoints.openai.api_server --model org/model "
        "--served-model-name chat --host 127.0.0.1 --port 8001",
    ),
    (
        Sglang("org/model", tensor_parallel_size=4, max_running_requests=8, args=["--dp-size", "2"]),
        f"{sys.executable} -m sglang.launch_server --model-path org/model --served-model-name chat --host 127.0.0.1 "
        "--port 8001 --enable-metrics --tp-size 4 --max-running-requests 8 --dp-size 2",
    ),
    (
        Sglang("org/model", python="/opt/python", embeddings=True),
        "/opt/python -m sglang.launch_server --model-path org/model --served-model-name chat --host 127.0.0.1 "
        "--port 8001 --enable-metrics --is-embedding",
    ),
    (
        Command("serve --at {host}:{port} {model}"),
        "serve --at 127.0.0.1:8001 chat",
    ),
    (
        Simulated(tokens_per_second=50, max_num_seqs=4),
        f"{sys.executable} -P -m pointsman.simulator --model chat --host 127.0.0.1 --port 8001 "
        "--hardware 8B|h100_sxm|vllm|tp1 --time-scale 1.0 --tokens-per-second 50 --max-num-seqs 4 "
        "--max-num-batched-tokens 8192 --block-size 16 --context-tokens 32768 --output-tokens 128 "
        "--start-seconds 0.0 --seed 0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "command"), COMMANDS)
def test_the_command(engine: Engine, command: str) -> None:
    assert " ".join(engine.launch("chat", "127.0.0.1", 8001).argv) == command


def test_any_parameter_of_llama_cpp_can_be_set() -> None:
    engine = LlamaCpp("m.gguf", embeddings=True, pooling="cls", extra={"n_keep": 3, "chat_template": "x y"})
    argv = engine.launch("m", "h", 1).argv
    assert argv[argv.index("--embeddings") :] == (
        "--embeddings", "--pooling", "cls", "--set", "n_keep=3", "--set", 'chat_template="x y"',
    )  # fmt: skip


@pytest.mark.parametrize("engine", [LlamaCpp("m"), Vllm("m"), Sglang("m"), Simulated()])
def test_python_servers_may_keep_their_bytecode(engine: Engine) -> None:
    assert engine.launch("m", "h", 1).env["PYTHONDONTWRITEBYTECODE"] is None


@pytest.mark.parametrize(
    "engine",
    [LlamaCpp("m", env=OWN), Vllm("m", env=OWN), Sglang("m", env=OWN), Command("s {port}", env=OWN)],
)
def test_environment_variables(engine: Engine) -> None:
    launch = engine.launch("m", "h", 1)
    assert launch.env["A"] == "1"
    assert msgspec.json.decode(msgspec.json.encode(launch))["argv"] == list(launch.argv)


def test_a_command_keeps_other_braces() -> None:
    engine = Command(["serve", "--port={port}", "--json", '{"a": {"port": 1}}', "{other}", "two words"])
    assert engine.launch("m", "h", 8001).argv == (
        "serve", "--port=8001", "--json", '{"a": {"port": 1}}', "{other}", "two words",
    )  # fmt: skip
    assert Command("serve 'two words' {port}").launch("m", "h", 1).argv == ("serve", "two words", "1")


def test_what_is_filled_in_is_not_filled_in_again() -> None:
    assert Command("serve {model} {port}").launch("{host}", "h", 1).argv == ("serve", "{host}", "1")


def test_a_command_must_take_the_port() -> None:
    with pytest.raises(
        ConfigError, match=r"must contain \{port\}, which is filled in when it is started: serve --port 8000"
    ):
        Command("serve --port 8000")


@pytest.mark.parametrize("command", ["", [], "serve 'unclosed {port}"])
def test_a_command_is_a_command(command: str | list[str]) -> None:
    with pytest.raises(ConfigError):
        Command(command)


def test_vllm_is_started_in_one_way() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Vllm("m", executable="vllm", python="python")


def test_openai_servers_are_not_started() -> None:
    assert not OpenAI.launchable
    with pytest.raises(ConfigError, match="endpoints"):
        OpenAI().launch("m", "h", 1)


@pytest.mark.parametrize(
    ("engine", "path", "body"),
    [
        (Vllm("m"), "/v1/completions", {"model": "x", "prompt": "Hello", "max_tokens": 1, "temperature": 0}),
        (LlamaCpp("m", embeddings=True), "/v1/embeddings", {"model": "x", "input": "Hello"}),
        (Vllm("m", embeddings=True), "/v1/embeddings", {"model": "x", "input": "Hello"}),
        (Sglang("m", embeddings=True), "/v1/embeddings", {"model": "x", "input": "Hello"}),
        (Command("s {port}", work="embeddings"), "/v1/embeddings", {"model": "x", "input": "Hello"}),
    ],
)
def test_readiness_is_real_work(engine: Engine, path: str, body: dict[str, object]) -> None:
    probe = engine.readiness("x")
    assert (probe.method, probe.path) == ("POST", path)
    assert msgspec.json.decode(probe.body) == body


@pytest.mark.parametrize("engine", [OpenAI(), Command("s {port}", work="chat")])
def test_servers_that_only_chat_are_probed_with_chat(engine: Engine) -> None:
    probe = engine.readiness("x")
    assert probe.path == "/v1/chat/completions"
    assert msgspec.json.decode(probe.body)["messages"] == [{"role": "user", "content": "Hello"}]


def test_slots_where_they_are_known() -> None:
    known = [LlamaCpp("m", slots=3), Vllm("m", max_num_seqs=3), Sglang("m", max_running_requests=3)]
    known_too: list[Engine] = [*known, Command("s {port}", slots=3), Simulated(max_num_seqs=3)]
    assert [engine.slots for engine in known_too] == [3] * 5
    unknown: list[Engine] = [Vllm("m"), Sglang("m"), Command("s {port}"), OpenAI(), LlamaCpp.of_endpoint()]
    assert [engine.slots for engine in unknown] == [None] * 5


def test_a_command_sets_its_health_and_metrics_paths() -> None:
    engine = Command("s {port}", health="/ping", metrics="vllm", metrics_path="/prom")
    assert (engine.health.path, engine.metrics_path) == ("/ping", "/prom")
    assert Command("s {port}").metrics_path == ""


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_known_by_its_name_and_says_what_it_is(name: str) -> None:
    engine = ENGINES[name]
    assert engine.name == name
    assert plugin_type(name, engine).summary


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in ("command", "python")])
def test_every_engine_can_read_endpoints(name: str) -> None:
    assert ENGINES[name].of_endpoint().readiness("m").path.startswith("/v1/")


def test_simulated_offers_what_its_process_knows() -> None:
    assert set(get_args(MeasuredHardware)) == set(constants())
    assert set(get_args(Fault)) == {*ANY_TIME, *AT_THE_START, *AT_ONCE}
    assert set(MID_RESPONSE) == set(ANY_TIME)


def test_faults_are_checked_before_anything_starts() -> None:
    argv = Simulated(faults=[FaultSpec("hang", count=2, after_tokens=3)]).launch("m", "h", 1).argv
    assert argv[-2:] == ("--fault", '{"fault":"hang","count":2,"afterTokens":3}')
    with pytest.raises(ValueError, match="cannot happen after tokens"):
        FaultSpec("status", after_tokens=1)
    with pytest.raises(ValueError, match="whole server"):
        FaultSpec("refuse", count=1)
    with pytest.raises(ConfigError, match="maxNumBatchedTokens"):
        Simulated(max_num_seqs=300, max_num_batched_tokens=200)


# Servers that end before they are ready


TRACE = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>']
IN_USE = "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 9000): address already in use"
UNKNOWN = (
    "OSError: no/such is not a local folder and is not a valid model identifier listed on 'https://huggingface.co'"
)


@pytest.mark.parametrize(
    ("code", "lines", "port_is_free", "reason"),
    [
        (78, ["no license"], True, "refuses-to-start"),
        (78, [], True, "refuses-to-start"),
        (127, ["sh: 1: nothing: not found"], True, "no-program"),
        (126, ["sh: 1: ./x: Permission denied"], True, "no-program"),
        (2, ["usage: vllm serve [options]", "vllm: error: unrecognized arguments: --bogus"], True, "wrong-options"),
        (2, ["Error: no such option", "Usage: serve [OPTIONS]"], True, "wrong-options"),
        (2, ["panic: runtime error", "goroutine 1 [running]:"], True, None),
        (1, ["usage: x"], True, None),
        (1, [*TRACE, "ModuleNotFoundError: No module named 'torch'"], True, "no-package"),
        (1, ["/usr/bin/python3.11: No module named vllm"], True, "no-package"),
        (1, ["/opt/python: Error while finding ... (ModuleNotFoundError: No module named 'a')"], True, "no-package"),
        (1, ["ModuleNotFoundError: No module named 'optional'; going on without", "out of memory"], True, None),
        (1, [*TRACE, IN_USE], True, "port-taken"),
        (1, [*TRACE, IN_USE], False, None),  # its own port: it gets another
        (1, [*TRACE, UNKNOWN, "If this is a private repository, pass a token"], True, "unknown-model"),
        (1, [*TRACE, "torch.OutOfMemoryError: CUDA out of memory"], True, None),
        (1, [*TRACE, "requests.exceptions.ConnectionError: Max retries exceeded"], True, None),
        (1, [], True, None),
        (139, ["Segmentation fault"], True, None),
    ],
)  # fmt: skip
def test_whether_another_start_may_succeed(code: int, lines: list[str], port_is_free: bool, reason: str | None) -> None:
    found = Vllm("org/model").why_final(ProcessEnd(code, lines, port_is_free))
    assert (None if found is None else found.code) == reason
    assert found is None or str(found)


def test_what_to_install() -> None:
    missing = ProcessEnd(1, ["/opt/python: No module named vllm"], True)
    told = str(Vllm("org/model", python="/opt/python").why_final(missing))
    assert told.startswith("the Python package vllm is not installed; run: /opt/python -m pip install vllm; or set")
    missing = ProcessEnd(1, [f"{sys.executable}: No module named sglang"], True)
    assert f"run: {sys.executable} -m pip install sglang" in str(Sglang("org/model").why_final(missing))


# Probes that fail


ASKED = ProbeRequest("POST", "/v1/completions", b'{"model": "smollm2"}')
WHAT = 'POST /v1/completions for model "smollm2" was answered with'


@pytest.mark.parametrize(
    ("question", "status", "body", "failure"),
    [
        (ASKED, 200, b'{"choices": []}', ""),
        (ASKED, 200, b"<html>", f"{WHAT} something else than JSON: <html>"),
        (
            ASKED,
            404,
            b'{"error": {"message": "The model `smollm2` does not exist.", "code": 404}}',
            f"{WHAT} 404: The model `smollm2` does not exist.; if it serves the model by another name, set servedModel",
        ),
        (
            ASKED,
            401,
            b'{"detail": "Unauthorized"}',
            f"{WHAT} 401: Unauthorized; apiKeyEnv or apiKeyFile must name the key that it asks for",
        ),
        (ASKED, 500, b"", f"{WHAT} 500"),
        (ASKED, 503, b'{"error": "Loading\\nmodel"}', f"{WHAT} 503: Loading model"),
        (ProbeRequest("GET", "/health"), 404, b"Not Found", "GET /health was answered with 404: Not Found"),
        (ProbeRequest("GET", "/health"), 500, b"x" * 9999, f"GET /health was answered with 500: {'x' * 197}..."),
    ],
)
def test_a_failed_probe_says_what_was_asked_and_what_the_engine_says(
    question: ProbeRequest, status: int, body: bytes, failure: str
) -> None:
    assert question.failure(status, body, is_work=question is ASKED) == failure
