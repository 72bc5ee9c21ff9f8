"""Tables, traces and other lines for a terminal, and parts of sentences that need more than a template."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any
from unicodedata import combining, east_asian_width


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns and a rule under the head. Numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    numeric = [
        bool(rows) and all(_is_number(row[index]) or not row[index] for row in rows) for index in range(len(heads))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])


def one_line(text: str, limit: int) -> str:
    """A text from outside as one line of at most `limit` characters. Line breaks and control characters are removed."""
    start = text[: 4 * limit]  # a text from outside may have megabytes
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in start).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def cells(text: str) -> int:
    """The width of a text, in terminal columns."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(one) else 2 if east_asian_width(one) in "WF" else 1 for one in text)


def cut(text: str, room: int) -> str:
    """The text, cut to `room` columns if it is wider. Empty if it would be cut to fewer than 4 columns."""
    if cells(text) <= room:
        return text
    if room < 4:
        return ""
    taken, kept = 0, 0
    for one in text:
        taken += cells(one)
        if taken > room - 1:
            break
        kept += 1
    return f"{text[:kept]}…"


def quantity(count: int, noun: str) -> str:
    """A count with its noun, such as "1 worker", "2,000 workers" or "3 processes"."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


REMEDIES = {
    "files": "raise the limit of open files of the plane (ulimit -n, LimitNOFILE)",
    "files-of-machine": "raise the limit of open files of the machine (fs.file-max)",
    "memory": "free memory of the machine",
    "processes": "raise the limit of processes (ulimit -u, TasksMax)",
    "booking": "end the Ray jobs that use it, or add nodes",
    "workers": "see the problems of workers in the status",
    "ports": "free local ports, or widen net.ipv4.ip_local_port_range",
    "names": "check the name servers of this machine",
    "permission": "check the firewall and the security policy of this machine",
    "plane": "see the log of the plane",
    "protocol": "enable IPv6 on this machine, or use an IPv4 address",
}
"""What to do about a failure of this process or machine, by the cause that `pointsman.http.pool.local_cause` finds."""


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("%x").replace(",", ""))
    except ValueError:
        return False
    return True


def gib(size: float) -> str:
    """A size with its unit, such as 41.2 GiB. Small sizes are in MiB."""
    return f"{size / 2**30:.1f} GiB" if abs(size) >= 2**29 else f"{size / 2**20:.0f} MiB"


# Sentences about places, made from the facts of a `Reason`


def place_taken(facts: Mapping[str, Any]) -> str:
    return "; ".join(f"{taken['worker']}: {_taken(taken)}" for taken in facts["workers"])


def _taken(facts: Mapping[str, Any]) -> str:
    parts, gpus, sizes = [], facts["gpus"], sorted(facts["gpu_bytes"])
    if gpus:
        each = f"{gib(sizes[0])} to {gib(sizes[-1])}" if gib(sizes[0]) != gib(sizes[-1]) else gib(sizes[0])
        parts.append(f"{', '.join(f'gpu{index}' for index in gpus)} ({each}{' each' if len(gpus) > 1 else ''})")
    parts += [f"{facts['cpus']:g} CPUs"] if facts["cpus"] else []
    parts += [f"{gib(facts['memory_bytes'])} of memory"] if facts["memory_bytes"] else []
    return ", ".join(parts) or "nothing of its own"


OBSTACLES = {
    "other_kind": "of another kind or not chosen",
    "taken": "held exclusively",
    "not_empty": "not empty",
    "small_share": "with too small a share free",
}


def too_few_gpus(facts: Mapping[str, Any]) -> str:
    alike, each = " of one model" if facts["one_model"] else "", gib(facts["gpu_bytes"])
    if "with_room" in facts:
        return f"needs {facts['gpus']}{alike} with {each} each, {facts['with_room']} have room"
    here = f"{facts['found_gpus']} GPUs, the largest free is {gib(facts['largest_free_bytes'])}"
    return f"needs {facts['gpus']}{alike} with {each} each; it has {here}"


def too_little_room(facts: Mapping[str, Any]) -> str:
    alike = " on GPUs of one model" if facts["one_model"] else ""
    free = f"at most {gib(facts['free_bytes'])} free{alike}"
    return f"needs {gib(facts['needed_bytes'])} and room for the engine on each GPU, {free}"


_ALLOWANCES = {
    "several_gpus": "several GPUs of one worker",
    "several_workers": "several workers",
    "partial_offload": "partial offload",
    "mixed_gpus": "GPUs of different models",
    "mixed_generations": "GPUs of different generations",
}


def allowances(facts: Mapping[str, Any]) -> str:
    allowed = " and ".join(_ALLOWANCES[name] for name in facts["allow"])
    return f"with {allowed} allowed it would fit on {', '.join(facts['on'])}"


def moves(facts: Mapping[str, Any]) -> str:
    listed = ", ".join(f"{move['instance']} to {move['to']}" for move in facts["moves"])
    return f"moving {listed} would make room on {', '.join(facts['on'])}"


def record_text(record: Mapping[str, Any]) -> str:
    """The explanation of a request, made from the JSON of its record."""
    decision, refusal, tries, state = record["decision"], record["refusal"], record["failed_tries"], record["state"]
    lines = [f'request "{record["request_id"]}" is {state}']
    if decision is not None:
        lines.append(f"sent to {decision['target_instance_id']}: {decision['reason']['text']}")
        if decision["confidence"] != 1.0 or decision["metadata"]:
            more = "".join(f", {name} {value}" for name, value in decision["metadata"].items())
            lines.append(f"confidence {_number(decision['confidence']):g}{more}")
    if record["dropped"] is not None:
        lines.append(record["dropped"]["text"])
    lines += [f"tried {one['instance']}: {one['why']}" for one in tries]
    if decision is not None or tries:
        lines.append("; ".join(_timeline(record)))
    if record["status"] is not None and record["status"] >= 400:
        lines.append(f"answered with {record['status']}")
    if record["cost"] is not None:
        lines.append(f"charged {record['cost']:g}")
    if refusal is not None:
        lines.append(f"{state} ({refusal['outcome']}): {refusal['reason']['text']}")
    if record["unplaced"] is not None:
        lines.append(record["unplaced"]["text"])
    if record["trace"] is not None:
        lines += ["", trace_table(record["trace"])]
    return "\n".join(lines)


def _timeline(record: Mapping[str, Any]) -> list[str]:
    """The times, tokens and deadline of a request that was sent."""
    predicted, first_ms, total_ms = record["predicted"], record["first_token_ms"], record["total_ms"]
    parts = [f"waited {record['waited_ms']:.1f} ms"]
    if first_ms is not None:
        guess = "" if predicted is None else f" (predicted {_number(predicted['ttft_ms']):.1f} ms)"
        parts.append(f"first token after {first_ms:.1f} ms{guess}")
    if total_ms is not None:
        expected = None if record["decision"] is None else record["decision"]["estimated_latency_ms"]
        guess = "" if expected is None else f" (expected {expected:.1f} ms)"
        parts.append(f"ended after {total_ms:.1f} ms{guess}")
    tokens = record["output_tokens"]
    if tokens is not None:
        cached = "" if record["cached_tokens"] is None else f" ({record['cached_tokens']} from the cache)"
        parts.append(f"{record['input_tokens']} tokens in{cached}, {tokens} out")
        if predicted is not None and first_ms is not None and total_ms is not None and tokens > 1:
            pace = (total_ms - first_ms) / (tokens - 1)
            parts.append(f"{pace:.1f} ms per token (predicted {_number(predicted['tpot_ms']):.1f} ms)")
    if record["met_deadline"] is not None:
        parts.append(f"{'met' if record['met_deadline'] else 'missed'} its deadline of {record['deadline_ms']:g} ms")
    return parts


def trace_table(trace: Mapping[str, Any]) -> str:
    """A trace from JSON: the table of each profile, in the trace's order, then the notes."""
    return "\n\n".join([*map(profile_table, trace["profiles"]), *(note["text"] for note in trace["notes"])])


