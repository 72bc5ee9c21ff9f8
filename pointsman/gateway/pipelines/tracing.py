"""Requests through applications as OpenTelemetry traces: a span for the request and one for each step.

Only where OpenTelemetry is installed (`pip install 'pointsman[otel]'`) and told where to send them, as every program
with it is: OTEL_EXPORTER_OTLP_ENDPOINT and its kin. Spans are made when a request has ended, from its record, so that
they cost nothing on its way. A client's `traceparent` is taken up.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from pointsman.gateway.pipelines.records import PipelineRecord

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
Export = Callable[[PipelineRecord, str], None]
"""(record, traceparent) of a request that has ended."""


def exporting() -> Export | None:
    """Where traces go, as the environment says; None: nowhere."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": "pointsman"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return exporter_to(provider)


def exporter_to(provider: Any) -> Export:
    """Traces by this provider."""
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer, propagator = provider.get_tracer("pointsman"), TraceContextTextMapPropagator()

    def export(record: PipelineRecord, traceparent: str) -> None:
        to_epoch = time.time_ns() - time.monotonic_ns()

        def at(moment: float | None) -> int:
            return int((moment if moment is not None else time.monotonic()) * 1e9) + to_epoch

        before = propagator.extract({"traceparent": traceparent}) if traceparent else None
        whole = tracer.start_span(
            record.application,
            before,
            SpanKind.SERVER,
            {"pointsman.request_id": record.request_id, "pointsman.tenant": record.tenant},
            start_time=at(record.arrived_at),
        )
        above = {0: set_span_in_context(whole)}
        for step in record.steps:
            told = {"pointsman.node": step.node, "pointsman.instance": step.instance, "pointsman.tries": step.tries}
            told["pointsman.request_id"] = step.request_id
            inside = above.get(step.depth, above[0])
            span = tracer.start_span(step.step, inside, SpanKind.CLIENT, told, start_time=at(step.began_at))
            above[step.depth + 1] = set_span_in_context(span)
            if step.failure:
                span.set_status(Status(StatusCode.ERROR, step.failure))
            span.end(at(step.ended_at))
        if record.failure:
            whole.set_status(Status(StatusCode.ERROR, record.failure))
        whole.end(at(record.ended_at))

    return export
