"""The status of a plane as text: what runs, its state, and what is wrong.

Enters: JSON from the admin API. Leaves: text. `up` shows the text live, `status` shows it once. Times are local.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO, TypeAlias

from pointsman.errors import command
from pointsman.render.sentences import codes, detail, sentence, shortened
from pointsman.render.text import gib, one_line, text_table

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "grey": "90"}
_STATES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "unhealthy": "red",
    "ejected": "red",
    "backing off": "red",
}
MAX_FACT = 90
"""Maximum number of characters that a table shows of each text in a reason's facts, such as the output of a server."""
MAX_FACT_OF_FINAL = 1000
"""The same limit for an instance that was given up. It is larger because the output says what to correct."""
MAX_CHANGE = 200
"""Maximum number of characters that a table shows of a change of the target."""


class Paint:
    """Colours a text if the output is a terminal that supports colours."""

    def __init__(self, out: TextIO | None = None) -> None:
        is_terminal = out is not None and out.isatty()
        self._on = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str, colour: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self._on else text


NO_PAINT = Paint()


class InstanceRow:
    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self.name: str = data["id"]
        self.phase: str = data["phase"]
        self.reason: str = data["reason"]
        self._cause: Mapping[str, Any] = data.get("cause") or {"code": "", "facts": {}}
        self.given_up: bool = data.get("halted", False) or data.get("final", False)
        self.unplaced: bool = data.get("unplaced", False)
        self.restarts: int = data.get("restarts", 0)

    @property
    def state(self) -> str:
        if self.given_up:
            return "given up"
        if self.phase == "backing off":
            return "waiting for a place" if self.unplaced else "waiting to restart"
        until_s, paused_s = self._data.get("until_s"), self._data.get("paused_s")
        if self.phase == "ejected" and until_s is not None:
            return f"ejected, {duration(until_s)} left"
        silence = self._data.get("silence")
        if silence is not None:
            return f"{self.phase}, silent: {detail(silence['code'], silence['facts'])}"
        return self.phase if paused_s is None else f"{self.phase}, paused for {duration(paused_s)}"

    @property
    def short_reason(self) -> str:
        """The reason on one line, with long facts shortened. --json shows the whole reason."""
        code, facts = self._cause["code"], self._facts(MAX_FACT)
        return detail(code, facts) if code == "no-place" else sentence(code, facts)

    def _facts(self, limit: int) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = shortened(self._cause["facts"], limit)
        return facts

    def in_words(self) -> str:
        """The state of the instance and the reason. The reason is left out if it only says that it is not ready yet."""
        shown = self.reason and self._cause["code"] != "not-ready-yet"
        whole = sentence(self._cause["code"], self._facts(MAX_FACT_OF_FINAL))
        reason = whole if self.given_up else self.short_reason
        return f"{self.name} is {self.state}{f' ({reason})' if shown else ''}"

    @property
    def condition(self) -> tuple[str, ...]:
        """The state and the codes of the reason, without figures that change all the time, such as free memory."""
        flags = ("given up" if self.given_up else "", "unplaced" if self.unplaced else "")
        return (self.name, self.phase, *flags, str(self.restarts), *codes(self._cause))

    def row(self) -> list[str]:
        data = self._data
        limit, usage = data["max_concurrency"], data["kv_cache_usage"]
        rate, cost = data.get("tokens_per_second"), data.get("cost_per_million_tokens")
        return [
            self.name,
            self.state,
            data["url"],
            data["process"] or "",
            f"{data['in_flight']} of {limit}" if limit else str(data["in_flight"]),
            "" if usage is None else f"{usage:.0%}",
            "" if rate is None else f"{rate:.3g}",
            "" if cost is None else f"{cost:.3g}",
            str(data["restarts"] or ""),
            duration(data["since_s"]),
            self.short_reason,
        ]


INSTANCE_HEADS = (
    "instance", "state", "at", "pid", "requests", "cache", "tokens/s", "cost/1M", "restarts", "for", "reason"
)  # fmt: skip


Condition: TypeAlias = tuple[int, int, tuple[tuple[str, ...], ...]]
"""Number of ready instances, number of wanted instances, and the condition of each instance that is not ready."""

MAX_STARTS = 3
"""After this many failed starts, an instance is unlikely to start."""


