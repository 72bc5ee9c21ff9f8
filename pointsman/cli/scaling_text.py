"""Why a deployment has as many instances as it has, as people read it.

Enters: what the admin API tells of its scaling, as plain data. Leaves: text.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pointsman.cli.display import bounds, duration

NEWEST = 20
"""Changes that are shown; all that are kept are in --json."""


def scaling_text(told: Mapping[str, Any]) -> str:
    """What holds now, and the last changes, the newest last."""
    lines = [headline(told), *_numbers(told)]
    if told["problem"]:
        lines.append(f"problem: {told['problem']}")
    records = told["records"][-NEWEST:]
    if not records:
        return "\n".join([*lines, "", "nothing has changed yet"])
    return "\n".join([*lines, "", *(line for record in records for line in record_lines(record))])


def headline(told: Mapping[str, Any]) -> str:
    """Who decides, and what was decided."""
    there = f"{told['ready']} ready" + (f", {told['starting']} on their way" if told["starting"] else "")
    decided = f"{told['deployment']}: {told['desired']} wanted of {bounds(told)} by {told['policy']}; {there}"
    override = told["override"]
    if override is None:
        return decided
    until = "until it is taken back" if override["for_s"] is None else f"for another {duration(override['for_s'])}"
    return f"{decided}; held at {override['replicas']} by {override['by']}, {until}"


def record_lines(record: Mapping[str, Any]) -> list[str]:
    """One change: when, from what to what, why, and what kept it from being what was wanted."""
    at = datetime.fromtimestamp(record["at"]).strftime("%Y-%m-%d %H:%M:%S")
    before, after = record["before"], record["after"]
    change = f"{before} -> {after}" if before != after else f"stays {after}"
    lines = [f"{at}  {change}  {record['policy']}: {record['why']}" if record["why"] else f"{at}  {change}"]
    if record["bounded"]:
        wanted = "" if record["wanted"] is None else f"wanted {record['wanted']}; "
        lines.append(f"    {wanted}{', '.join(record['bounded'])}")
    lines += [f"    {word}: {record[word]}" for word in ("refused", "problem") if record[word]]
    if record["numbers"]:
        lines.append("    from " + ", ".join(f"{name} {value:.4g}" for name, value in record["numbers"].items()))
    return lines


def _numbers(told: Mapping[str, Any]) -> list[str]:
    ongoing, queued = told["ongoing"], told["queued"]
    return [f"now {ongoing:g} requests on instances, {queued:g} waiting"]
