"""Sentences for operators: one per code of a `Reason`.

A `Template` is a format string over the facts, or a function of them where grammar needs more. A reason whose facts
have `text` is shown as that text: so are all reasons of users' plugins. The codes are API, listed in docs/reasons.md.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

Facts: TypeAlias = Mapping[str, Any]
Template: TypeAlias = str | Callable[[Facts], str]


class Phrase(NamedTuple):
    """Why a candidate was rejected: `kind: detail`. Summaries count kinds; the detail has one candidate's figures."""

    kind: str
    detail: Template = ""


class Group(Protocol):
    """What a summary needs to know of some rejections with one code."""

    @property
    def code(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def facts(self) -> Facts: ...
    @property
    def alike(self) -> bool: ...


def sentence(code: str, facts: Facts) -> str:
    """The sentence of a reason."""
    if "text" in facts:
        return str(facts["text"])
    found = SENTENCES.get(code, code)
    if isinstance(found, Phrase):
        detail = _rendered(found.detail, facts)
        return f"{found.kind}: {detail}" if detail else found.kind
    return _rendered(found, facts)


def kind(code: str, facts: Facts) -> str:
    """The reason without its figures, as summaries count it."""
    found = SENTENCES.get(code)
    return found.kind if isinstance(found, Phrase) and "text" not in facts else sentence(code, facts)


def detail(code: str, facts: Facts) -> str:
    """The figures alone; empty if it has none."""
    found = SENTENCES.get(code)
    return _rendered(found.detail, facts) if isinstance(found, Phrase) and "text" not in facts else ""


def tally(groups: Iterable[Group]) -> str:
    """9 serving another model, 3 full"""
    return ", ".join(f"{group.count} {_group_kind(group)}" for group in groups)


def _group_kind(group: Group) -> str:
    if group.alike or "text" not in group.facts:
        return kind(group.code, group.facts)
    return f"{group.code} ({group.facts['text']}, ...)"


def _rendered(template: Template, facts: Facts) -> str:
    try:
        return template.format(**facts) if isinstance(template, str) else template(facts)
    except (LookupError, TypeError, ValueError):  # a reason of a plugin under one of our codes, with other facts
        return ", ".join(f"{name} {value}" for name, value in facts.items())


def _label_mismatch(facts: Facts) -> str:
    key, found, operator = facts["key"], facts["found"], facts["operator"]
    if operator == "DoesNotExist":
        return f"{key} is {found}, and must be absent"
    if operator == "NotIn":
        return f"{key} is {found}, which is excluded"
    return f"{key} is absent" if found is None else f"{key} is {found}, not {' or '.join(facts['values'])}"


def _too_busy(facts: Facts) -> str:
    return ", ".join(f"{name} {facts[name]:.3g} (at most {limit:g})" for name, limit in facts["limits"].items())


def _in_flight(facts: Facts) -> str:
    return ", ".join(f"{facts[name]:g} of {limit:g} {name} in flight" for name, limit in facts["limits"].items())


def _role(facts: Facts) -> str:
    return f"llm-d.ai/role is {'absent' if facts['role'] is None else facts['role']}"


def _none_chosen(facts: Facts, noun: str = "candidates") -> str:
    return "; ".join(
        f"{run['candidates']} {noun}: {tally(run['rejected'])}" if run["candidates"] else f"there are no {noun}"
        for run in facts["profiles"]
    )


def _no_instance(facts: Facts) -> str:
    model, cause = facts["model"], facts["cause"]
    why = _none_chosen(cause.facts, "instances") if cause.code == "none-chosen" else cause
    return f"no instance can take {_quoted(model) if model else 'this request'}: {why}"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _chosen(rule: str) -> Callable[[Facts], str]:
    def words(facts: Facts) -> str:
        limit, latency = facts["limit"], facts["expected_ms"]
        running = f"{facts['running']:.0f}" + ("" if limit is None else f" of {limit}")
        return f"{rule.format(**facts)} ({running} running{'' if latency is None else f', about {latency:.0f} ms'})"

    return words


def _held_back(facts: Facts) -> str:
    said = f"held back: the pool is saturated to {facts['saturation']:.0%}"
    if not facts["unmeasured"]:
        return said
    return f"{said}; {facts['unmeasured']} of {facts['instances']} instances have never been measured"


def _shortage(facts: Facts) -> str:
    unit, size = ("requests", "") if "size_bytes" not in facts else ("bytes", facts["size_bytes"])
    own = f", and this request has {size:,}" if "size_bytes" in facts else ""
    return f"{facts['waiting']:,} of {facts['limit']:,} {unit} waiting {facts['where']}{own} ({facts['setting']})"


def _displaced(facts: Facts) -> str:
    return (
        f"displaced by higher-priority work: a request of priority {facts['by_priority']} needed the room of this one "
        f"of priority {facts['priority']} in a full queue: {_shortage(facts)}; send it again later"
    )


def _waited(what: str, advice: str) -> Callable[[Facts], str]:
    def words(facts: Facts) -> str:
        limit, setting = facts["limit_s"], facts["setting"]
        bound = f"its own deadline allowed {limit:g} s" if setting is None else f"the limit is {limit:g} s ({setting})"
        because = f" ({facts['because']})" if facts.get("because") and not facts.get("absence") else ""
        return f"waited {facts['waited_s']:.3g} s {what}; {bound}; {facts.get('absence') or advice}{because}"

    return words


def _with_absence(template: Template, advice: str = "") -> Callable[[Facts], str]:
    """With what is known about the lack of instances, in place of the general advice."""

    def words(facts: Facts) -> str:
        return "; ".join(filter(None, [_rendered(template, facts), str(facts.get("absence") or advice)]))

    return words


_NO_RETRY = {
    "begun": "after part of the answer was out",
    "no-retry": "and must not be sent again",
    "shutting-down": "while shutting down",
}


def _instance_failed(facts: Facts) -> str:
    when = _NO_RETRY.get(facts["no_retry"], f"at try {facts['tries']} of {facts['max_tries']}")
    return f'"{facts["instance"]}" failed {when}: {facts["error"]}'


_START_ONE = "start an instance"

SENTENCES: Mapping[str, Template | Phrase] = {
    # Why an instance cannot take a request
    "other-model": Phrase("serving another model"),
    "not-accepting": Phrase("not accepting requests"),
    "full": Phrase("full", "{load:g} of {limit:g} requests"),
    "over-budget": Phrase("over budget", "would cost {cost:.3g} of {budget:.3g} (inf: unknown)"),
    "too-slow": Phrase("too slow", "{expected_ms:.0f} ms expected, {left_ms:.0f} ms left"),
    "labels-differ": Phrase("labels do not match", _label_mismatch),
    "not-for-decode": Phrase("not for decode", _role),
    "not-for-prefill": Phrase("not for prefill", _role),
    "not-for-encode": Phrase("not for encode", _role),
    "prompt-not-cached": Phrase("little of the prompt cached", "{cached:.0%}"),
    "session-elsewhere": Phrase("session is elsewhere", "on {instance}"),
    "exploring": Phrase("exploring endpoints that may be late"),
    "may-be-late": Phrase(
        "may be late",
        "headroom {ttft_headroom_ms:.0f} ms to the first token, {tpot_headroom_ms:.1f} ms per token "
        "(nan: not predicted)",
    ),
    "prompt-out-of-range": Phrase("prompt out of range", "{tokens} tokens, {label} is {range}"),
    "too-busy": Phrase("too busy", _too_busy),
    "saturated": Phrase(
        "saturated or not measured lately",
        "{waiting:g} waiting (below {max_waiting:g} is wanted), KV cache {kv_usage:.0%} full "
        "(below {max_kv_usage:.0%}), measured {age_s:.3g} s ago (at most {max_age_s:g})",
    ),
    "concurrency-limit": Phrase("full", _in_flight),
    # Why no instance was chosen
    "none-chosen": _none_chosen,
    "no-instance-can-take": _with_absence(_no_instance),
    "no-profile-ran": "no profile was run",
    "not-one-profile": "one profile result was expected, found {profiles}",
    "profile-chose-none": 'profile "{profile}" chose nobody',
    "profile-handler": "{text}",
    "policy-failed": "{error}",
    "held-back": _held_back,
    "is-next": "it is next",
    "same-id-placed": "a request of the same id is placed",
    # Notes of a trace
    "failed-before": lambda facts: f"failed it before: {', '.join(facts['instances'])}",
    "unknown-profile": lambda facts: (
        f'no profile is named "{facts["profile"]}"; header {facts["header"]} may say {", ".join(facts["profiles"])}'
    ),
    "producer-failed": "{producer} failed: {error}",
    # Why an instance was chosen
    "best-of-profile": _chosen('{policy}: best of {candidates} by profile "{rule}"'),
    "best-by-rule": _chosen("{policy}: {rule} of {candidates}"),
    "policy": "{text}",
    # Why a decision of a user's policy was not carried out
    "unknown-request": 'request "{request_id}" was not waiting, or was decided before',
    "unknown-instance": 'there is no instance "{instance}"',
    "instance-not-allowed": 'instance "{instance}" may not be chosen: {cause}',
    # Why a request was refused
    "shed": "shed by priority {priority}: saturation is {saturation:.2f}, so {odds:.0%} are turned away",
    "shed-by-priority": "shed by priority {priority}: saturation is {saturation:.2f}, and from 1 on only priority 0 "
    "and above is served; send it again later",
    "would-be-late": "would be late: none of {endpoints} endpoints is predicted to meet its latency objectives",
    "all-saturated": _with_absence("every instance is saturated"),
    "queue-full": lambda facts: f"the queue is full: {_shortage(facts)}",
    "no-instance-queue-full": _with_absence(
        lambda facts: f"no instance is running, and the queue is full: {_shortage(facts)}", _START_ONE
    ),
    "displaced": _displaced,
    "waited-too-long": _waited("without an instance having room", "send less or add instances"),
    "no-instance-came": _waited("and no instance is running", _START_ONE),
    "too-many-models": _with_absence('no instance serves "{model}", and too many such models are waited for already'),
    "deployment-removed": _with_absence(
        'deployment "{deployment}" was removed while this request waited; send it to another model'
    ),
    "id-in-flight": 'a request with the id "{request_id}" is under way; give each request an id of its own',
    "id-waiting": 'a request with the id "{request_id}" is waiting already; give each request an id of its own',
    "ordering-failed": "it cannot be put in order: {error}",
    "undecided": "it could not be decided: {error}",
    "instance-failed": _instance_failed,
    "client-gone": "the client went away",
    "stopped-for-priority": "stopped while it was served: work of priority {by_priority} could not start, and this "
    "request has priority {priority}; send it again later, or with a priority of 0 or more",
    "not-taking-requests": "shutting down: nothing new is taken; send it elsewhere",
    "shutting-down": "the gateway is shutting down; send it again to another one",
    "cut-off": "{text}",
    # Why a worker has no place for an instance
    "label-differs": Phrase("label", _label_mismatch),
    "not-chosen-by-hand": Phrase("not chosen by hand"),
    "text": "{text}",
    # Control and scaling
}
