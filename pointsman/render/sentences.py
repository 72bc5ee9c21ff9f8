"""Sentences for operators: one per code of a `Reason`.

A `Template` is a format string over the facts, or a function of the facts if the grammar needs more. If the facts of a
reason have `text`, the reason is shown as that text. This is so for all reasons from users' plugins. The codes are part
of the API; docs/reasons.md lists them.
"""

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, TypeAlias

from pointsman.render.grammar import (
    Facts,
    Phrase,
    Template,
    chosen,
    closed_for,
    either,
    filled,
    given_up,
    headroom,
    in_flight,
    instance_failed,
    label_mismatch,
    never_starts,
    no_program,
    over_budget,
    phase_changed,
    remedied,
    shortage,
    stands_out,
    too_busy,
    waited,
    weighed,
    words,
)
from pointsman.render.plane_sentences import OF_PLANE
from pointsman.render.text import (
    OBSTACLES,
    allowances,
    attribute_found,
    moves,
    one_line,
    place_taken,
    quantity,
    too_few_gpus,
    too_little_room,
)

Group: TypeAlias = Any
"""Rejections with one code: a `Counted`, or its form in JSON. `Counted` is in pointsman.reasons, which imports this
module."""


def sentence(code: str, facts: Facts) -> str:
    if "text" in facts:
        return str(facts["text"])
    found = SENTENCES.get(code, code)
    if isinstance(found, Phrase):
        detail = _rendered(found.detail, facts)
        return f"{found.kind}: {detail}" if detail else found.kind
    return _rendered(found, facts)


def kind(code: str, facts: Facts) -> str:
    """The reason without its figures. Summaries count reasons by their kind."""
    found = SENTENCES.get(code)
    return found.kind if isinstance(found, Phrase) and "text" not in facts else sentence(code, facts)


def detail(code: str, facts: Facts) -> str:
    """The figures of the reason alone. Empty if the reason has no figures."""
    found = SENTENCES.get(code)
    return _rendered(found.detail, facts) if isinstance(found, Phrase) and "text" not in facts else ""


def codes(told: Mapping[str, Any]) -> list[str]:
    """The codes of a reason in JSON, and of the reasons among its facts. They tell what it says, without figures."""
    found = [str(told["code"])] if "code" in told else []
    for fact in told.values():
        for one in fact if isinstance(fact, list) else [fact]:
            found += codes(one) if isinstance(one, Mapping) else []
    return found


def shortened(fact: Any, limit: int) -> Any:
    """Facts from JSON, with each text cut to one line of at most `limit` characters. A reason among the facts becomes
    text."""
    match fact:
        case str():
            return one_line(fact, limit)
        case {"code": str(code), "facts": facts, **others} if others.keys() <= {"text"}:
            return sentence(code, shortened(facts, limit))
        case Mapping():
            return {name: shortened(one, limit) for name, one in fact.items()}
        case list():
            return [shortened(one, limit) for one in fact]
    return fact


def group_counts(groups: Iterable[Group]) -> str:
    """Groups by their kinds, such as "9 serving another model, 3 full"."""
    return ", ".join(f"{group.count} {_group_kind(group)}" for group in groups)


def _group_kind(group: Group) -> str:
    if group.alike or "text" not in group.facts:
        return kind(group.code, group.facts)
    return f"{group.code} ({group.facts['text']}, ...)"


def _rendered(template: Template, facts: Facts) -> str:
    try:
        return filled(template, {name: _told(fact) for name, fact in facts.items()})
    except (LookupError, TypeError, ValueError):  # a plugin gave a reason with one of our codes, but with other facts
        return ", ".join(f"{name} {value}" for name, value in facts.items())


def _told(fact: Any) -> Any:
    """A fact as a template shows it. A reason that was stored or sent as JSON becomes its text."""
    match fact:
        case {"code": str(code), "facts": facts, **others} if others.keys() <= {"text"}:
            return sentence(code, facts)
        case list():
            return [_told(one) for one in fact]
    return fact


