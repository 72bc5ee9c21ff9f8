"""A trace as a table for a terminal."""

from typing import TYPE_CHECKING

from pointsman.render.text import quantity, text_table

if TYPE_CHECKING:
    from pointsman.selection.trace import ProfileTrace, Trace


def trace_table(trace: "Trace") -> str:
    """The tables of the profiles in their order, then the notes."""
    return "\n\n".join([*map(profile_table, trace.profiles), *map(str, trace.notes)])


def profile_table(run: "ProfileTrace") -> str:
    """One line per candidate: scores and total if it was scored, the reason if it was rejected."""
    scores, totals = run.scores, run.totals
    heads = [f"{score.scorer} x{score.weight:g}" for score in scores]
    chosen = {str(target): rank for rank, target in enumerate(run.targets, start=1)}
    rows: list[list[str]] = []
    for position in sorted(range(len(totals)), key=lambda position: -totals[position]):
        candidate = str(run.survivors[position])
        rank = chosen.get(candidate)
        verdict = "" if rank is None else "chosen" if rank == 1 else f"chosen ({rank}.)"
        numbers = [f"{float(score.bounded[position]):.3f}" for score in scores]
        rows.append([candidate, *numbers, f"{totals[position]:.3f}", verdict])
    for name, rejected in run.stages:
        rows += [[str(candidate), *[""] * len(heads), "", f"{name}: {reason}"] for candidate, reason in rejected]
    lines = [f'profile "{run.profile}", {quantity(run.considered, "candidate")}']
    lines += [
        f"{score.scorer}: {score.clamped} scores outside [0, 1] were clamped" for score in scores if score.clamped
    ]
    return "\n".join([*lines, text_table(["candidate", *heads, "total", "verdict"], rows)])
