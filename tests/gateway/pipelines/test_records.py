"""Records of requests to applications."""

from pointsman.gateway.pipelines.records import PipelineRecord, PipelineRecords, StepRecord


def record(name: str = "r1") -> PipelineRecord:
    steps = [
        StepRecord("m1_output", "m1", f"{name}.m1_output", 10.0, 10.010, "diamond.m1-1", 1),
        StepRecord("m2_output", "m2", f"{name}.m2_output", 10.0, 10.020, "diamond.m2-1", 2),
        StepRecord("dag", "ensemble", f"{name}.dag", 10.020, 10.040, "diamond.ensemble-1", 1),
    ]
    return PipelineRecord(name, "diamond", "", 0, 50.0, 10.0, steps, 10.040, 200)


def test_a_record_prints_a_waterfall() -> None:
    assert str(record()) == (
        'request "r1" through diamond: served after 40.00 ms\n'
        "its deadline of 50 ms was met\n"
        "\n"
        "step       where               when                                        took\n"
        "---------  ------------------  ------------------------------------------  --------\n"
        "m1_output  diamond.m1-1        |██████████                              |  10.00 ms\n"
        "m2_output  diamond.m2-1        |████████████████████                    |  20.00 ms\n"
        "dag        diamond.ensemble-1  |                    ████████████████████|  20.00 ms"
    )


def test_records_of_running_requests_have_no_end() -> None:
    running = record()
    running.ended_at = running.status = None
    running.steps[2].ended_at = None
    assert running.state == "running"
    assert "running" in str(running).splitlines()[-1]
    assert running.as_dict()["steps"][2]["took_ms"] is None


def test_only_the_newest_records_are_kept() -> None:
    kept = PipelineRecords(2)
    for name in ("a", "b", "c"):
        kept.add(record(name))
    assert kept.get("a") is None
    assert [one.request_id for one in kept.newest()] == ["c", "b"]
