"""`pointsman estimate`, as it is typed."""

import json
from pathlib import Path

import pytest

from pointsman.cli.main import main
from tests.placement.estimate.models import TINY_GGUF, write_known


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    return str(write_known(tmp_path, "qwen3-32b"))


def test_the_tables(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--context", "32768", "--concurrency", "16", "--tp", "2"]
    assert main(["estimate", qwen, *args]) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen3-32b: qwen3, 64 layers, 32.8 B parameters, mostly BF16 (safetensors)\n")
    assert "vllm, context 32,768, 16 at once, tensor parallel 2; a token takes 256 KiB of KV cache" in out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert rows["weights"][1:] == ["61.02", "30.51"]
    assert rows["KV cache"][2:] == ["128.00", "64.00"]
    assert rows["H100 80GB"][5:7] == ["no", "4"]
    assert rows["H200 141GB"][5:7] == ["yes", "2"]
    assert "tensor-parallel sizes: 1, 2, 4, 8, 16, 32, 64" in out
    assert "note: vLLM computes steps of 8,192 tokens" in out


def test_json_has_the_same_numbers(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--context", "32768", "--concurrency", "16", "--tp", "2", "--pp", "2", "--gpu", "H100 80GB", "--json"]
    assert main(["estimate", qwen, *args]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kv_bytes_per_token"] == 256 * 1024
    assert told["stage_layers"] == [32, 32]
    assert told["gpu_bytes"] == sum(part["gpu_bytes"] for part in told["parts"])
    [gpu] = told["gpus"]
    assert (gpu["gpu"], gpu["fits"], gpu["gpu_bytes"]) == ("H100 80GB", True, told["gpu_bytes"])
    assert told["need"]["tensor_parallel_sizes"] == [1, 2, 4, 8, 16, 32, 64]


def test_gguf_is_for_llama_cpp_and_says_how_many_layers_fit(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--context", "1024", "--concurrency", "4", "--gpu-memory", "1025MiB", "--gpu", "L4"]
    assert main(["estimate", str(TINY_GGUF), *args]) == 0
    out = capsys.readouterr().out
    assert "llama.cpp, context 1,024, 4 at once" in out
    assert "on the CPU alone: 51 MiB" in out
    [small] = [line for line in out.splitlines() if line.startswith("1.001 GiB")]
    [large] = [line for line in out.splitlines() if line.startswith("L4 24GB")]
    assert small.split()[5:] == ["no", "0", "0", "0", "of", "4"]
    assert large.endswith("4 of 4")


def test_weights_in_a_python_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights_of_mine").mkdir()
    (tmp_path / "weights_of_mine" / "tiny.gguf").symlink_to(TINY_GGUF)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["estimate", "package:weights_of_mine/tiny.gguf"]) == 0
    assert capsys.readouterr().out.startswith("tiny-pydoc-hf: llama, 4 layers")
    assert main(["estimate", "package:weights_of_others/tiny.gguf"]) == 1
    told = "the Python package weights_of_others is not installed; run: pip install weights_of_others"
    assert capsys.readouterr().err == f"pointsman: {told}\n"
    assert main(["estimate", "package:weights_of_mine/huge.gguf"]) == 1
    assert "huge.gguf cannot be read as a model: there is no such file" in capsys.readouterr().err


def test_the_exit_code_is_1_if_it_fits_on_no_named_gpu(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", qwen, "--gpu", "L4"]) == 1
    assert main(["estimate", qwen, "--gpu", "L4", "--gpu-memory", "200GiB"]) == 0
    assert main(["estimate", qwen, "--gpu", "H100", "--kv-dtype", "fp8", "--tp", "2"]) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gpu", "H100 90GB"], 'unknown GPU "H100 90GB"; did you mean "H100 80GB"?'),
        (["--tp", "3"], "cannot be divided among 3 GPUs by vllm; sizes: 1, 2, 4"),
        (["--kv-dtype", "fp9"], 'unknown data type of a KV cache "fp9"; did you mean "fp8"?'),
        (["--lora", "nowhere"], "nowhere cannot be read as a model: there is no such file or folder"),
        (["--draft", "nowhere.gguf"], "nowhere.gguf cannot be read as a model: there is no such file"),
    ],
)
def test_invalid_models_are_messages(
    args: list[str], words: str, qwen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", qwen, *args]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_a_truncated_file_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(TINY_GGUF.read_bytes()[:900_000])
    assert main(["estimate", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"pointsman: {path} cannot be read as a model: expected ")
    assert error.endswith("found a file of 900,000; it is truncated\n")
    assert main(["estimate", str(path), "--json"]) == 1
    assert "truncated" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize("args", [["--gpu-memory", "much"], ["--gpu-memory", "0"], ["--tp", "0"], ["--engine", "tgi"]])
def test_wrong_usage_exits_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["estimate", "x", *args])
    assert exited.value.code == 2
    assert "usage: pointsman estimate" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    assert "  pointsman estimate models/Qwen3-32B" in capsys.readouterr().out.partition("examples:")[2]