def _none_chosen(facts: Facts, noun: str = "candidate") -> str:
    return "; ".join(
        f"{quantity(run['candidates'], noun)}: {group_counts(run['rejected'])}"
        if run["candidates"]
        else f"there are no {noun}s"
        for run in facts["profiles"]
    )


def _no_instance(facts: Facts) -> str:
    model, cause = facts["model"], facts["cause"]
    why = _none_chosen(cause.facts, "instance") if cause.code == "none-chosen" else cause
    wanted = f'"{model}"' if model else "this request"
    return f"no instance can take {wanted}: {why}"


def _with_unavailability(template: Template, advice: str = "") -> Callable[[Facts], str]:
    """Append what is known about the lack of instances, or `advice` if nothing is known."""

    def render(facts: Facts) -> str:
        return "; ".join(filter(None, [_rendered(template, facts), str(facts.get("absence") or advice)]))

    return render


# Placement


def _groups(facts: Facts) -> list[Group]:
    """Rejections by code. A group in JSON becomes an object with the same attributes."""
    return [SimpleNamespace(**one) if isinstance(one, Mapping) else one for one in facts.get("rejected", ())]


def _in_the_way(facts: Facts) -> str:
    """The full reason if it is the same for all workers. Otherwise, for each kind of reason, the number of workers and
    the first worker's figures."""
    groups = _groups(facts)
    if not groups:
        return str(facts["because"])
    if len(groups) == 1 and groups[0].alike:
        return sentence(groups[0].code, groups[0].facts)
    return ", ".join(f"{group.count} {_group_kind(group)}{_figures(group)}" for group in groups)


def _figures(group: Group) -> str:
    figures = detail(group.code, group.facts)
    return f" ({figures if group.alike else f'{group.candidate}: {figures}'})" if figures else ""


def _no_tier_fits(facts: Facts) -> str:
    parts = [("not considered", facts["not_considered"]), *((one["tier"], one["rejected"]) for one in facts["tiers"])]
    return "; ".join(f"{name}: {group_counts(groups)}" for name, groups in parts if groups)


_LARGEST_FREE = "needs {needed_bytes}, the largest free is {largest_free_bytes}"
_NO_OFFLOAD = "not allowed: the engine{} cannot offload a part"
_ROLE = either("role", None, "llm-d.ai/role is absent", "llm-d.ai/role is {role}")
_COMES = "is running, starting or expected"
_HELD = "held back: the pool is saturated to {saturation:.0%}"
_LATE = "not ready {start_timeout_s:g} s after its launch"

NOT_ALLOWED: Mapping[str, Template | Phrase] = {
    "needs-several-gpus": Phrase("not allowed: the model must be split across several GPUs"),
    "uses-no-gpu": Phrase("not allowed: the model uses no GPU"),
    "cannot-be-divided": Phrase("not allowed: the model cannot be split across GPUs"),
    "several-gpus-off": Phrase("not allowed: severalGpus is off"),
    "engine-has-no-tensor-parallelism": Phrase("not allowed: the engine has no tensor parallelism"),
    "several-workers-off": Phrase("not allowed: severalWorkers is off"),
    "engine-runs-on-one-worker": Phrase("not allowed: the engine cannot span workers"),
    "needs-several-gpus-which-are-off": Phrase("not allowed: the model must be split across GPUs (severalGpus is off)"),
    "one-layer-only": Phrase("not allowed: the model has one layer"),
    "partial-offload-off": Phrase("not allowed: partialOffload is off"),
    "engine-cannot-offload": either("engine", "", _NO_OFFLOAD.format(""), _NO_OFFLOAD.format(" {engine}")),
    "tier-not-listed": Phrase("not allowed: not among placement.tiers", lambda facts: ", ".join(facts["tiers"])),
    "demands-gpus": Phrase("not allowed: the instance must have another number of GPUs", "{gpus}"),
    "size-does-not-divide": Phrase(
        "not allowed: the tensor parallel size does not divide the model", "{size} is demanded; sizes: {sizes}"
    ),
    "copies-on-one-worker": Phrase("not allowed: copies of a data parallel instance share a worker", "{copies} copies"),
    "gpu-layers-set": Phrase(
        "not allowed: the engine's parameters set how many layers GPUs hold", "{gpu_layers} of {layers} layers"
    ),
    "means-gpus": Phrase("not allowed: the placement asks for GPUs (to run without, set cpu)"),
    "engine-needs-gpu": Phrase("not allowed: the engine needs a GPU (cpu is off)"),
}
"""Why an ask excludes a tier."""

