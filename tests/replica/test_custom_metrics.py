"""Custom metrics that code in a replica records."""

from pathlib import Path

from pointsman.engines import Samples
from pointsman.replica.server import MAX_METRICS, RecordedMetrics
from tests.replica.replicas import replica

CODE = """
import threading
import pointsman as pm

class Model:
    def __init__(self):
        pm.record_metric("made", 1)
        self.context = pm.current()
    def forward(self, frames):
        pm.record_metric("frames", frames)
        thread = threading.Thread(target=self.context.record_metric, args=("aside", frames * 2))
        thread.start()
        thread.join()
        return frames
    async def later(self, frames):
        pm.record_metric("frames", frames)
        return frames
"""


def test_a_replica_reports_the_last_value_of_each_metric(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(CODE)
    with replica(tmp_path, code="m.py:Model") as running:

        def recorded() -> dict[str, float]:
            answer = running.fetch("GET", "/metrics", secret="")
            assert (answer.status, answer.kind.partition(";")[0]) == (200, "text/plain")
            return dict(Samples(answer.body).labelled("pointsman_custom_metric", "name"))

        assert recorded() == {"made": 1.0}
        running.value("forward", 3)
        assert recorded() == {"made": 1.0, "frames": 3.0, "aside": 6.0}
        running.value("later", 8)
        assert recorded()["frames"] == 8.0


def test_metric_names_are_limited_in_number_and_escaped() -> None:
    metrics = RecordedMetrics()
    odd = 'a "quoted"\nname \\ {b}'
    for number in range(MAX_METRICS):
        metrics.record(f"m{number}", number)
    metrics.record("m0", -0.5)
    metrics.record(odd, 1e-9)
    recorded = dict(Samples(metrics.text()).labelled("pointsman_custom_metric", "name"))
    assert len(recorded) == MAX_METRICS
    assert "m1" not in recorded
    assert (recorded["m0"], recorded[odd]) == (-0.5, 1e-9)
