"""A large array is passed between replicas in shared memory, about as fast as a copy."""

import statistics
import time
from pathlib import Path

import numpy as np

from pointsman.pipeline.graph import CALL
from pointsman.wire import CallHead, encode_call, files_of, placeholder, template
from tests.replica.replicas import Replica, replica

CODE = """
import time
import numpy
ARRAY = numpy.arange(10 * 1024 * 1024 // 8, dtype=float)

def make(factor): return ARRAY if factor == 1 else ARRAY * factor

class Reader:
    def __init__(self): self.kept = []
    def last(self, array): return float(array[-1])
    def keep(self, array): self.kept.append(array)
    def all_kept(self): return [float(array[-1]) for array in self.kept]
    def change(self, array): array[0] = 1
    def copy_s(self):
        times = []
        for _ in range(30):
            began = time.perf_counter()
            ARRAY.copy()
            times.append(time.perf_counter() - began)
        return sorted(times)[15]
"""
LAST = 10 * 1024 * 1024 // 8 - 1


def passed_on(blob: bytes, to: Replica, method: str) -> object:
    """Pass a value on as the gateway does: without decoding it, and with its memory removed afterwards."""
    body = encode_call(CallHead(method=method, args=template([placeholder(0)])), [blob])
    answer = to.fetch("POST", "/call", body)
    to.shared.remove(files_of(blob) or "")
    return answer.value(to.shared) if answer.status == 200 else answer.json()["message"]


def test_a_large_array_is_passed_between_replicas(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(CODE)
    with (
        replica(tmp_path, code="app.py:make", kind="function") as maker,
        replica(tmp_path, code="app.py:Reader") as reader,
    ):
        blob = maker.call(CALL, 1).body
        assert len(blob) < 1000
        assert (tmp_path / "shm" / (files_of(blob) or "")).stat().st_size >= 10 * 1024 * 1024
        assert passed_on(blob, reader, "last") == LAST
        assert "is gone" in str(passed_on(blob, reader, "last"))
        assert "read-only" in str(passed_on(maker.call(CALL, 1).body, reader, "change"))

        for factor in range(2, 8):  # kept arrays stay valid while further ones are allocated
            passed_on(maker.call(CALL, factor).body, reader, "keep")
            passed_on(maker.call(CALL, 9).body, reader, "last")
        assert reader.value("all_kept") == [float(LAST * factor) for factor in range(2, 8)]
        assert isinstance(maker.call(CALL, 1).value(maker.shared), np.ndarray)


def test_passing_an_array_takes_about_as_long_as_copying_it(tmp_path: Path) -> None:
    """Includes both calls over HTTP; the limit is generous because the machine may be busy."""
    (tmp_path / "app.py").write_text(CODE)
    with (
        replica(tmp_path, code="app.py:make", kind="function") as maker,
        replica(tmp_path, code="app.py:Reader") as reader,
    ):
        times = []
        for _ in range(40):
            began = time.perf_counter()
            blob = maker.call_again(CALL, 1).body
            sent = encode_call(CallHead(method="last", args=template([placeholder(0)])), [blob])
            assert reader.fetch("POST", "/call", sent).status == 200
            times.append(time.perf_counter() - began)
            maker.shared.remove(files_of(blob) or "")
        assert statistics.median(times) < 2 * reader.value("copy_s") + 0.01
