"""The guarantees of docs/chaos.md, tested for 12 s; `python -m bench.chaos` runs for a minute."""

from pathlib import Path

from bench.chaos.clients import Verdict
from bench.chaos.run import Settings, run


def test_no_request_fails_while_one_instance_is_healthy(tmp_path: Path) -> None:
    outcome = run(Settings(seconds=12.0, seed=7, every_s=1.5, clients=10), tmp_path)
    print(f"\n{outcome}")
    assert outcome.violations() == []
    # Otherwise the run did not exercise enough.
    assert len({fault.kind for fault in outcome.injector.faults}) > 1
    served = [sample for sample in outcome.samples if sample.verdict is Verdict.SERVED]
    assert len(served) > 20
    assert {sample.request.stream for sample in served} == {True, False}
    assert outcome.failed_tries
