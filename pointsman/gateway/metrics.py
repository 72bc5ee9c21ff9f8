"""What the gateway counts, and the page `/metrics`. docs/metrics.md explains each metric."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pointsman.control import Controller, Desired, Phase
from pointsman.gateway.openai import Usage
from pointsman.routing.producers import PredictedLatencyProducer
from pointsman.routing.records import Histogram
from pointsman.routing.shadow import CandidateCounts
from pointsman.runtimes.interface import Unsaved
from pointsman.runtimes.traffic import Lane, prefix_producers
from pointsman.scaling.deployment import ScaledDeployment

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class DeploymentCounts:
    """Counts for one deployment; they only grow."""

    __slots__ = (
        "abandoned", "between_tokens", "broken_off", "cached_tokens", "first_token", "input_tokens", "output_tokens",
        "statuses", "total",
    )  # fmt: skip

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        """Answers by HTTP status."""
        self.total = Histogram(SECONDS)
        """Seconds from arrival to the end of the answer."""
        self.first_token = Histogram(SECONDS)
        """Seconds from arrival to the first event of a stream."""
        self.between_tokens = Histogram(TOKEN_SECONDS)
        """Seconds between two pieces of a stream."""
        self.abandoned = 0
        """Number of requests whose client disconnected."""
        self.broken_off = 0
        """Number of answers that ended with an error after they had begun."""
        self.cached_tokens = self.input_tokens = self.output_tokens = 0
        """Tokens, as counted by engines."""

    def used(self, usage: Usage) -> None:
        self.cached_tokens += usage.cached or 0
        self.input_tokens += usage.input or 0
        self.output_tokens += usage.output or 0

    def tokens(self) -> dict[str, int]:
        return {"cached": self.cached_tokens, "input": self.input_tokens, "output": self.output_tokens}


class GatewayMetrics:
    """The gateway's counts, by deployment."""

    def __init__(self) -> None:
        self._deployments: dict[str, DeploymentCounts] = {}
        self.unread: Counter[int] = Counter()
        """Number of requests that could not be read, by status."""
        self.limited: Counter[str] = Counter()
        """Number of requests that exceeded the limits of their tenant, by tenant."""
        self.sources: list[Callable[[Page], None]] = []
        """Functions that add metrics of other components to the page."""

    def of(self, deployment: str) -> DeploymentCounts:
        counts = self._deployments.get(deployment)
        if counts is None:
            counts = self._deployments[deployment] = DeploymentCounts()
        return counts

    def names(self) -> list[str]:
        """The deployments and applications that have counts."""
        return list(self._deployments)

    def totals(self, deployment: str) -> tuple[int, int, float, int]:
        """The number of answered requests, the number of errors, the total duration of ended requests in seconds, and
        the number of ended requests."""
        counts = self._deployments.get(deployment) or DeploymentCounts()
        failed = sum(number for status, number in counts.statuses.items() if status >= 500)
        answered = sum(counts.statuses.values())
        return answered, failed + counts.broken_off, counts.total.total, sum(counts.total.counts)

    def text(self, gateway: "Gateway") -> str:
        """The page, in the format of Prometheus."""
        page = Page()
        page.gauge(
            "connections", "Open client connections.", {(): sum(not client.is_local for client in gateway.clients)}
        )
        page.gauge("buffered_bytes", "Bytes of requests in memory.", {(): gateway.buffered.held})
        page.counter("unread_requests", "Requests that could not be read.", _labelled(self.unread, "status"))
        page.counter("limited_requests", "Requests beyond their tenant's limits.", _labelled(self.limited, "tenant"))
        page.counter(
            "closed_idle_connections", "Idle connections closed for new ones.", {(): gateway.clients.closed_idle}
        )
        page.histogram(
            "loop_delay_seconds", "How late the event loop was, sampled every 5 to 200 ms.", {(): gateway.turns.delay}
        )
        page.histogram(
            "loop_busy_seconds", "Processor time of the event loop while it was late.", {(): gateway.turns.busy}
        )
        self._requests(page)
        _decisions(page, gateway.traffic.lanes.values())
        _now(page, gateway.traffic.lanes.values())
        for add in self.sources:
            add(page)
        return page.text()

    def _requests(self, page: "Page") -> None:
        each = [((("deployment", name),), counts) for name, counts in sorted(self._deployments.items())]
        page.counter(
            "requests",
            "Requests answered, by HTTP status.",
            {(*one, ("status", str(status))): n for one, c in each for status, n in sorted(c.statuses.items())},
        )
        page.histogram("request_seconds", "Arrival to the end of the answer.", {one: c.total for one, c in each})
        page.histogram("first_token_seconds", "Arrival to the first event.", {one: c.first_token for one, c in each})
        page.histogram(
            "between_tokens_seconds", "Between two pieces of a stream.", {one: c.between_tokens for one, c in each}
        )
        page.counter("abandoned_requests", "Requests whose client disconnected.", {one: c.abandoned for one, c in each})
        page.counter(
            "broken_off_answers", "Answers that failed after they had begun.", {one: c.broken_off for one, c in each}
        )
        page.counter(
            "tokens",
            "Tokens as the engines counted them.",
            {(*one, ("kind", kind)): n for one, c in each for kind, n in c.tokens().items()},
        )


