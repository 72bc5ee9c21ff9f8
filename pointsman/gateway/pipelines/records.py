"""Records of pipeline requests, step by step. The newest records are kept."""

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from pointsman.reasons import Reason
from pointsman.render.text import text_table

BAR = 40
"""Width of the total time in a waterfall, in characters."""


class StepRecord(msgspec.Struct, eq=False):
    """One step; times are on the gateway's clock."""

    step: str
    node: str
    request_id: str
    """Id for lookups of the routing decision for the step."""
    began_at: float
    ended_at: float | None = None
    instance: str = ""
    tries: int = 0
    failure: Reason | None = None
    depth: int = 0
    """Number of calls through handles that lead from a step of the graph to this one."""

    def as_dict(self, since: float) -> dict[str, Any]:
        return {
            "step": self.step,
            "node": self.node,
            "request_id": self.request_id,
            "instance": self.instance,
            "tries": self.tries,
            "began_ms": round((self.began_at - since) * 1000, 3),
            "took_ms": None if self.ended_at is None else round((self.ended_at - self.began_at) * 1000, 3),
            **_failure(self.failure),
            "depth": self.depth,
        }


class PipelineRecord(msgspec.Struct, eq=False):
    request_id: str
    application: str
    tenant: str
    priority: int
    deadline_ms: float | None
    arrived_at: float
    steps: list[StepRecord]
    ended_at: float | None = None
    status: int | None = None
    """Status of the answer; None if there is none."""
    failure: Reason | None = None

    @property
    def state(self) -> str:
        """The state: running, served, failed or abandoned."""
        if self.ended_at is None:
            return "running"
        return "abandoned" if self.status is None else "served" if self.status == 200 else "failed"

    @property
    def took_ms(self) -> float | None:
        return None if self.ended_at is None else (self.ended_at - self.arrived_at) * 1000

    def summary(self) -> dict[str, Any]:
        """A summary, in the same form as the summary of a request to a model."""
        instances = {step.instance for step in self.steps if step.instance}
        return {
            "request_id": self.request_id,
            "model": self.application,
            "tenant": self.tenant,
            "priority": self.priority,
            "state": self.state,
            "status": self.status,
            "instance": instances.pop() if len(instances) == 1 else "",
            "tries": max((step.tries for step in self.steps), default=0),
            "total_ms": None if self.took_ms is None else round(self.took_ms, 3),
            "deadline_ms": self.deadline_ms,
            "cost": None,
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "application": self.application,
            "tenant": self.tenant,
            "priority": self.priority,
            "state": self.state,
            "status": self.status,
            "total_ms": None if self.took_ms is None else round(self.took_ms, 3),
            "deadline_ms": self.deadline_ms,
            **_failure(self.failure),
            "steps": [step.as_dict(self.arrived_at) for step in self.steps],
        }

    def __str__(self) -> str:
        took = "" if self.took_ms is None else f" after {self.took_ms:.2f} ms"
        lines = [f'request "{self.request_id}" through {self.application}: {self.state}{took}']
        if self.failure is not None:
            lines.append(str(self.failure))
        if self.deadline_ms is not None:
            met = self.status == 200 and (self.took_ms or 0.0) <= self.deadline_ms
            lines.append(f"its deadline of {self.deadline_ms:g} ms was {'met' if met else 'missed'}")
        return "\n".join([*lines, "", self._waterfall()])

    def _waterfall(self) -> str:
        ends = [step.ended_at for step in self.steps if step.ended_at is not None]
        end = max([*ends, self.ended_at or self.arrived_at])
        scale = BAR / max(end - self.arrived_at, 1e-9)
        rows = []
        for step in self.steps:
            start = min(round((step.began_at - self.arrived_at) * scale), BAR - 1)
            stop = min(max(round(((step.ended_at or end) - self.arrived_at) * scale), start + 1), BAR)
            took = "running" if step.ended_at is None else f"{(step.ended_at - step.began_at) * 1000:.2f} ms"
            bar = " " * start + "█" * (stop - start) + " " * (BAR - stop)
            name = "  " * step.depth + step.step
            rows.append(
                [
                    name,
                    step.instance or step.node,
                    f"|{bar}|",
                    took + ("" if step.failure is None else f": {step.failure}"),
                ]
            )
        return text_table(["step", "where", "when", "took"], rows)