class DeploymentRow:
    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self.name: str = data["name"]
        self.instances = [InstanceRow(one) for one in data["instances"]]
        self.ready: int = data["ready"]
        self.wanted: int = data["desired"]
        self.internal: bool = data.get("internal", False)
        config = data.get("user_config") or {}
        self.awaited: int = config.get("awaited", 0)
        """Number of replicas that do not have their user config yet."""
        self.refused: list[str] = [one["text"] for one in config.get("problems") or ()]
        """Errors from replicas that refused their user config."""

    @property
    def stopped(self) -> str:
        """Why an instance was given up, or why replicas refused a user config. Empty if neither happened."""
        refused = "; ".join(self.refused) if not self.awaited else ""
        return next((one.reason for one in self.instances if one.given_up), refused)

    @property
    def failing(self) -> "InstanceRow | None":
        """An instance that has failed to start `MAX_STARTS` times. None if no instance has, or if one is ready."""
        tried = (one for one in self.instances if not one.given_up and one.restarts >= MAX_STARTS)
        return None if self.ready else next(tried, None)

    @property
    def settled(self) -> bool:
        """Whether all desired instances are ready and configured, and there are no further instances."""
        return self.ready == self.wanted == len(self.instances) and not self.awaited and not self.refused

    def in_words(self) -> str:
        """The number of ready instances, and the state of each instance that is not ready."""
        others = [one.in_words() for one in self.instances if one.phase != "ready"]
        return "; ".join([f"{self.ready} of {self.wanted} ready", *others])

    @property
    def condition(self) -> "Condition":
        """The content of `in_words` as data. It changes only when there is something to report."""
        others = tuple(one.condition for one in self.instances if one.phase != "ready")
        return self.ready, self.wanted, others

    def row(self) -> list[str]:
        data = self._data
        model = "" if data["model"] == self.name and self.internal else data["model"]
        names = ", ".join(filter(None, [model, *data["aliases"]]))
        load = [str(data["waiting"]), str(data["running"])]
        return [self.name, names, f"{self.ready} of {self.wanted}", *load, data["strategy"]]

    def node_row(self) -> list[str]:
        data = self._data
        counts = [str(data[name]) for name in ("waiting", "running")]
        counts += [str(data.get(name) or 0) for name in ("answered", "errors")]
        return [f"{self.ready} of {self.wanted}", *counts, milliseconds(data.get("mean_ms"))]


WORKER_HEADS = ("worker", "state", "cpus", "gpus", "memory", "instances", "labels")
APPLICATION_HEADS = ("application", "at", "nodes", "ready")
NODE_HEADS = ("node", "kind", "ready", "waiting", "running", "answered", "errors", "mean")
GATEWAY_HEADS = ("gateway", "state", "pid", "connections", "in flight", "requests", "restarts")
TENANT_HEADS = ("tenant", "in flight", "spent", "reserved", "budget", "until", "tokens left", "requests left")
DEPLOYMENT_HEADS = ("deployment", "model", "ready", "waiting", "running", "decided by")


def deployments_of(status: Mapping[str, Any]) -> list[DeploymentRow]:
    return [DeploymentRow(one) for one in status.get("deployments") or ()]


def status_text(status: Mapping[str, Any], paint: Paint = NO_PAINT) -> str:
    deployments = deployments_of(status)
    lines = [_headline(status, deployments, paint), ""]
    if deployments:
        lines.append(text_table(DEPLOYMENT_HEADS, [one.row() for one in deployments]))
    else:
        lines.append(f"no deployments; add some with: {command('apply', 'FILE')}")
    applications = [_application_row(one, deployments) for one in status.get("applications") or ()]
    if applications:
        lines += ["", text_table(APPLICATION_HEADS, applications)]
    scaled = scaling_table(status.get("deployments") or ())
    if scaled:
        lines += ["", scaled]
    tenants = [_tenant_row(one) for one in status.get("tenants") or () if _is_limited(one)]
    if tenants:
        lines += ["", text_table(TENANT_HEADS, tenants)]
    gateways = [_gateway_row(one) for one in status.get("gateways") or ()]
    if gateways:
        lines += ["", text_table(GATEWAY_HEADS, gateways)]
    lines += [line for one in status.get("promotions") or () for line in ("", promotion_text(one))]
    instances = [one for deployment in deployments for one in deployment.instances]
    if instances:
        lines += ["", _instance_table(instances, paint)]
    workers = [_worker_row(one) for one in status.get("workers") or ()]
    if workers:
        lines += ["", text_table(WORKER_HEADS, workers)]
    problems = [paint(f"problem: {one['text']}", "red") for one in status["problems"]]
    return "\n".join([*lines, *([""] if problems else []), *problems])


def promotion_text(one: Mapping[str, Any]) -> str:
    """A promotion on one line: its state, the reason, and the share of requests that the candidate decided about."""
    shares, changes = one["shares"], one["changes"]
    told = ", ".join(f"{name} {change:+.1%}" for name, change in changes.items() if change is not None)
    counts = f"{shares['candidate']['requests']} of {shares['in_force']['requests'] + shares['candidate']['requests']}"
    state = f"running for {one['elapsed_s']:g} of {one['for_s']:g} s" if one["state"] == "running" else one["state"]
    why = "" if one["why"] is None else f": {one['why']['text']}"
    return (
        f"promotion {one['run']} of {one['candidate']} in {one['deployment']} ({one['canary']:.0%} canary, if "
        f"{one['condition']}): {state}{why}; it decided about {counts} requests{f' ({told})' if told else ''}"
    )


