"""examples/ray_serve on a real cluster: urgent requests overtake the others, and missed deadlines add replicas."""

import pytest

from tests.integrations.ray_serve.conftest import Cluster, until

pytestmark = pytest.mark.ray


def test_deadlines_decide(cluster: Cluster) -> None:
    from examples.ray_serve import sla
    from pointsman.integrations.ray_serve import explain, status

    cluster.run(sla.application(), "summary")
    url = f"{cluster.url}/summary"

    def scaled() -> bool:
        sla.load(url, 5)
        records = status()["scaled"].get("summary/Summary", {"records": []})["records"]
        return any(one["after"] > one["before"] for one in records)

    until(scaled, "missed deadlines add replicas", 90)
    told = explain("r-0-0")
    assert told.data["strategy"] == "least-slack"
    assert told.data["deadline_ms"] == sla.DEADLINE_MS
    cluster.delete("summary")