def _failure(reason: Reason | None) -> dict[str, Any]:
    """The reason as text and as data. Without a reason, the text is empty, and the data is None."""
    return {"failure": "", "reason": None} if reason is None else {"failure": str(reason), "reason": reason.as_dict()}


class PipelineRecords:
    """The newest records, by request id."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_id: OrderedDict[str, PipelineRecord] = OrderedDict()

    def add(self, record: PipelineRecord) -> None:
        self._by_id[record.request_id] = record
        self._by_id.move_to_end(record.request_id)
        while len(self._by_id) > self.limit:
            self._by_id.popitem(last=False)

    def get(self, request_id: str) -> PipelineRecord | None:
        return self._by_id.get(request_id)

    def newest(self) -> list[PipelineRecord]:
        return list(reversed(self._by_id.values()))


class StepJournal:
    """Records the steps of one request. The steps of a call through a handle are recorded with the caller's steps."""

    def __init__(self, record: PipelineRecord, caller: "StepJournal | None" = None) -> None:
        self.record = record
        self.caller = caller
        self._depth: int = 0 if caller is None else caller._depth + 1
        self._steps: list[StepRecord] = record.steps if caller is None else caller._steps
        self._records: dict[int, StepRecord] = {}
        """Records of steps, by the index of the step."""
        self._children = 0

    def began(self, index: int, step: str, node: str, now: float) -> None:
        request_id = f"{self.record.request_id}.{step}"
        record = self._records[index] = StepRecord(step, node, request_id, now, depth=self._depth)
        self._steps.append(record)

    def sent(self, index: int, instance_id: str) -> None:
        record = self._records[index]
        record.instance, record.tries = instance_id, record.tries + 1

    def ended(self, index: int, now: float, failure: Reason | None = None) -> None:
        record = self._records.get(index)
        if record is not None and record.ended_at is None:
            record.ended_at, record.failure = now, failure

    def over(self, status: int | None) -> float:
        """Note that the request has ended. Returns its duration in seconds."""
        now = time.monotonic()
        self.record.ended_at, self.record.status = now, status
        return now - self.record.arrived_at

    # Calls through handles

    def child_of(self, step_id: str) -> str:
        """An id for a call that a step makes."""
        self._children += 1
        return f"{step_id}.{self._children}"

    def model_called(self, request_id: str, what: str) -> None:
        self._steps.append(StepRecord(what, "", request_id, time.monotonic(), depth=self._depth + 1))


# OpenTelemetry traces: one span for the request and one for each step. Spans are made from the record when a request
# has ended, so that they cost nothing before. They are made only if OpenTelemetry is installed (`pip install
# 'pointsman[otel]'`) and configured by its own environment variables.

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
Export = Callable[[PipelineRecord, str], None]
"""Called with (record, traceparent) for each request that has ended."""


def exporting() -> Export | None:
    """The export that the environment configures; None if it names no endpoint."""
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
        parents = {0: set_span_in_context(whole)}
        for step in record.steps:
            attributes = {
                "pointsman.node": step.node,
                "pointsman.instance": step.instance,
                "pointsman.tries": step.tries,
                "pointsman.request_id": step.request_id,
            }
            parent = parents.get(step.depth, parents[0])
            span = tracer.start_span(step.step, parent, SpanKind.CLIENT, attributes, start_time=at(step.began_at))
            parents[step.depth + 1] = set_span_in_context(span)
            if step.failure is not None:
                span.set_status(Status(StatusCode.ERROR, str(step.failure)))
            span.end(at(step.ended_at))
        if record.failure is not None:
            whole.set_status(Status(StatusCode.ERROR, str(record.failure)))
        whole.end(at(record.ended_at))

    return export