Labels = tuple[tuple[str, str], ...]


class Page:
    """A page in the format of Prometheus."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def counter(self, name: str, meaning: str, values: Mapping[Labels, float]) -> None:
        self._values(f"{name}_total", "counter", meaning, values)

    def gauge(self, name: str, meaning: str, values: Mapping[Labels, float]) -> None:
        self._values(name, "gauge", meaning, values)

    def histogram(self, name: str, meaning: str, values: Mapping[Labels, Histogram]) -> None:
        if values:
            self._head(name, "histogram", meaning)
        add = self._lines.append
        for labels, histogram in values.items():
            written = _written(labels)
            start = f'pointsman_{name}_bucket{{{written}{"," if written else ""}le="'
            count = 0
            for bound, more in zip(_bounds(histogram.bounds), histogram.counts, strict=True):
                count += more
                add(f'{start}{bound}"}} {count}')
            self._line(f"{name}_sum", labels, histogram.total)
            self._line(f"{name}_count", labels, count)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _values(self, name: str, kind: str, meaning: str, values: Mapping[Labels, float]) -> None:
        if values:
            self._head(name, kind, meaning)
        for labels, value in values.items():
            self._line(name, labels, value)

    def _head(self, name: str, kind: str, meaning: str) -> None:
        self._lines += [f"# HELP pointsman_{name} {meaning}", f"# TYPE pointsman_{name} {kind}"]

    def _line(self, name: str, labels: Labels, value: float) -> None:
        written = _written(labels)
        self._lines.append(f"pointsman_{name}{{{written}}} {value}" if written else f"pointsman_{name} {value}")


def _decisions(page: Page, lanes: Collection[Lane]) -> None:
    each = [((("deployment", lane.name),), lane) for lane in lanes]
    accounts = {
        (*one, ("strategy", strategy), ("instance_id", instance)): account
        for one, lane in each
        for (strategy, instance), account in sorted(lane.dispatcher.counters.accounts.items())
    }
    page.counter("decisions", "Requests sent, by strategy and instance.", {k: a.decisions for k, a in accounts.items()})
    page.histogram("queue_seconds", "Arrival to dispatch.", {k: a.waited_s for k, a in accounts.items() if a.decisions})
    deadlines = [(k, a) for k, a in accounts.items() if a.met + a.missed]
    page.counter(
        "deadlines",
        "Requests with a deadline that ended in time, or not.",
        {(*k, ("met", word)): n for k, a in deadlines for word, n in (("true", a.met), ("false", a.missed))},
    )
    counted = [(one, lane.dispatcher.counters) for one, lane in each]
    page.counter(
        "outcomes",
        "Requests by how they ended.",
        {(*one, ("outcome", what)): n for one, counters in counted for what, n in sorted(counters.outcomes.items())},
    )
    page.counter(
        "failed_tries",
        "Tries that failed; each was retried or refused.",
        {(*one, ("instance_id", who)): n for one, counters in counted for who, n in sorted(counters.retries.items())},
    )
    page.counter(
        "closed_instances",
        "Times that an instance got no requests for a time, because it was paused or ejected.",
        {
            (*one, ("instance_id", who), ("why", why)): n
            for one, counters in counted
            for (who, why), n in sorted(counters.closed.items())
        },
    )
    page.counter(
        "policy_errors",
        "Exceptions and broken promises of policies and plugins.",
        {
            one: sum(counters.policy_errors.values()) + sum(counters.broken_promises.values())
            for one, counters in counted
        },
    )
    page.counter(
        "user_code_failures",
        "Calls of users' policies and plugins that were slow, were interrupted, or raised.",
        _user_code_failures(lanes),
    )
    _shadows(page, lanes)
    prefixes = [(one, producer) for one, lane in each for producer in prefix_producers(lane)]
    page.counter(
        "prefix_tokens",
        "Prompt tokens sent, and how many of them were expected in the instance's cache.",
        {
            (*one, ("kind", kind)): n
            for one, producer in prefixes
            for kind, n in (("prompt", producer.prompt_tokens), ("expected_cached", producer.expected_cached_tokens))
        },
    )
    page.counter(
        "prefix_index_dropped",
        "Blocks dropped from the prefix index because its memory is used up.",
        {one: producer.index.memory.dropped for one, producer in prefixes},
    )
    page.gauge(
        "prefix_index_bytes",
        "Memory of the prefix index.",
        {one: producer.index.memory.used_bytes for one, producer in prefixes},
    )
    _predictions(page, each)


def _predictions(page: Page, lanes: Iterable[tuple[Labels, Lane]]) -> None:
    """Add the errors of predicted latencies."""
    errors = [
        (one, plugin.errors.sums)
        for one, lane in lanes
        for plugin in lane.dispatcher.plugins
        if isinstance(plugin, PredictedLatencyProducer)
    ]
    counters = {
        "predictions": "Latencies that were predicted and then measured.",
        "predicted_seconds": "Sum of latencies predicted.",
        "predicted_actual_seconds": "Sum of the same latencies as measured.",
        "prediction_error_seconds": "Sum of the absolute differences.",
    }
    for index, (name, text) in enumerate(counters.items()):
        scale = 1.0 if index == 0 else 1e-3
        found = {(*one, ("kind", kind)): sums[index] * scale for one, both in errors for kind, sums in both.items()}
        page.counter(name, text, found)


def _shadows(page: Page, lanes: Iterable[Lane]) -> None:
    """Add the metrics of candidates. If no deployment has a candidate, add nothing."""
    told = [(lane.name, lane.watcher.shadow.told()) for lane in lanes if lane.watcher is not None]
    if not told:
        return
    each: list[tuple[Labels, CandidateCounts]] = [
        ((("deployment", name), ("candidate", one.name)), one) for name, counts in told for one in counts.candidates
    ]
    results: dict[Labels, float] = {
        (*labels, ("result", result)): float(count)
        for labels, one in each
        for result, count in (
            ("agreed", one.agreed),
            ("differed", one.decided - one.agreed),
            ("unplaced", one.unplaced),
            ("failed", one.errors),
        )
    }
    page.counter("shadow_decisions", "Decisions of candidates about sampled requests.", results)
    sampled: dict[Labels, float] = {(("deployment", name),): float(counts.sampled) for name, counts in told}
    page.counter("shadow_sampled", "Decisions that were sampled for candidates.", sampled)
    page.counter("shadow_seconds", "Time that candidates took.", {labels: one.seconds for labels, one in each})
    suspended = {labels: float(one.suspended_s is not None) for labels, one in each}
    page.gauge("shadow_suspended", "Whether a candidate is suspended.", suspended)


def _user_code_failures(lanes: Iterable[Lane]) -> dict[Labels, float]:
    found: Counter[Labels] = Counter()
    for lane in lanes:
        for member in () if lane.containment is None else lane.containment.members:
            for cause, count in member.causes.items():
                why = cause.removeprefix("policy-")
                found[("deployment", lane.name), ("policy", member.policy), ("why", why)] += count
    return {labels: float(count) for labels, count in found.items()}


def _now(page: Page, lanes: Collection[Lane]) -> None:
    each = [((("deployment", lane.name),), lane.dispatcher) for lane in lanes]
    page.gauge("waiting_requests", "Requests that wait for an instance.", {o: len(d) - d.running for o, d in each})
    page.gauge("running_requests", "Requests on an instance.", {o: d.running for o, d in each})
    page.gauge("instances", "Instances in service.", {o: len(d.fleet) for o, d in each})


def _labelled(counter: Mapping[int, int] | Mapping[str, int], label: str) -> dict[Labels, float]:
    return {((label, str(value)),): count for value, count in sorted(counter.items(), key=lambda one: str(one[0]))}


@lru_cache(65_536)
def _written(labels: Labels) -> str:
    """Labels in the format of the page. They are cached, because they are the same on each page."""
    return ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)


@lru_cache
def _bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, bounds), "+Inf")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def scaling_metrics(page: Page, scaled: Iterable[ScaledDeployment]) -> None:
    each = [((("deployment", one.name), ("policy", one.policy_name)), one) for one in scaled]
    page.gauge("scaling_target", "Target number of instances.", {labels: one.target for labels, one in each})
    page.gauge(
        "scaling_wanted",
        "Instances that the policy wants, before limits and delays.",
        {labels: one.wanted for labels, one in each if one.wanted is not None},
    )
    page.counter("scaling_changes", "Changes of the target.", {labels: one.changes for labels, one in each})
    page.counter(
        "scaling_policy_errors",
        "Times that a scaling policy raised, was too slow, or returned an invalid number.",
        {labels: one.errors for labels, one in each},
    )


def instance_metrics(
    page: Page, controller: Controller, phases: Mapping[tuple[str, str, str], int], release: str
) -> None:
    """Add the controller's instances, and the phases that they have entered, as `EventLog` counts them.

    `release` is the version of Pointsman.
    """
    desired, instances = (controller.desired or Desired()).deployments, controller.instances()
    each: list[tuple[Labels, str]] = [((("deployment", name),), name) for name in desired]
    now = Counter((one.deployment, one.phase) for one in instances)
    unplaced = Counter(one.deployment for one in instances if one.unplaced)
    wanted = {name: one.replicas + len(one.endpoints) for name, one in desired.items()}
    page.gauge("replicas_desired", "Instances that should run.", {labels: wanted[name] for labels, name in each})
    page.gauge("replicas_unplaced", "Instances without a place.", {labels: unplaced[name] for labels, name in each})
    page.gauge(
        "replicas",
        "Instances by phase.",
        {(*labels, ("phase", phase.value)): now[name, phase] for labels, name in each for phase in Phase},
    )
    page.counter(
        "instance_phases",
        "Phases that instances have entered, and why.",
        {
            (("deployment", deployment), ("phase", phase or "gone"), ("cause", cause)): count
            for (deployment, phase, cause), count in sorted(phases.items())
        },
    )
    page.gauge("build_info", "The version of Pointsman, which is a label.", {(("version", release),): 1})


def tenant_metrics(page: Page, reports: Iterable[Mapping[str, Any]]) -> None:
    """Add the usage and the limits of tenants; see `Tenant.report`."""
    each = [((("tenant", one["name"]),), one) for one in reports]

    def kinds(**fields: str) -> dict[Labels, float]:
        """For each tenant and kind, the value of the report's field. Kinds for which the tenant has no limit are left
        out."""
        named = [((*who, ("kind", kind)), one[field]) for who, one in each for kind, field in fields.items()]
        return {labels: value for labels, value in named if value is not None}

    page.gauge(
        "tenant_cost",
        "Cost of the current period: spent, reserved for requests in flight, and the budget.",
        kinds(spent="spent", reserved="reserved", budget="budget"),
    )
    page.gauge(
        "tenant_period_end_seconds",
        "Unix time when the current period ends.",
        {who: one["period_ends"] for who, one in each if one["budget"] is not None and one["period_ends"] is not None},
    )
    page.gauge(
        "tenant_tokens",
        "Tokens that a tenant has left, has reserved for requests in flight, and gets per minute.",
        kinds(left="tokens_left", reserved="tokens_reserved", per_minute="tokens_per_minute"),
    )
    page.gauge(
        "tenant_requests",
        "Requests that a tenant has left, and gets per minute.",
        kinds(left="requests_left", per_minute="requests_per_minute"),
    )


# One page of several


ONCE = ("pointsman_instances", "pointsman_prefix_index_bytes", "pointsman_build_info")
"""Gauges that describe the same thing at every gateway. The merged page shows the largest value."""


def merged(pages: Iterable[str]) -> str:
    """Several pages merged into one. Each sample is the sum of its values; samples keep the order in which they first
    occur."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                heads.setdefault(family, [])
                if line not in heads[family]:
                    heads[family].append(line)
            elif line:
                name, _, number = line.rpartition(" ")
                values = samples.setdefault(family, {})
                value = float(number) if "." in number or "e" in number or "n" in number else int(number)
                known = values.get(name, 0)
                values[name] = max(known, value) if family in ONCE else known + value
    lines = [
        line
        for family, head in heads.items()
        for line in (*head, *(f"{name} {value}" for name, value in samples.get(family, {}).items()))
    ]
    return "\n".join([*lines, ""])


def counters_of(page: str) -> str:
    """The counters of a page."""
    kept, grows = [], False
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            grows = line.rsplit(" ", 1)[1] != "gauge"
        kept.append((line, grows or line.startswith("# ")))
    families = {line.split(" ")[2] for line, _ in kept if line.startswith("# TYPE ") and line.endswith(" gauge")}
    return "\n".join(
        [line for line, stays in kept if stays and not (line.startswith("# ") and line.split(" ")[2] in families)]
        + [""]
    )


def fault_metrics(page: Page, failures: Mapping[str, int], unsaved: Unsaved) -> None:
    page.gauge("unsaved_changes", "Changes that wait to be stored.", {(): unsaved.changes})
    page.counter("store_failures", "Failed attempts to store changes.", {(): unsaved.failures})
    page.counter(
        "background_failures",
        "Failures of background tasks; each was started again.",
        _labelled(failures, "task"),
    )
