"""The process of a placed engine: which GPUs it sees, and how it is split across them."""

import pytest

from pointsman.engines import Command, Engine, LlamaCpp, Sglang, Simulated, Vllm
from pointsman.placement import Claim, Place, Tier


def place(*gpus: int, tier: Tier = Tier.ONE_GPU, tp: int = 1, pp: int = 1, layers: int | None = None) -> Place:
    claims = tuple(Claim(worker="w", gpu=gpu) for gpu in gpus) or (Claim(worker="w"),)
    return Place(tier=tier, claims=claims, tensor_parallel_size=tp, pipeline_parallel_size=pp, gpu_layers=layers)


ALL = [LlamaCpp("weights.gguf"), Vllm("org/model"), Sglang("org/model"), Simulated(), Command("serve --port {port}")]


@pytest.mark.parametrize("engine", ALL, ids=lambda engine: engine.name)
@pytest.mark.parametrize(("gpus", "visible"), [((2,), "2"), ((0, 3), "0,3"), ((), "")])
def test_it_sees_its_gpus_and_no_others(engine: Engine, gpus: tuple[int, ...], visible: str) -> None:
    launch = engine.placed(engine.launch("m", "127.0.0.1", 1), place(*gpus))
    assert (launch.env["CUDA_VISIBLE_DEVICES"], launch.env["HIP_VISIBLE_DEVICES"]) == (visible, visible)
    assert launch.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("engine", "where", "told"),
    [
        (Vllm("m"), place(0), []),
        (Vllm("m"), place(0, 1, tp=2), ["--tensor-parallel-size", "2"]),
        (Vllm("m", tensor_parallel_size=2), place(0, 1, tp=2), ["--tensor-parallel-size", "2"]),
        (
            Vllm("m"),
            place(0, 1, 2, 3, tp=2, pp=2),
            ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"],
        ),
        (Sglang("m"), place(0, 1, 2, 3, tp=2, pp=2), ["--tp-size", "2", "--pp-size", "2"]),
        (LlamaCpp("m"), place(0), ["--set", "n_gpu_layers=999"]),
        (LlamaCpp("m"), place(0, tier=Tier.PARTIAL_OFFLOAD, layers=12), ["--set", "n_gpu_layers=12"]),
        (LlamaCpp("m"), place(tier=Tier.CPU, layers=0), ["--set", "n_gpu_layers=0"]),
    ],
)
def test_an_engine_gets_its_parallel_sizes(engine: Engine, where: Place, told: list[str]) -> None:
    argv = list(engine.placed(engine.launch("m", "127.0.0.1", 1), where).argv)
    marks = {"--tensor-parallel-size", "--pipeline-parallel-size", "--tp-size", "--pp-size", "--set"}
    found = [word for at, word in enumerate(argv) if word in marks or (at and argv[at - 1] in marks)]
    assert found == told


@pytest.mark.parametrize(
    ("engine", "share", "context"),
    [(Vllm, "--gpu-memory-utilization", "--max-model-len"), (Sglang, "--mem-fraction-static", "--context-length")],
)
def test_it_takes_what_was_claimed_and_no_more(engine: type[Vllm | Sglang], share: str, context: str) -> None:
    claim = Claim(worker="w", gpu=0, gpu_bytes=20, gpu_total_bytes=80)
    where = Place(tier=Tier.ONE_GPU, claims=(claim,), context=4096)

    def told(adapter: Engine, place: Place) -> list[str]:
        return list(adapter.placed(adapter.launch("m", "127.0.0.1", 1), place).argv)

    argv = told(engine("m"), where)
    assert argv[argv.index(share) + 1] == "0.250"
    assert argv[argv.index(context) + 1] == "4096"
    by_hand = told(engine("m", args=[f"{share}=0.5", context, "512"]), where)
    assert [word for word in by_hand if word.startswith((share, context))] == [f"{share}=0.5", context]
    unknown = told(engine("m"), place(0))
    assert share not in unknown
    assert context not in unknown
