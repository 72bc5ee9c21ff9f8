"""Functions from facts to sentences, for sentences whose grammar depends on their facts."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

from pointsman.render.text import REMEDIES, gib, quantity

Facts: TypeAlias = Mapping[str, Any]
Template: TypeAlias = str | Callable[[Facts], str]


class Phrase(NamedTuple):
    """Why a candidate was rejected: `kind: detail`. Summaries count kinds. The detail has one candidate's figures."""

    kind: str
    detail: Template = ""


def filled(template: Template, facts: Facts) -> str:
    return template.format(**facts) if isinstance(template, str) else template(facts)


def either(fact: str, value: Any, one: Template, other: Template) -> Callable[[Facts], str]:
    """A function that renders `one` if the fact has the value, else `other`."""
    return lambda facts: filled(one if facts[fact] == value else other, facts)


def remedied(template: str) -> Callable[[Facts], str]:
    """Append what to do about the cause. The cause lies with the plane, not with an instance."""
    return lambda facts: f"{template.format(**facts)}; {REMEDIES[facts['cause']]}"


def label_mismatch(facts: Facts) -> str:
    key, found, operator = facts["key"], facts["found"], facts["operator"]
    if operator == "DoesNotExist":
        return f"{key} is {found}, and must be absent"
    if operator == "NotIn":
        return f"{key} is {found}, which is excluded"
    return f"{key} is absent" if found is None else f"{key} is {found}, not {' or '.join(facts['values'])}"


def over_budget(facts: Facts) -> str:
    cost, budget = facts["cost"], "the budget is {budget:.3g}".format(**facts)
    return f"would cost {cost:.3g}, {budget}" if isfinite(cost) else f"its cost is not known, and {budget}"


def headroom(facts: Facts) -> str:
    told = (
        ("to the first token", "{:.0f} ms", facts["ttft_headroom_ms"]),
        ("per token", "{:.1f} ms", facts["tpot_headroom_ms"]),
    )
    return "headroom " + ", ".join(
        f"{form.format(value) if isfinite(value) else 'not predicted'} {what}" for what, form, value in told
    )


def too_busy(facts: Facts) -> str:
    return ", ".join(f"{name} {facts[name]:.3g} (at most {limit:g})" for name, limit in facts["limits"].items())


def in_flight(facts: Facts) -> str:
    return ", ".join(f"{facts[name]:g} of {limit:g} {name} in flight" for name, limit in facts["limits"].items())


def chosen(rule: str) -> Callable[[Facts], str]:
    def render(facts: Facts) -> str:
        limit, latency = facts["limit"], facts["expected_ms"]
        running = f"{facts['running']:.0f}" + ("" if limit is None else f" of {limit}")
        return f"{rule.format(**facts)} ({running} running{'' if latency is None else f', about {latency:.0f} ms'})"

    return render


def shortage(facts: Facts) -> str:
    unit, size = ("requests", "") if "size_bytes" not in facts else ("bytes", facts["size_bytes"])
    own = f", and this request has {size:,}" if "size_bytes" in facts else ""
    return f"{facts['waiting']:,} of {facts['limit']:,} {unit} waiting {facts['where']}{own} ({facts['setting']})"


def waited(what: str, advice: str) -> Callable[[Facts], str]:
    def render(facts: Facts) -> str:
        limit, setting = facts["limit_s"], facts["setting"]
        bound = f"its own deadline allowed {limit:g} s" if setting is None else f"the limit is {limit:g} s ({setting})"
        because = f" ({facts['because']})" if facts.get("because") and not facts.get("absence") else ""
        return f"waited {facts['waited_s']:.3g} s {what}; {bound}; {facts.get('absence') or advice}{because}"

    return render


_NO_RETRY = {
    "begun": "after part of the answer had been sent",
    "no-retry": "and must not be sent again",
    "shutting-down": "while shutting down",
}


def instance_failed(facts: Facts) -> str:
    when = _NO_RETRY.get(facts["no_retry"], f"at try {facts['tries']} of {facts['max_tries']}")
    return f'"{facts["instance"]}" failed {when}: {facts["error"]}'


def closed_for(facts: Facts) -> str:
    left = f"{facts['left_s']:.3g} s of {facts['for_s']:.3g} s left" if "left_s" in facts else f"{facts['for_s']:g} s"
    return f"{left}{', time {times} in a row'.format(**facts) if facts.get('times', 0) > 1 else ''}: {facts['why']}"


def stands_out(facts: Facts) -> str:
    kind, share = facts["kind"], "{errors} of {results} requests".format(**facts)
    what = f"{share} failed on it" if kind == "failed" else f"it answered {kind} to {share}"
    others = "{peer_errors} of {peer_results}".format(**facts)
    return f"{what}, its peers to {others}" if kind != "failed" else f"{what}, and {others} on its peers"


