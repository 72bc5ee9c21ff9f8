"""What engines are told, by parameters and by arguments in any spelling, and what their servers are told in a place."""

import pytest

from pointsman.engines import Engine, Sglang, Vllm
from pointsman.engines.command import Command
from pointsman.engines.llama_cpp import LlamaCpp
from pointsman.errors import ConfigError
from pointsman.placement.asks import Claim, Place, Tier


@pytest.mark.parametrize(
    "args",
    [
        ["--tensor-parallel-size", "4"],
        ["--tensor-parallel-size=4"],
        ["--tensor_parallel_size=4"],
        ["--tensor_parallel_size", "4"],
        ["-tp", "4"],
        ["--tensor-parallel-size", "2", "--tensor-parallel-size", "4"],
    ],
)
def test_every_spelling_is_read(args: list[str]) -> None:
    assert Vllm("m", args=args).demand.tensor_parallel_size == 4
    assert Command(["vllm", "serve", "m", "--port", "{port}", *args]).demand.tensor_parallel_size == 4


def test_sizes_with_units() -> None:
    contexts = [Vllm("m", args=["--max-model-len", size]).weights for size in ("32768", "32K", "32k", "auto")]
    assert [one.context if one else 0 for one in contexts] == [32768, 32768, 32000, None]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Vllm("m", tensor_parallel_size=4, args=["-tp", "2"]), "tensorParallelSize is 4"),
        (lambda: Vllm("m", max_model_len=8192, args=["--max-model-len=4096"]), "maxModelLen is 8192"),
        (lambda: Vllm("m", kv_cache_dtype="fp8", args=["--kv-cache-dtype", "auto"]), "kvCacheDtype is fp8"),
        (lambda: Sglang("m", tensor_parallel_size=4, args=["--tp", "2"]), "is 4"),
        (lambda: LlamaCpp("m", gpu_layers=4, extra={"n_gpu_layers": 2}), "n_gpu_layers"),
        (lambda: LlamaCpp("m", extra={"n_parallel": 2}), "n_parallel"),
        (lambda: LlamaCpp("m", tensor_split=[0, 0]), "tensor split"),
    ],
)
def test_contradictions_are_errors(make: "type[Engine]", words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_what_agrees_is_written_once() -> None:
    argv = Vllm("m", tensor_parallel_size=4, args=["-tp", "4"]).launch("m", "h", 1).argv
    assert argv.count("4") == 1


def claims(*gpus: tuple[str, int]) -> tuple[Claim, ...]:
    return tuple(Claim(worker=worker, gpu=gpu, gpu_bytes=1) for worker, gpu in gpus)


def test_stages_reach_the_engine() -> None:
    uneven = Place(
        tier=Tier.SEVERAL_WORKERS, claims=claims(("a", 1), ("b", 0)), pipeline_parallel_size=2, stage_layers=(20, 12)
    )
    vllm = Vllm("m")
    launch = vllm.placed(vllm.launch("m", "h", 1), uneven)
    assert launch.env["VLLM_PP_LAYER_PARTITION"] == "20,12"
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "1", "only those of its own worker"
    assert "--pipeline-parallel-size" in launch.argv


def test_layers_reach_llama_cpp() -> None:
    whole = Place(
        tier=Tier.SEVERAL_GPUS, claims=claims(("a", 1), ("a", 0)), pipeline_parallel_size=2, stage_layers=(20, 12)
    )
    ours, stock = LlamaCpp("m"), Command(["llama-server", "-m", "m", "--port", "{port}"])
    argv = ours.placed(ours.launch("m", "h", 1), whole).argv
    assert {"n_gpu_layers=999", "tensor_split=[20,13]"} <= set(argv), "the output counts as a layer of the last GPU"
    launch = stock.placed(stock.launch("m", "h", 1), whole)
    assert launch.argv[-4:] == ("--n-gpu-layers", "999", "--tensor-split", "20,13")
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_what_the_operator_wrote_stays() -> None:
    whole = Place(tier=Tier.ONE_GPU, claims=claims(("a", 0)))
    ours = LlamaCpp("m", gpu_layers=7)
    argv = ours.placed(ours.launch("m", "h", 1), whole).argv
    assert [word for word in argv if "n_gpu_layers" in word] == ["n_gpu_layers=7"]