SENTENCES: Mapping[str, Template | Phrase] = {
    # Why an instance cannot take a request
    "other-model": Phrase("serving another model"),
    "not-accepting": Phrase("not accepting requests"),
    "paused": Phrase("paused", closed_for),
    "silent": Phrase("silent", "no byte for {quiet_s:.2g} s, and no answer to a probe within {unanswered_s:.2g} s"),
    "ejected": Phrase("ejected", closed_for),
    "full": Phrase("full", "{load:g} of {limit:g} requests"),
    "over-budget": Phrase("over budget", over_budget),
    "too-slow": Phrase("too slow", "{expected_ms:.0f} ms expected, {left_ms:.0f} ms left"),
    "labels-differ": Phrase("labels do not match", label_mismatch),
    "not-for-decode": Phrase("not for decode", _ROLE),
    "not-for-prefill": Phrase("not for prefill", _ROLE),
    "not-for-encode": Phrase("not for encode", _ROLE),
    "prompt-not-cached": Phrase("little of the prompt cached", "{cached:.0%}"),
    "much-busier": Phrase("much busier than another", "{load:g} requests, {least:g} there"),
    "session-elsewhere": Phrase("session is elsewhere", "on {instance}"),
    "exploring": Phrase("exploring endpoints that may be late"),
    "may-be-late": Phrase("may be late", headroom),
    "prompt-out-of-range": Phrase("prompt out of range", "{tokens} tokens, {label} is {range}"),
    "too-busy": Phrase("too busy", too_busy),
    "far-from-peer": Phrase("far from the endpoint of another stage", "not the same {level}"),
    "attribute-differs": Phrase("an attribute is not as demanded", attribute_found),
    "saturated": Phrase(
        "saturated or not measured lately",
        "{waiting:g} waiting (must be below {max_waiting:g}), KV cache {kv_usage:.0%} full "
        "(below {max_kv_usage:.0%}), measured {age_s:.3g} s ago (at most {max_age_s:g})",
    ),
    "concurrency-limit": Phrase("full", in_flight),
    # Why no instance was chosen
    "none-chosen": _none_chosen,
    "no-instance-can-take": _with_unavailability(_no_instance),
    "beyond-budget": "it would cost {cost:.3g} on the cheapest of {instances} instances; its budget is {budget:.3g}",
    "budget-not-judged": "its budget cannot be judged, as no instance has a price; set price.perGpuHour or "
    "price.perInstanceHour of the deployment",
    "no-profile-ran": "no profile was run",
    "not-one-profile": "one profile result was expected, found {profiles}",
    "profile-chose-none": 'profile "{profile}" chose no endpoint',
    "profile-handler": "{text}",
    "policy-failed": "{error}",
    "held-back": either(
        "unmeasured", 0, _HELD, _HELD + "; {unmeasured} of {instances} instances have never been measured"
    ),
    "left-waiting": 'policy "{policy}" left it waiting, although an instance could take it',
    "is-next": "it is next",
    "same-id-placed": "a request with the same id is placed",
    # Notes of a trace
    "failed-before": words("failed it before: {instances}"),
    "unknown-profile": words('no profile is named "{profile}"; header {header} may say {profiles}'),
    "expected-misses": weighed,
    "producer-failed": "{producer} failed: {error}",
    # Why an instance was chosen
    "best-of-profile": chosen('{policy}: best of {candidates} by profile "{rule}"'),
    "best-by-rule": chosen("{policy}: {rule} of {candidates}"),
    "policy": "{text}",
    # Why a decision of a user's policy was not carried out
    "decision-dropped": 'policy "{policy}" chose "{instance}", which was not carried out: {cause}',
    "stand-in-decided": "{stand_in} decided, not {policy}, which {cause}",
    "unknown-request": 'request "{request_id}" was not waiting, or was decided before',
    "unknown-instance": 'there is no instance "{instance}"',
    "instance-not-allowed": 'instance "{instance}" may not be chosen: {cause}',
    # Why a try failed
    "answered-error": "it answered {status}: {body}",
    "answer-not-json": "its answer is not JSON: {error}",
    "stream-without-data": "its stream has no data",
    "not-events": "its stream is not a stream of events: {found}",
    "stream-unfinished": "its stream ended without the end mark",
    "stream-stalled": "no event with data within {limit_s:g} s",
    "answer-stalled": "no more of the answer within {limit_s:g} s",
    "no-answer-in-time": "no answer within {limit_s:g} s",
    "no-connection": "{error}",
    "no-response": "{error}",
    "connection-reset": "the connection was reset",
    "does-not-fit": "the prompt and its answer do not fit",
    "left": "it left",
    "instance-gone": "it is gone",
    "replica-removed": "Serve removed the replica",
    "replica-full": "the replica is full",
    "reported": "{text}",
    # Why a step of a pipeline has no result
    "node-failed": 'node "{node}": {why}',
    "node-refused": "{text}",
    "code-raised": "{type}: {message}",
    "not-idempotent": '{instance} is gone, and "{deployment}" is not marked idempotent',
    "result-too-large": lambda facts: f"its result has more than {facts['limit_bytes'] >> 20} MiB",
    "answer-late": "it did not answer in time",
    "input-not-valid": "the input is not valid",
    "deadline-exceeded": "its deadline was exceeded",
    "request-late": "the deadline of the request was exceeded",
    "step-late": "its share of the request's time was used up",
    "step-stopped": "stopped: {why}",
    "another-step-failed": "another step failed",
    "client-disconnected": "the client has disconnected",
    "deployment-gone": 'deployment "{deployment}" is gone',
    "no-model": 'there is no model "{model}"{advice}',
    "arguments-not-plain": "{error}",
    "unreadable-result": "{error}",
    "answer-not-plain": "a part of the answer is not plain data: {error}",
    "no-such-part": "{error}",
    # Why a request was refused
    "shed": "shed by priority {priority}: saturation is {saturation:.2f}, so {odds:.0%} of such requests are denied",
    "shed-by-priority": "shed by priority {priority}: saturation is {saturation:.2f}, and at 1 or more only priority 0 "
    "and above is served; send it again later",
    "would-be-late": "would be late: none of {endpoints} endpoints is predicted to meet its latency objectives",
    "all-saturated": _with_unavailability("every instance is saturated"),
    "all-paused": either(
        "instances",
        1,
        "the only instance in service takes no requests for {left_s:.3g} s, at its own request",
        "all {instances} instances in service take no requests for {left_s:.3g} s, at their own request",
    ),
    "queue-full": lambda facts: f"the queue is full: {shortage(facts)}",
    "no-instance-queue-full": _with_unavailability(
        lambda facts: f"no instance is running, and the queue is full: {shortage(facts)}", "start an instance"
    ),
    "displaced": lambda facts: (
        f"displaced by higher-priority work: a request of priority {facts['by_priority']} needed the room of this one "
        f"of priority {facts['priority']} in a full queue: {shortage(facts)}; send it again later"
    ),
    "waited-too-long": waited("without an instance having room", "send less or add instances"),
    "none-expected": _with_unavailability(
        either("model", "", f"no instance {_COMES}", f'no instance of "{{model}}" {_COMES}')
    ),
    "no-instance-came": waited("and no instance is running", "start an instance"),
    "too-many-models": _with_unavailability('no instance serves "{model}", and requests wait for too many such models'),
    "deployment-removed": _with_unavailability(
        'deployment "{deployment}" was removed while this request waited; send it to another model'
    ),
    "id-in-flight": 'a request with the id "{request_id}" is in flight; use a unique id for each request',
    "id-waiting": 'a request with the id "{request_id}" is waiting; use a unique id for each request',
    "ordering-failed": "it cannot be ordered: {error}",
    "undecided": "scheduling failed inside the plane ({error}); its output says more",
    "instance-failed": instance_failed,
    "not-sent": "the gateway could not connect to {instance}, which is not at fault: {error}; send it again later",
    "client-gone": "the client went away",
    "stopped-for-priority": "stopped while running: work of priority {by_priority} could not start, and this "
    "request has priority {priority}; send it again later, or with a priority of 0 or more",
    "not-taking-requests": "shutting down: no new requests are accepted; send it to another gateway",
    "shutting-down": "the gateway is shutting down; send the request to another one",
    "cut-off": "{text}",
    "turned-away": "{text}",
    # Why a worker has no place for an instance
    "label-differs": Phrase("label mismatch", label_mismatch),
    "not-chosen-by-hand": Phrase("not chosen by hand"),
    "worker-not-ready": Phrase("not ready", "{status}"),
    "no-gpu-for-engine": Phrase(
        "no GPU for the engine",
        lambda facts: (
            f"it has {', '.join(facts['found']) or 'none'}, not {' or '.join(facts['wanted'])}; if the "
            "engine runs without one, set placement.cpu"
        ),
    ),
    "no-gpu": Phrase("no GPU"),
    "no-gpu-available": Phrase(
        "no GPU available", lambda facts: ", ".join(f"{count} {OBSTACLES[name]}" for name, count in facts.items())
    ),
    "too-few-cpus": Phrase("too few CPUs", "needs {needed_cpus:g}, {free_cpus:g} free"),
    "too-little-memory": Phrase("too little memory", words("needs {needed_bytes}, {free_bytes} free")),
    "no-room": Phrase("no room"),
    "no-room-on-one-gpu": Phrase("no room on one GPU", words(_LARGEST_FREE)),
    "too-few-gpus": Phrase("too few GPUs with room", too_few_gpus),
    "later-stage": Phrase("has a later stage"),
    "stages-elsewhere": Phrase("not needed", "the stages are elsewhere"),
    "too-little-room-in-all": Phrase("too little room in total", too_little_room),
    "no-room-for-a-layer": Phrase("no room for a layer", words(_LARGEST_FREE)),
    "too-little-memory-for-the-rest": Phrase(
        "too little memory for the other layers",
        words("with {gpu_layers} layers on a GPU needs {needed_bytes}, {free_bytes} free"),
    ),
    "no-such-worker": Phrase("chosen by hand, does not exist", 'no worker "{worker}"; did you mean "{nearest}"?'),
    "no-such-gpu": Phrase(
        "chosen by hand, does not exist", 'no GPU {gpu} of "{worker}"; did you mean {worker}/{nearest}?'
    ),
    **NOT_ALLOWED,
    # Why an instance has no place, and what would help
    "no-place": Phrase("no place", _in_the_way),
    "in-the-way": _in_the_way,
    "no-tier-fits": _no_tier_fits,
    "no-workers": "there are no workers",
    "largest-free-gpu": either(
        "gpus",
        1,
        words("needs {needed_bytes} on one GPU; largest free is {free_bytes} on {gpu}"),
        words("needs {needed_bytes} on each of {gpus} GPUs; largest free is {free_bytes} on {gpu}"),
    ),
    "fits-with-context": words("context {context:,} would fit on {on}"),
    "fits-with-allowance": allowances,
    "fits-without-gpu": words("if its engine runs without a GPU, set placement.cpu: then it would fit on {on}"),
    "fits-without-selector": words("without its label selector it would fit on {on}"),
    "fits-elsewhere": words("without the choice of workers and GPUs it would fit on {on}"),
    "fits-on-other-model": words("with any GPU model it would fit on {on}"),
    "fits-beside-others": words("if it is not exclusive it would fit on {on}"),
    "fits-with-fewer-cpus": words("with fewer than {cpus:g} CPUs it would fit on {on}"),
    "fits-after-stopping": words("stopping {instances} would make room on {on}"),
    "fits-after-moving": moves,
    # Where an instance is
    "place": place_taken,
    # Why an instance is in its current phase
    "preempted": "it makes room for {instance}, which has a higher priority",
    "place-awaited": "{deployment} waits for its place",
    "evicted-for": "{instance} makes room for {deployment}, which has requests and no instance",
    "start-timeout": either("probe", "", _LATE, _LATE + ": {probe}"),
    "drain-timeout": "not drained in {drain_timeout_s:g} s: {why}",
    "drained": "no request is in flight on it",
    "resources-lost": 'its resources on worker "{worker}" are gone',
    "worker-lost": 'worker "{worker}" is lost: {why}',
    "launch-failed": "could not be started: {why}",
    "not-launched": remedied("could not be started, for a reason of the plane: {why}"),
    "exited": "{why}",
    "probes-failed": either(
        "probes", 1, "did not answer a probe: {why}", "did not answer {probes} probes in a row: {why}"
    ),
    "requests-fail": "requests fail on it: {why}",
    "requests-fail-again": "requests fail on it, although probes do not: {why}",
    "out-of-reach": "{why}",
    "requests-and-probe-failed": "{before}; and a probe failed: {why}",
    "stands-out": stands_out,
    "not-ejected": "{why}; not ejected: {ready} are ready, {ejected} ejected (maxEjected {max_ejected:g})",
    "endpoint-silent": "does not answer: {why}",
    "not-ready-yet": "not ready yet: {probe}",
    "to-be-replaced": "to be replaced: {why}",
    "rollout-stopped": "rollout stopped: {why}; the earlier version still serves; deploy again to retry",
    "cannot-start": "{why}; then apply it again",
    "given-up": given_up,
    # What has changed
    "phase-changed": phase_changed,
    "documents-changed": "generation {generation}: {changes}",
    "target-changed": "{before} -> {after}",
    "operation": "{operation}: answered with {status}",
    # Why no further try to start an instance can succeed
    "no-program": no_program,
    "no-package": "the Python package {package} is not installed; {remedy}",
    "refuses-to-start": "{why}",
    "wrong-options": "its server does not take its options: {why}; correct the parameters of its engine",
    "port-taken": "it needs a port that another program has: {why}; stop that program, or choose another port",
    "unknown-model": "there is no such model: {why}",
    "no-engine-key": "{why}",
    # Why an instance is started, stopped or changed
    "drain-asked": "an operator asked for it to be drained",
    "shut-down": "the plane is stopping",
    "deployment-unwanted": 'deployment "{deployment}" was removed',
    "replica-count": either(
        "wanted", 1, "1 replica is wanted, {present} there", "{wanted} replicas are wanted, {present} there"
    ),
    "takes-over": "to take over from {instance}",
    "rollout-retried": "its stopped rollout is tried again",
    "tried-again": "it could not start, and is tried again",
    "recipe-differs": "it was started from another recipe",
    "changed": lambda facts: ", ".join("{field} {before} -> {after}".format(**one) for one in facts["changes"]),
    "endpoint-listed": "it is listed, at {url}",
    "endpoint-unlisted": "it is no longer listed",
    # Why no instance of a deployment takes requests
    "not-heard": "the plane has not said yet why none takes requests",
    "none-wanted": "its deployment has no instances and no endpoints now; an operator may add one",
    "no-place-yet": "there is no place for {instance} yet",
    "starting": "{instance} has been starting for {for_s} s",
    "restarting": either(
        "failures",
        1,
        "{instance} has failed once, and restarts in {restart_in_s} s",
        "{instance} has failed {failures} times, and restarts in {restart_in_s} s",
    ),
    "hindered": "{instance} could not be started yet, for a reason of the plane",
    "never-starts": never_starts,
    "endpoint-starting": "{instance} has not answered yet",
    "endpoint-down": either(
        "endpoints", 1, "{instance} does not answer", "none of its {endpoints} endpoints answers, such as {instance}"
    ),
    "in-phase": "{instance} is {phase}",
    **OF_PLANE,
}
