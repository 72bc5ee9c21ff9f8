"""Why a deployment has as many instances as it has, as people read it.

Enters: what the admin API tells of its scaling, as plain data. Leaves: text.
"""

from collections.abc import Mapping
from typing import Any

from pointsman.cli.display import bounds, clock, duration, on_this_clock

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
    policy, order, homeless = told["policy"], told["override"], told["homeless"]
    coming = told["starting"] - homeless  # those without a place count as starting
    there = [
        f"{told['ready']} ready",
        f"{coming} on {'its' if coming == 1 else 'their'} way" if coming else "",
        f"{homeless} without a place" if homeless else "",
    ]
    other = "" if told["wanted"] in (None, told["desired"]) else f" wants {told['wanted']}"
    if order is None:
        by = f"decided by {policy}" + (f", which{other}" if other else "")
    else:
        until = "until it is taken back" if order["for_s"] is None else f"for another {duration(order['for_s'])}"
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
