"""A plane's status as people read it: what runs, how it is doing, and what is wrong.

Enters: the status as plain data, as the admin API tells it. Leaves: text. `up` shows it live, `status` once.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

from pointsman.render.sentences import detail, why_no_place
from pointsman.render.text import one_line, text_table

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "grey": "90"}
_STATES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "unhealthy": "red",
    "backing off": "red",
}
_WORDS = {"backing off": "waiting to restart"}
MOST_WORDS = 120
"""Characters of a reason in a table."""
LONGEST_CHANGE = 200
"""Characters of a change of a target in a table."""
_UTC = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class Paint:
    """Colours, if somebody looks at a terminal that has them."""

    def __init__(self, out: TextIO | None = None) -> None:
        looks = out is not None and out.isatty()
        self._on = looks and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str, colour: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self._on else text


NO_PAINT = Paint()


class InstanceRow:
    """One instance, as the status tells it."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._told = told
        self.name: str = told["id"]
        self.phase: str = told["phase"]
        self.reason: str = told["reason"]
        self._cause: Mapping[str, Any] = told.get("cause") or {"code": "", "facts": {}}
        self.halted: bool = told.get("halted", False)
        self.unplaced: bool = told.get("unplaced", False)

    @property
    def state(self) -> str:
        """Its phase in words."""
        if self.halted:
            return "given up"
        return "waiting for a place" if self._waits_for_a_place else _WORDS.get(self.phase, self.phase)

    @property
    def _waits_for_a_place(self) -> bool:
        return self.unplaced and self.phase == "backing off"

    @property
    def short_reason(self) -> str:
        """On one line; the whole of it is in --json."""
        code, facts = self._cause["code"], self._cause["facts"]
        words = detail(code, facts) if code == "no-place" else self.reason
        return one_line(words, MOST_WORDS)

    def in_words(self) -> str:
        """What it is doing. That one which starts does not answer yet goes without saying."""
        told = self.reason and self._cause["code"] != "not-ready-yet"
        return f"{self.name} is {self.state}{f' ({self.short_reason})' if told else ''}"

    @property
    def gist(self) -> str:
        """The same without figures that change all the time: how much is free."""
        if self._cause["code"] != "no-place":
            return self.in_words()
        return f"{self.name} is {self.state} ({one_line(why_no_place(self._cause['facts']), MOST_WORDS)})"

    def row(self) -> list[str]:
        """Its cells in the table of instances."""
        told = self._told
        limit, usage = told["max_concurrency"], told["kv_cache_usage"]
        return [
            self.name,
            self.state,
            told["url"],
            told["process"] or "",
            f"{told['in_flight']} of {limit}" if limit else str(told["in_flight"]),
            "" if usage is None else f"{usage:.0%}",
            str(told["restarts"] or ""),
            duration(told["since_s"]),
            self.short_reason,
        ]


INSTANCE_HEADS = ("instance", "state", "at", "pid", "requests", "cache", "restarts", "for", "reason")


