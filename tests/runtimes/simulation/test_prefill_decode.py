"""Prompts that are read on one engine and answered on another."""

from collections import Counter

import pytest

from pointsman.config.revision import ManifestText
from pointsman.runtimes.simulation.engines import KvTransfer
from pointsman.runtimes.simulation.simulation import SimulatedArrival, Simulation
from pointsman.simulator.performance import hardware
from pointsman.types import RequestMetadata
from tests.runtimes.simulation.test_simulation import ends

SPLIT = """
deployments:
  - name: chat
    model: chat
    endpoints:
    - {url: "http://10.0.0.1:8000", engine: vllm, labels: {llm-d.ai/role: prefill}}
    - {url: "http://10.0.0.2:8000", engine: vllm, labels: {llm-d.ai/role: decode}}
    scheduling:
      config:
        plugins:
        - {type: disagg-headers-handler}
        - {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
        - {type: always-disagg-pd-decider}
        - {type: prefill-filter}
        - {type: decode-filter}
        - {type: active-request-scorer}
        schedulingProfiles:
        - {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: active-request-scorer}]}
        - {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: active-request-scorer}]}
"""
H100 = hardware("8B|h100_sxm|vllm|tp1")
TRANSFER = KvTransfer(base_s=0.5, token_s=0.001)


def arrival(name: str, tokens: int = 1000, output: int = 10, at: float = 5.0) -> SimulatedArrival:
    request = RequestMetadata(name, model_name="chat", prompt_tokens=tokens, arrival_time=at, timeout_s=60.0)
    return SimulatedArrival(at, request, output)


def test_the_answer_begins_when_the_kv_has_arrived() -> None:
    simulation = Simulation(ManifestText(SPLIT, "/"), transfer=TRANSFER)
    simulation.play([arrival("r")])
    assert simulation.run(60.0)
    sent, first, served = simulation.log
    assert len({sent.where, first.where, served.where}) == 1, "where it is answered"
    read_s = H100.step_ms(1000, 1000 * 500.0, 0, 0) / 1000
    last_token_s = H100.step_ms(1, 1 * (999 + 0.5), 0, 0) / 1000
    assert first.at - sent.at == pytest.approx(read_s + 0.5 + 1.0 + last_token_s)
    assert len(simulation.engines.each) == 2


def test_every_request_ends_once_and_nothing_is_left() -> None:
    simulation = Simulation(ManifestText(SPLIT, "/"))
    simulation.play([arrival(f"r{number}", 100 + 37 * number, 5 + number, 5.0 + number / 20) for number in range(60)])
    assert simulation.run(120.0)
    assert ends(simulation.log) == Counter({f"r{number}": 1 for number in range(60)})
    assert Counter(entry.what for entry in simulation.log) == {"sent": 60, "first-token": 60, "served": 60}
    assert all(not engine.requests and not engine.pace.kv_usage for engine in simulation.engines.each.values())
