"""Metrics of engines -> what the scheduler sees."""

from pathlib import Path

import pytest

from pointsman.engines import Command, Engine, LlamaCpp, OpenAI, Samples, Sglang, Simulated, Vllm
from pointsman.routing.endpoints import Metrics

DATA = Path(__file__).parent / "data"
VLLM = (DATA / "vllm_metrics.txt").read_text(encoding="utf-8")
LLAMA_CPP = (DATA / "llama_cpp_metrics.txt").read_text(encoding="utf-8")
SGLANG = """\
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 162.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2826.0
sglang:gen_throughput{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 3612.3
"""


def told(text: str, **values: str) -> str:
    """The sample with other values."""
    lines = []
    for line in text.splitlines():
        name = line.partition("{")[0].partition(":")[2]
        lines.append(f"{line.rpartition(' ')[0]} {values[name]}" if name in values and line[0] != "#" else line)
    return "\n".join(lines)


def test_vllm_as_it_was_scraped() -> None:
    assert Vllm("m").metrics(Samples(VLLM)) == Metrics(block_size=128, num_blocks=182)


def test_vllm_under_load() -> None:
    text = told(VLLM, num_requests_running="12.0", num_requests_waiting="3.0", kv_cache_usage_perc="0.625")
    found = Vllm("m").metrics(Samples(text))
    assert found == Metrics(3.0, 12.0, 0.625, block_size=128, num_blocks=182)
    assert Simulated().metrics(Samples(text)) == found
    assert Command("serve {port}", metrics="vllm").metrics(Samples(text)) == found


def test_vllm_before_the_gauge_was_renamed() -> None:
    text = told(VLLM, kv_cache_usage_perc="0.5").replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    found = Vllm("m").metrics(Samples(text))
    assert found is not None
    assert found.kv_cache_usage == 0.5


def test_several_engines_behind_one_vllm_are_one() -> None:
    other = "".join(f"{line}\n" for line in VLLM.splitlines() if 'engine="0"' in line).replace('"0"', '"1"')
    text = told(VLLM, num_requests_running="1", kv_cache_usage_perc="0.2")
    text += "\n" + told(other, num_requests_running="2", kv_cache_usage_perc="0.6")
    assert Vllm("m").metrics(Samples(text)) == Metrics(0.0, 3.0, 0.4, block_size=128, num_blocks=364)


def test_the_newest_sample_of_adapters_counts() -> None:
    old = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters="poet"} 1.7e9\n'
    new = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="poet, chef",waiting_lora_adapters=""} 1.8e9\n'
    for text in (VLLM + old + new, VLLM + new + old):
        found = Vllm("m").metrics(Samples(text))
        assert found is not None
        assert found.active_models == frozenset({"poet", "chef"})
        assert found.waiting_models == frozenset()
        assert found.max_active_models == 4


def test_llama_cpp_as_it_was_scraped() -> None:
    found = LlamaCpp("m.gguf").metrics(Samples(LLAMA_CPP))
    assert found == Metrics(waiting_queue_size=12, running_requests_size=4, kv_cache_usage=1.0)


def test_busy_slots_stand_for_the_kv_cache_of_llama_cpp() -> None:
    assert LlamaCpp("m.gguf", slots=16).metrics(Samples(LLAMA_CPP)) == Metrics(12, 4, 0.25)
    assert Command("serve {port}", metrics="llama.cpp", slots=8).metrics(Samples(LLAMA_CPP)) == Metrics(12, 4, 0.5)
    # Whoever started it knows how many slots it has; we do not.
    assert LlamaCpp.of_endpoint().metrics(Samples(LLAMA_CPP)) == Metrics(12, 4, 0.0)


@pytest.mark.parametrize(
    ("cache", "block_size", "num_blocks"),
    [
        ("", 0, 0),
        ('sglang:cache_config_info{num_pages="9000",page_size="64"} 1\n', 64, 9000),
        ('sglang:page_size{tp_rank="0"} 64\nsglang:num_pages{tp_rank="0"} 9000\n', 64, 9000),
    ],
)
def test_sglang(cache: str, block_size: int, num_blocks: int) -> None:
    found = Sglang("m").metrics(Samples(SGLANG + cache))
    assert found == Metrics(2826.0, 162.0, 0.28, block_size=block_size, num_blocks=num_blocks)
    assert Command("serve {port}", metrics="sglang").metrics(Samples(SGLANG + cache)) == found


@pytest.mark.parametrize("engine", [Vllm("m"), LlamaCpp("m"), Sglang("m"), Simulated(), OpenAI(), Command("s {port}")])
@pytest.mark.parametrize("text", ["", "<html>not found</html>", "\x00\xff<<<", "vllm:num_requests_running 1\n"])
def test_what_cannot_be_read_is_nothing_and_not_an_idle_server(engine: Engine, text: str) -> None:
    assert engine.metrics(Samples(text)) is None


def test_a_share_stays_between_0_and_1() -> None:
    for written, read in (("1.7", 1.0), ("-3", 0.0), ("NaN", 0.0)):
        found = Vllm("m").metrics(Samples(told(VLLM, kv_cache_usage_perc=written)))
        assert found is not None
        assert found.kv_cache_usage == read


@pytest.mark.parametrize("blocks", ["9" * 19, "9" * 5000, "-1", "1e9", "None", ""])
def test_a_number_of_blocks_that_counts_nothing_is_unknown(blocks: str) -> None:
    idle = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    metrics = Vllm("m").metrics(Samples(f'{idle}vllm:cache_config_info{{num_gpu_blocks="{blocks}"}} 1'))
    assert metrics is not None
    assert metrics.num_blocks == 0