def unplaced(facts: Facts) -> str:
    verb = "has" if facts["unplaced"] == 1 else "have"
    return "; ".join(
        [f"{facts['unplaced']} of {facts['target']} {verb} no place: {facts['why']}", *map(str, facts["hints"])]
    )


def room_after_moving(facts: Facts) -> str:
    moves = ", ".join("{instance} from {from} to {to}".format(**move) for move in facts["moves"])
    return f"there would be room if these moved: {moves}"


_NEVER_STARTS = {
    "no-program": "its program is not installed",
    "no-package": "a package that it needs is not installed",
    "wrong-options": "its server does not take its options",
    "port-taken": "a port that it needs is in use",
    "unknown-model": "its model does not exist",
    "no-engine-key": "its API key is missing",
}
"""Causes in words for clients. They contain no paths, and no output from servers."""


def never_starts(facts: Facts) -> str:
    why = _NEVER_STARTS.get(facts["cause"], "its server refuses to")
    return f"{facts['instance']} cannot start: {why}; an operator must correct that"


def phase_changed(facts: Facts) -> str:
    before, phase, why = (facts[name] for name in ("before", "phase", "why"))
    change = f"{before or 'new'} -> {phase or 'gone'}"
    return f"{facts['instance']}: {change}{f': {why}' if why else ''}"


def task_failed(facts: Facts) -> str:
    times = "once" if facts["failures"] == 1 else f"{facts['failures']} times"
    then = "it runs again" if facts["retry_s"] is None else f"it is tried again in {facts['retry_s']:.1f} s"
    of = f"{facts['gateway']}: " if "gateway" in facts else ""
    return of + 'background task "{task}" failed {times}, last {ago_s:.0f} s ago ({error}); {then}'.format(
        **facts, times=times, then=then
    )


def given_up(facts: Facts) -> str:
    first, *others = facts["instances"]
    subject = f"{first} and {len(others)} more are" if others else f"{first} is"
    return f"{subject} given up: {facts['why']}"


def no_program(facts: Facts) -> str:
    folder = f", searched from {facts['folder']}" if facts["folder"] else ""
    return f"{facts['program']} cannot be run ({facts['why']}{folder}); {facts['remedy']}"


def weighed(facts: Facts) -> str:
    """The expected effect of a request on each instance, from best to worst."""
    instances = facts["instances"]
    best = instances[0]
    parts = []
    for one in instances:
        first, behind = one["first_token_ms"] / 1000, one["behind_ms"] / 1000
        if one is not best and one["reading_ms"] < 0.5 * best["reading_ms"]:
            parts.append(f"{one['instance']}: warm, but {behind:.1f} s behind")
            continue
        part = f"{one['instance']}: first token in about {first:.1f} s"
        if one["answers"]:
            part += f", delays {one['answers']} by {one['reading_ms'] / 1000:.1f} s"
        if one["misses"] >= 0.05:
            part += f" ({one['misses']:.1f} expected to miss)"
        parts.append(part)
    return "; ".join(parts)


def setting_changed(facts: Facts) -> str:
    """The sentence for a changed setting. `hidden` replaces values that are not shown: secrets and code."""
    match facts.get("hidden"):
        case None:
            told = f"{facts['field']} {facts['before']} -> {facts['after']}".lstrip()
        case "code":
            told = "its code has changed"
        case word:
            told = f"{facts['field']} {word}".lstrip()
    of = f"{facts['of']}: " if facts.get("of") else ""
    return f"{of}{told}{'; takes effect after a restart' if facts.get('after_restart') else ''}"


def keys_changed(facts: Facts) -> str:
    parts = [
        f"{quantity(count, 'key')} of {tenant} {word}"
        for word in ("added", "removed")
        for tenant, count in facts[word].items()
    ]
    parts += ["a key of {before} changed, now of {after}".format(**one) for one in facts["changed"]]
    return f"{', '.join(parts)}; {facts['in_force'] or 'none'} in force then"


def user_config_changed(facts: Facts) -> str:
    fields = ", ".join(facts["fields"])
    return f"its userConfig{f' ({fields})' if fields.strip() else ''} has changed; no restart is needed"


def removes_all(facts: Facts) -> str:
    names, noun = facts["names"], facts["kind"]
    return f"it removes the only {noun}, {names[0]}" if len(names) == 1 else f"it removes all {len(names)} {noun}s"


def words(template: str) -> Callable[[Facts], str]:
    """A function that renders a template with its facts in words: sizes in GiB, lists as "a, b, c"."""

    def word(name: str, value: Any) -> Any:
        if name.endswith("_bytes"):
            return gib(value)
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value

    return lambda facts: template.format(**{name: word(name, value) for name, value in facts.items()})
