"""The vLLM adapter against vLLM itself, if you have one: it takes a minute and three gigabytes, so only when asked.

POINTSMAN_VLLM_PYTHON=/env/bin/python POINTSMAN_VLLM_MODEL=/path/to/model pytest tests/engines/test_vllm.py
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pointsman.engines import Vllm
from tests.simulator.servers import MODEL, Served, until

PYTHON = os.environ.get("POINTSMAN_VLLM_PYTHON", "")
WEIGHTS = os.environ.get("POINTSMAN_VLLM_MODEL", "")
START_S = 300.0

pytestmark = pytest.mark.skipif(
    not (PYTHON and WEIGHTS), reason="POINTSMAN_VLLM_PYTHON and POINTSMAN_VLLM_MODEL say where"
)

ENGINE = Vllm(
    WEIGHTS,
    python=PYTHON,
    max_num_seqs=2,
    args=["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--block-size", "32"],
    env={
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = ENGINE.launch(MODEL, "127.0.0.1", port)
    environment = {name: value for name, value in (os.environ | launch.env).items() if value is not None}
    process = subprocess.Popen(launch.argv, env=environment, text=True, start_new_session=True)
    served = Served(process, port)
    deadline = time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline, "vLLM is not ready"
            with suppress(OSError):
                if served.probe(ENGINE.readiness(MODEL)).status == 200:
                    break
            time.sleep(0.2)
        yield served
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def test_it_is_healthy_and_has_the_name_that_clients_use(server: Served) -> None:
    assert server.probe(ENGINE.health).status == 200
    assert [model["id"] for model in server.fetch("/v1/models").json()["data"]] == [MODEL]


def test_its_metrics_show_running_and_waiting_requests(server: Served) -> None:
    idle = server.metrics(ENGINE)
    assert (idle.running_requests_size, idle.waiting_queue_size, idle.kv_cache_usage) == (0.0, 0.0, 0.0)
    assert idle.block_size > 0
    assert idle.num_blocks > 0
    long = {"model": MODEL, "prompt": "def f", "max_tokens": 400, "ignore_eos": True, "stream": True}
    clients = [server.send("/v1/completions", long) for _ in range(5)]

    def crowded() -> bool:
        found = server.metrics(ENGINE)
        return (found.running_requests_size, found.waiting_queue_size) == (2.0, 3.0) and found.kv_cache_usage > 0

    until(crowded)
    for client in clients:
        client.close()
    until(lambda: server.metrics(ENGINE).running_requests_size == 0)


def test_a_client_that_leaves_stops_its_answer(server: Served) -> None:
    long = {"model": MODEL, "prompt": "def f", "max_tokens": 450, "ignore_eos": True}
    for stream in (True, False):
        client = server.send("/v1/completions", long | {"stream": stream})
        until(lambda: server.metrics(ENGINE).running_requests_size == 1)
        client.close()
        until(lambda: server.metrics(ENGINE).running_requests_size == 0)