def _worker_row(worker: Mapping[str, Any]) -> list[str]:
    state = "ready" if worker["answers"] else "silent"
    figures = [f"{worker[name]:g}" if name in worker else "" for name in ("cpus", "gpus")]
    memory = gib(worker["memory_bytes"]) if "memory_bytes" in worker else ""
    labels = ", ".join(f"{name}={value}" for name, value in worker.get("labels", {}).items())
    return [worker["name"], state, *figures, memory, str(worker["instances"]), labels]


def _gateway_row(one: Mapping[str, Any]) -> list[str]:
    state = ("listens" if one["url"] else "starting") if one["connected"] else "lost"
    figures = [one[name] for name in ("pid", "connections", "in_flight", "requests", "restarts")]
    return [one["name"], state, *("" if figure is None else str(figure) for figure in figures)]


def _is_limited(tenant: Mapping[str, Any]) -> bool:
    return any(tenant[limit] is not None for limit in ("budget", "tokens_per_minute", "requests_per_minute"))


def _tenant_row(tenant: Mapping[str, Any]) -> list[str]:
    def figure(name: str) -> str:
        return "" if tenant[name] is None else f"{tenant[name]:.6g}"

    def left(name: str) -> str:
        return (
            "" if tenant[f"{name}_left"] is None else f"{tenant[f'{name}_left']:.0f} of {figure(f'{name}_per_minute')}"
        )

    ends = None if tenant["budget"] is None else tenant["period_ends"]
    until = "" if ends is None else datetime.fromtimestamp(ends).strftime("%Y-%m-%d %H:%M")
    costs = [figure("spent"), figure("reserved"), figure("budget"), until]
    return [tenant["name"], str(tenant["in_flight"]), *costs, left("tokens"), left("requests")]


def application_text(data: Mapping[str, Any], paint: Paint = NO_PAINT) -> str:
    by_name = {one.name: one for one in deployments_of(data)}
    rows = []
    for node in data["nodes"]:
        for name in node["deployments"]:
            deployment = by_name.get(name)
            cells = deployment.node_row() if deployment is not None else ["missing", "", "", "", "", ""]
            rows.append([node["name"], node["kind"], *cells])
    lines = [f"application {data['name']} at {data['path']}", "", text_table(NODE_HEADS, rows)]
    scaled = scaling_table(data.get("deployments") or ())
    if scaled:
        lines += ["", scaled]
    instances = [one for deployment in by_name.values() for one in deployment.instances]
    if instances:
        lines += ["", _instance_table(instances, paint)]
    stopped = [f"{one.name}: {one.stopped}" for one in by_name.values() if one.stopped]
    return "\n".join([*lines, *([""] if stopped else []), *stopped])


def _application_row(data: Mapping[str, Any], deployments: Sequence[DeploymentRow]) -> list[str]:
    named = {name for node in data["nodes"] for name in node["deployments"]}
    mine = [one for one in deployments if one.name in named]
    ready = f"{sum(one.ready for one in mine)} of {sum(one.wanted for one in mine)}"
    return [data["name"], data["path"], ", ".join(node["name"] for node in data["nodes"]), ready]


SCALING_HEADS = ("scaled", "target", "of", "by", "last change")


def scaling_table(deployments: Sequence[Mapping[str, Any]]) -> str:
    """A table of the scaled deployments. Empty if there are none."""
    rows = []
    for one in deployments:
        scaling = one.get("scaling")
        if scaling:
            order, policy = scaling["override"], scaling["policy"]
            by = policy if order is None else f"order of {order['by']}, not {policy}"
            last = one_line(change_text(scaling["last"]), MAX_CHANGE)
            rows.append([one["name"], str(scaling["desired"]), bounds(scaling), by, last])
    return text_table(SCALING_HEADS, rows) if rows else ""


def bounds(scaling: Mapping[str, Any]) -> str:
    return f"{scaling['min']} to {scaling['max']}"


def _headline(status: Mapping[str, Any], deployments: Sequence[DeploymentRow], paint: Paint) -> str:
    settled = all(one.settled for one in deployments)
    partly = "partly ready" if status["ready"] else "not ready"
    state = paint("ready", "green") if settled else paint(partly, "yellow")
    parts = [f"plane {state}", f"up for {duration(status['uptime_s'])}", f"generation {status['generation']}"]
    if status.get("url"):
        parts.append(f"requests to {status['url']}")
    return ", ".join(parts)


