"""Predictions compared to the resident set of real llama.cpp servers."""

import re
from pathlib import Path

import pytest

from pointsman.engines import LlamaCpp
from pointsman.placement.estimate import estimate
from tests.simulator.servers import TINY, serving

pytest.importorskip("xllamacpp", reason="pip install 'pointsman[llamacpp]'")
if not Path("/proc/self/status").exists():
    pytest.skip("the resident set is read from /proc", allow_module_level=True)

SLOTS = 4
TOLERANCE = 0.12
"""The prediction is at most this far off, as a ratio; docs/estimate.md has the table."""


def resident_bytes(context: int) -> int:
    with serving(LlamaCpp(str(TINY), context_tokens=context, slots=SLOTS, prompt_cache_mib=0)) as server:
        assert server.fetch("/v1/completions", {"prompt": "def f", "max_tokens": 1}).status == 200
        status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_the_resident_set_is_about_as_predicted() -> None:
    measured = {context: resident_bytes(context) for context in (1024, 8192)}
    predicted = {context: estimate(TINY, context=context, concurrency=SLOTS).need.cpu_bytes for context in measured}
    for context, size in measured.items():
        assert predicted[context] / size == pytest.approx(1, abs=TOLERANCE), f"at context {context}"
    # What the longer context takes more is the KV cache and the mask, whatever the process takes by itself.
    assert (predicted[8192] - predicted[1024]) / (measured[8192] - measured[1024]) == pytest.approx(1, abs=TOLERANCE)