def profile_table(run: Mapping[str, Any]) -> str:
    """A table with one line per candidate: its scores and total if it was scored, or the reason why it was rejected."""
    weights, clamped = run["weights"], run["clamped"]
    chosen = {target: rank for rank, target in enumerate(run["targets"], start=1)}
    rows: list[list[str]] = []
    for one in sorted(run["scored"], key=lambda one: -_number(one["total"])):
        rank = chosen.get(one["candidate"])
        verdict = "" if rank is None else "chosen" if rank == 1 else f"chosen ({rank}.)"
        numbers = [f"{_number(figure):.3f}" for figure in (*one["scores"].values(), one["total"])]
        rows.append([one["candidate"], *numbers, verdict])
    blank = [""] * (len(weights) + 1)
    rows += [[one["candidate"], *blank, f"{one['filter']}: {one['reason']['text']}"] for one in run["rejected"]]
    lines = [f'profile "{run["profile"]}", {quantity(run["candidates"], "candidate")}']
    lines += [f"{scorer}: {count} scores outside [0, 1] were clamped" for scorer, count in clamped.items()]
    heads = ["candidate", *(f"{scorer} x{weight:g}" for scorer, weight in weights.items()), "total", "verdict"]
    return "\n".join([*lines, text_table(heads, rows)])


def _number(value: float | None) -> float:
    """A number from JSON, which has null in place of nan."""
    return nan if value is None else value


def attribute_found(facts: Mapping[str, Any]) -> str:
    """The value that a filter found for an attribute of an endpoint, and the value that it demands."""
    demand = ", ".join(f"{name} {value}" for name, value in facts["demand"].items())
    return f"{facts['name']} is {facts['found']:g} (nan: unknown), demanded: {demand}"
