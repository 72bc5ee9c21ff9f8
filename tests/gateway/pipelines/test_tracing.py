"""Records of requests as OpenTelemetry spans."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pointsman.gateway.pipelines.records import ENDPOINTS, PipelineRecord, StepRecord, exporter_to, exporting
from pointsman.reasons import Reason

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_request_and_each_step_become_spans() -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    why = Reason("code-raised", {"type": "ValueError", "message": "no"})
    steps = [
        StepRecord("first", "m1", "r1.first", 10.0, 10.5, "app.m1-1", 1),
        StepRecord("forward", "m2", "r1.first.m2", 10.1, 10.2, "app.m2-1", 2, depth=1),
        StepRecord("last", "m3", "r1.last", 10.5, 11.0, "app.m3-1", 1, failure=why),
    ]
    failed = Reason("node-failed", {"node": "m3", "why": why})
    record = PipelineRecord("r1", "app", "team", 0, None, 10.0, steps, 11.0, 500, failed)
    exporter_to(provider)(record, f"00-{TRACE}-b7ad6b7169203331-01")
    spans = {span.name: span for span in kept.get_finished_spans()}
    assert set(spans) == {"app", "first", "forward", "last"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {TRACE}
    ids = {name: span.context.span_id for name, span in spans.items() if span.context}
    parents = {name: span.parent.span_id for name, span in spans.items() if span.parent}
    assert parents["first"] == parents["last"] == ids["app"]
    assert parents["forward"] == ids["first"]
    assert [spans[name].status.is_ok for name in ("app", "first", "last")] == [False, True, False]
    first = spans["first"]
    assert first.end_time is not None
    assert first.start_time is not None
    assert first.end_time - first.start_time == pytest.approx(0.5e9, abs=1000)
    assert dict(first.attributes or {})["pointsman.instance"] == "app.m1-1"


def test_traces_are_exported_only_to_a_configured_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert exporting() is None