def _instance_table(instances: Sequence[InstanceRow], paint: Paint) -> str:
    rows = [one.row() for one in instances]
    heads = [*INSTANCE_HEADS]
    for name in ("cost/1M", "tokens/s"):  # leave out empty columns; tokens/s stays if cost/1M does
        at = heads.index(name)
        if not any(row[heads.index("cost/1M") if "cost/1M" in heads else at] for row in rows):
            del heads[at]
            rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    head, rule, *lines = text_table(heads, rows).split("\n")
    start = head.index("state")
    painted = []
    for line, one in zip(lines, instances, strict=True):
        end = start + len(one.state)
        painted.append(line[:start] + paint(line[start:end], _STATES.get(one.phase, "grey")) + line[end:])
    return "\n".join([head, rule.rstrip(), *painted])


def clock(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"


def reason_text(reason: Mapping[str, Any]) -> str:
    """The text of a reason that came as JSON. A time in the reason is shown in local time."""
    facts = reason["facts"]
    if not facts.get("until"):
        return str(reason["text"])
    return sentence(reason["code"], {**facts, "until": clock(datetime.fromisoformat(facts["until"]).timestamp())})


def duration(seconds: float | None) -> str:
    """A duration in short form, such as 300ms, 4s, 3m, 2h or 5d. Empty if it is unknown."""
    if seconds is None:
        return ""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def milliseconds(value: float | None) -> str:
    """A time in short form, such as 12 ms or 3.4 s. Empty if it is unknown."""
    if value is None:
        return ""
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.1f} s"


MAX_RECORDS = 20
"""Maximum number of changes that are shown: the newest ones. --json shows all changes."""


def scaling_text(data: Mapping[str, Any]) -> str:
    """The scaling of one deployment: the current target, then the newest changes, from the oldest to the newest."""
    lines = [headline(data), f"now {data['ongoing']:g} requests on instances, {data['queued']:g} waiting"]
    if data["problem"]:
        lines.append(f"problem: {data['policy']} {data['problem']}")
    if data["trouble"]:
        lines.append(f"problem: {data['trouble']}")
    records = data["records"][-MAX_RECORDS:]
    if not records:
        return "\n".join([*lines, "", "nothing has changed yet"])
    return "\n".join([*lines, "", *(line for record in records for line in record_lines(record))])


def headline(data: Mapping[str, Any]) -> str:
    """The target, the policy or order that set it, and the numbers of instances."""
    policy, order, unplaced = data["policy"], data["override"], data["unplaced"]
    coming = data["starting"] - unplaced  # instances without a place count as starting
    there = [
        f"{data['ready']} ready",
        f"{coming} starting" if coming else "",
        f"{unplaced} without a place" if unplaced else "",
    ]
    other = "" if data["wanted"] in (None, data["desired"]) else f" wants {data['wanted']}"
    if order is None:
        by = f"decided by {policy}" + (f", which{other}" if other else "")
    else:
        until = "until it is released" if order["for_s"] is None else f"for another {duration(order['for_s'])}"
        by = f"{order['replicas']} ordered by {order['by']} {until}" + (f"; {policy}{other}" if other else "")
    return f"{data['deployment']}: target {data['desired']} ({bounds(data)}), {by}; {', '.join(filter(None, there))}"


def change_text(record: Mapping[str, Any] | None) -> str:
    """One change of the target on one line. Empty if there was no change."""
    if record is None:
        return ""
    parts = [_why(record), *record["bounded"]]
    parts += [f"{name}: {record[name]}" for name in ("refused", "problem") if record[name]]
    return ": ".join(filter(None, [_change(record), "; ".join(filter(None, parts))]))


def record_lines(record: Mapping[str, Any], when: str = "") -> list[str]:
    """The lines for one change: its time, the targets before and after, the reason, and the limits that applied."""
    at, why = when or clock(record["at"]), _why(record)
    by = "" if record["by"] or not why else f"{record['policy']}: "
    lines = [f"{at}  {_change(record)}  {by}{why}".rstrip()]
    wanted = "" if record["wanted"] in (None, record["after"]) else f"wanted {record['wanted']}"
    if wanted or record["bounded"]:
        lines.append("    " + "; ".join(filter(None, [wanted, ", ".join(record["bounded"])])))
    lines += [f"    {word}: {record[word]}" for word in ("refused", "problem") if record[word]]
    if record["numbers"]:
        lines.append("    from " + ", ".join(f"{name} {_figure(value)}" for name, value in record["numbers"].items()))
    return lines


def _change(record: Mapping[str, Any]) -> str:
    before, after = record["before"], record["after"]
    return f"{before} -> {after}" if before != after else f"stays at {after}"


def _why(record: Mapping[str, Any]) -> str:
    return "; ".join(map(reason_text, record["reasons"]["why"]))


def _figure(value: float) -> str:
    """A number as 13170 or 0.5123, never as 1.317e+04."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