class DeploymentRow:
    """One deployment, as the status tells it."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._told = told
        self.name: str = told["name"]
        self.instances = [InstanceRow(one) for one in told["instances"]]
        self.ready: int = told["ready"]
        self.wanted: int = told["desired"]
        self.internal: bool = told.get("internal", False)

    @property
    def stopped(self) -> str:
        """Why its rollout was stopped; empty: it was not."""
        return next((one.reason for one in self.instances if one.halted), "")

    @property
    def settled(self) -> bool:
        """Whether everything that is wanted is ready, and nothing else is there any more."""
        return self.ready == self.wanted == len(self.instances)

    def in_words(self) -> str:
        """How many are ready, and what the others are doing."""
        return self._with(one.in_words() for one in self.instances if one.phase != "ready")

    @property
    def gist(self) -> str:
        """The same for those who tell what is new: it stays the same while nothing is."""
        return self._with(one.gist for one in self.instances if one.phase != "ready")

    def _with(self, others: Iterable[str]) -> str:
        return "; ".join([f"{self.ready} of {self.wanted} ready", *others])

    def row(self) -> list[str]:
        """Its cells in the table of deployments."""
        told = self._told
        model = "" if told["model"] == self.name and self.internal else told["model"]
        names = ", ".join(filter(None, [model, *told["aliases"]]))
        load = [str(told["waiting"]), str(told["running"])]
        return [self.name, names, f"{self.ready} of {self.wanted}", *load, told["strategy"]]

    def node_row(self) -> list[str]:
        """Its cells in the table of the nodes of an application."""
        told = self._told
        counts = [str(told[name]) for name in ("waiting", "running")]
        counts += [str(told.get(name) or 0) for name in ("answered", "errors")]
        return [f"{self.ready} of {self.wanted}", *counts, milliseconds(told.get("mean_ms"))]


APPLICATION_HEADS = ("application", "at", "nodes", "ready")
NODE_HEADS = ("node", "kind", "ready", "waiting", "running", "answered", "errors", "mean")
DEPLOYMENT_HEADS = ("deployment", "model", "ready", "waiting", "running", "decided by")


def deployments_of(status: Mapping[str, Any]) -> list[DeploymentRow]:
    """The deployments in their order."""
    return [DeploymentRow(told) for told in status.get("deployments") or ()]


def status_text(status: Mapping[str, Any], paint: Paint = NO_PAINT) -> str:
    """Everything on one page."""
    deployments = deployments_of(status)
    lines = [_headline(status, deployments, paint), ""]
    if deployments:
        lines.append(text_table(DEPLOYMENT_HEADS, [one.row() for one in deployments]))
    else:
        lines.append("no deployments; pointsman apply FILE adds some")
    applications = [_application_row(told, deployments) for told in status.get("applications") or ()]
    if applications:
        lines += ["", text_table(APPLICATION_HEADS, applications)]
    scaled = scaling_table(status.get("deployments") or ())
    if scaled:
        lines += ["", scaled]
    instances = [one for deployment in deployments for one in deployment.instances]
    if instances:
        lines += ["", _instance_table(instances, paint)]
    problems = [paint(f"problem: {problem}", "red") for problem in status["problems"]]
    return "\n".join([*lines, *([""] if problems else []), *problems])


def application_text(told: Mapping[str, Any], paint: Paint = NO_PAINT) -> str:
    """One application on one page: its nodes, and their replicas."""
    by_name = {one.name: one for one in deployments_of(told)}
    rows = []
    for node in told["nodes"]:
        for name in node["deployments"]:
            deployment = by_name.get(name)
            cells = deployment.node_row() if deployment is not None else ["not there", "", "", "", "", ""]
            rows.append([node["name"], node["kind"], *cells])
    lines = [f"application {told['name']} at {told['path']}", "", text_table(NODE_HEADS, rows)]
    scaled = scaling_table(told.get("deployments") or ())
    if scaled:
        lines += ["", scaled]
    instances = [one for deployment in by_name.values() for one in deployment.instances]
    if instances:
        lines += ["", _instance_table(instances, paint)]
    stopped = [f"{one.name}: {one.stopped}" for one in by_name.values() if one.stopped]
    return "\n".join([*lines, *([""] if stopped else []), *stopped])


def _application_row(told: Mapping[str, Any], deployments: Sequence[DeploymentRow]) -> list[str]:
    named = {name for node in told["nodes"] for name in node["deployments"]}
    mine = [one for one in deployments if one.name in named]
    ready = f"{sum(one.ready for one in mine)} of {sum(one.wanted for one in mine)}"
    return [told["name"], told["path"], ", ".join(node["name"] for node in told["nodes"]), ready]


SCALING_HEADS = ("scaled", "target", "of", "by", "last change")


def scaling_table(deployments: Sequence[Mapping[str, Any]]) -> str:
    """Of all deployments that are scaled; empty: none is."""
    rows = []
    for one in deployments:
        scaling = one.get("scaling")
        if scaling:
            order, policy = scaling["override"], scaling["policy"]
            by = policy if order is None else f"order of {order['by']}, not {policy}"
            last = one_line(on_this_clock(scaling["last"]), LONGEST_CHANGE)
            rows.append([one["name"], str(scaling["desired"]), bounds(scaling), by, last])
    return text_table(SCALING_HEADS, rows) if rows else ""


def bounds(told: Mapping[str, Any]) -> str:
    """2 to 8"""
    return f"{told['min']} to {told['max']}"


def _headline(status: Mapping[str, Any], deployments: Sequence[DeploymentRow], paint: Paint) -> str:
    settled = all(one.settled for one in deployments)
    partly = "ready in part" if status["ready"] else "not ready"
    state = paint("ready", "green") if settled else paint(partly, "yellow")
    parts = [f"plane {state}", f"up for {duration(status['uptime_s'])}", f"generation {status['generation']}"]
    if status.get("url"):
        parts.append(f"requests to {status['url']}")
    return ", ".join(parts)


def _instance_table(instances: Sequence[InstanceRow], paint: Paint) -> str:
    head, rule, *lines = text_table(INSTANCE_HEADS, [one.row() for one in instances]).split("\n")
    start = head.index("state")
    painted = []
    for line, one in zip(lines, instances, strict=True):
        end = start + len(one.state)
        painted.append(line[:start] + paint(line[start:end], _STATES.get(one.phase, "grey")) + line[end:])
    return "\n".join([head, rule.rstrip(), *painted])


def clock(moment: float) -> str:
    """When that was, in local time: all times that people are shown are."""
    return f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"


def on_this_clock(text: str) -> str:
    """The same with its times in local time: a plane writes them in UTC, with a Z."""
    return _UTC.sub(lambda found: _local(found[0]), text)


def _local(utc: str) -> str:
    try:
        return clock(datetime.fromisoformat(utc).timestamp())
    except (ValueError, OverflowError, OSError):  # somebody's own words, and no time at all
        return utc


def duration(seconds: float | None) -> str:
    """Short: 300ms, 4s, 3m, 2h, 5d; empty if unknown."""
    if seconds is None:
        return ""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def milliseconds(value: float | None) -> str:
    """Short: 12 ms, 3.4 s; empty if unknown."""
    if value is None:
        return ""
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.1f} s"


# Why a deployment has as many instances as it has, as people read it.
#
# Enters: what the admin API tells of its scaling, as plain data. Leaves: text.


NEWEST = 20
"""Changes that are shown; all that are kept are in --json."""


def scaling_text(told: Mapping[str, Any]) -> str:
    """What holds now, and the last changes, the newest last."""
    lines = [headline(told), *_numbers(told)]
    if told["problem"]:
        lines.append(f"problem: {told['policy']} {told['problem']}")
    if told["trouble"]:
        lines.append(f"problem: {told['trouble']}")
    records = told["records"][-NEWEST:]
    if not records:
        return "\n".join([*lines, "", "nothing has changed yet"])
    return "\n".join([*lines, "", *(line for record in records for line in record_lines(record))])


def headline(told: Mapping[str, Any]) -> str:
    """What was decided, by whom, and what has come of it."""
    policy, order, unplaced = told["policy"], told["override"], told["unplaced"]
    coming = told["starting"] - unplaced  # those without a place count as starting
    there = [
        f"{told['ready']} ready",
        f"{coming} on {'its' if coming == 1 else 'their'} way" if coming else "",
        f"{unplaced} without a place" if unplaced else "",
    ]
    other = "" if told["wanted"] in (None, told["desired"]) else f" wants {told['wanted']}"
    if order is None:
        by = f"decided by {policy}" + (f", which{other}" if other else "")
    else:
        until = "until it is released" if order["for_s"] is None else f"for another {duration(order['for_s'])}"
        by = f"{order['replicas']} ordered by {order['by']} {until}" + (f"; {policy}{other}" if other else "")
    return f"{told['deployment']}: target {told['desired']} ({bounds(told)}), {by}; {', '.join(filter(None, there))}"


def record_lines(record: Mapping[str, Any], when: str = "") -> list[str]:
    """One change: when, from what to what, why, and what kept it from being what was wanted."""
    at = when or clock(record["at"])
    before, after = record["before"], record["after"]
    change = f"{before} -> {after}" if before != after else f"stays at {after}"
    why = record["why"] if record["by"] or not record["why"] else f"{record['policy']}: {record['why']}"
    lines = [f"{at}  {change}  {why}".rstrip()]
    wanted = "" if record["wanted"] in (None, after) else f"wanted {record['wanted']}"
    if wanted or record["bounded"]:
        lines.append("    " + "; ".join(filter(None, [wanted, ", ".join(record["bounded"])])))
    lines += [f"    {word}: {record[word]}" for word in ("refused", "problem") if record[word]]
    if record["numbers"]:
        lines.append("    from " + ", ".join(f"{name} {_figure(value)}" for name, value in record["numbers"].items()))
    return [on_this_clock(line) for line in lines]


def _figure(value: float) -> str:
    """13170 and 0.5123, never 1.317e+04."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def _numbers(told: Mapping[str, Any]) -> list[str]:
    ongoing, queued = told["ongoing"], told["queued"]
    return [f"now {ongoing:g} requests on instances, {queued:g} waiting"]
