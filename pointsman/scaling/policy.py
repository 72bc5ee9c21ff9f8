"""Scaling policies: what they are, how they are called, and what their answers mean."""

import inspect
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping, MutableMapping
from copy import deepcopy
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from pointsman.errors import PluginError, UnknownName
from pointsman.reasons import Reason
from pointsman.render.text import one_line
from pointsman.selection.plugins import kebab_case

# What a policy sees


class Window(msgspec.Struct, frozen=True):
    """One quantity over a time window that ends now. All statistics are None if there are no samples."""

    seconds: float
    mean: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    last: float | None = None
    count: int = 0


class Rate(msgspec.Struct, frozen=True):
    """Arrivals in one bin of the history."""

    began: float
    """Start of the bin, in seconds since the epoch."""
    per_second: float


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about one deployment. Numbers that were not measured are None."""

    name: str
    now: float
    """Seconds since the epoch."""
    replicas: int
    """Ready replicas."""
    starting: int = 0
    """Replicas that were launched, or that wait for a restart or a place."""
    unplaced: int = 0
    """How many of those replicas have no place because the fleet is full."""
    target: int
    min_replicas: int = 0
    max_replicas: int = 1
    max_concurrency: int | None = None
    """Requests that one replica runs at once."""
    ongoing: float = 0.0
    """Requests that run now. `queued` are those that wait. Windows of the last 30 s, 5 min and 1 h follow."""
    queued: float = 0.0
    ongoing_windows: Mapping[float, Window] = {}
    queued_windows: Mapping[float, Window] = {}
    arrivals_per_s: Mapping[float, float] = {}
    """Requests per second, by length of window in seconds: 30, 300, 3600."""
    history: tuple[Rate, ...] = ()
    """Arrivals in bins of equal length, oldest first (default 14 days)."""
    bin_s: float = 600.0
    """Length of a bin of the history."""
    ttft_ms: Window = Window(300.0)
    """Time to first token, time per token and total latency of requests that ended in the last 5 minutes."""
    tpot_ms: Window = Window(300.0)
    latency_ms: Window = Window(300.0)
    slo_attainment: float | None = None
    """Share of deadlines that requests met, over the last 5 minutes."""
    kv_usage: Window = Window(300.0)
    """Share of the KV cache in use, mean over replicas, 0 to 1."""
    gpu_usage: Window = Window(300.0)
    """Share of time in which the GPUs of a replica compute, mean over replicas, 0 to 1."""
    tokens_per_s: float | None = None
    """Input and output tokens, over the last 5 minutes."""
    metrics: Mapping[str, Window] = {}
    """Custom metrics: recorded by replicas (`pm.record_metric`) or read from Prometheus."""
    start_up_s: float | None = None
    """Median time from launch to ready; None if no start was seen."""
    cost_per_replica_hour: float | None = None
    since_up_s: float | None = None
    """Time since the target last went up; in `since_down_s`, since it last went down. None if it never did."""
    since_down_s: float | None = None
    idle_s: float | None = None
    """Time since the last request; None if there are requests now, or if there never was a request."""
    state: MutableMapping[str, Any] = {}
    """Plain data that the policy may change; kept between calls and across restarts."""

    @property
    def load(self) -> float:
        """Requests that run or wait."""
        return self.ongoing + self.queued


class ApplicationView(msgspec.Struct, frozen=True, kw_only=True):
    """All deployments of one application, by node."""

    name: str
    now: float
    deployments: Mapping[str, DeploymentView]
    state: MutableMapping[str, Any] = {}


MAX_REPLICAS = 1_000_000
"""An answer above this is a mistake."""
MAX_TEXT = 500
"""Characters of a policy's own text that are kept."""
MAX_STATE_BYTES = 64 * 1024
"""`view.state` is copied for each call and saved often."""


class Wish(msgspec.Struct, frozen=True):
    """How many replicas a policy wants, and why. A policy may return a plain number instead."""

    replicas: int
    why: str = ""
    refused: str = ""
    """What the policy would have wanted but does not allow itself, such as replicas beyond a budget."""


@runtime_checkable
class ScalingPolicy(Protocol):
    """Decides how many replicas a deployment should have.

    A policy is called at an interval, on its own thread. It must not block, and must keep its state in `view.state`.
    The guard bounds, delays and records the answers.
    """

    def desired_replicas(self, view: DeploymentView) -> "int | Wish": ...


@runtime_checkable
class ApplicationScalingPolicy(Protocol):
    """A policy for all nodes of an application at once. Nodes that it leaves out keep their targets."""

    def desired_replicas(self, view: ApplicationView) -> "Mapping[str, int | Wish]": ...


PolicyFunction: TypeAlias = Callable[[Any], Any]


class TooSlow(msgspec.Struct, frozen=True):
    """Instead of an answer: the call took longer than its time limit."""

    seconds: float
    """How long the call has taken so far."""


class StateTooLarge(msgspec.Struct, frozen=True):
    """Instead of an answer: the policy wrote too much into `view.state`."""

    size_bytes: int
    limit_bytes: int


class Stay(msgspec.Struct, frozen=True):
    """The policy of an application left this node out."""


# Answers


def parse_answer(answer: object, time_limit_s: float = 0.5) -> Wish | Stay | Reason:
    """A wish for a whole number of replicas, or what is wrong with the answer."""
    if isinstance(answer, Stay):
        return answer
    if isinstance(answer, TooSlow):
        taken_s = float(f"{answer.seconds:.3g}")
        longer = answer.seconds > time_limit_s and f"{taken_s:g}" != f"{time_limit_s:g}"
        return Reason("policy-too-slow", {"limit_s": time_limit_s, "taken_s": taken_s if longer else None})
    if isinstance(answer, StateTooLarge):
        size, limit = (round(size / 1024) for size in (answer.size_bytes, answer.limit_bytes))
        return Reason("policy-state-too-large", {"size_kib": size, "limit_kib": limit})
    if isinstance(answer, BaseException):
        kind = type(answer).__name__
        text = one_line(f"raised {kind}: {_message(answer)}", MAX_TEXT).rstrip(": ")
        return Reason("policy-raised", {"error": kind, "text": text})
    wish = answer if isinstance(answer, Wish) else Wish(answer)  # type: ignore[arg-type]
    replicas = _whole_number(wish.replicas)
    if replicas is None or not 0 <= replicas <= MAX_REPLICAS:
        found = f"a Wish for {_shown(wish.replicas)}" if wish is answer else _shown(answer)
        return Reason("policy-answer-invalid", {"found": found, "max": MAX_REPLICAS})
    return Wish(replicas, _text(wish.why), _text(wish.refused))


def by_node(answer: object, nodes: Collection[str]) -> dict[str, object]:
    """The answer of an application's policy, by node. An answer that makes no sense counts for every node."""
    if isinstance(answer, Mapping):
        unknown = [name for name in answer if name not in nodes]
        if not unknown:
            return {node: answer.get(node, Stay()) for node in nodes}
        answer = UnknownName("node", str(unknown[0]), nodes)
    elif not isinstance(answer, BaseException | TooSlow | StateTooLarge):
        answer = TypeError(f"an application's policy returns a number for each node, found {type(answer).__name__}")
    return dict.fromkeys(nodes, answer)


def _whole_number(value: object) -> int | None:
    """3, 3.0 and the integers of other libraries; None for anything else, including True and 2.5."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # a user's object may raise anything
        return None


def _shown(value: object) -> str:
    try:
        return one_line(reprlib.repr(value), MAX_TEXT)
    except Exception:
        return f"a {type(value).__name__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def _text(value: object) -> str:
    return one_line(value, MAX_TEXT) if isinstance(value, str) else ""


# Calls


def invoke(policy: object, view: DeploymentView | ApplicationView) -> object:
    """What the policy returns, or the exception that it raises."""
    try:
        answer = _callable(policy)(view)
    except (Exception, SystemExit) as error:
        return error
    if inspect.iscoroutine(answer):
        answer.close()
        return TypeError(f"{policy_name(policy)} is async; a scaling policy is a plain function that does not wait")
    return answer


def invoke_with_state(policy: object, view: DeploymentView | ApplicationView) -> object:
    """The same as `invoke`, but raises `StateTooLarge` if the policy has written too much into `view.state`."""
    answer = invoke(policy, view)
    size = state_size(view.state)
    return StateTooLarge(size, MAX_STATE_BYTES) if size > MAX_STATE_BYTES else answer


def invoke_application(policy: object, view: ApplicationView) -> dict[str, object]:
    """What the policy of an application answers, by node."""
    return by_node(invoke(policy, view), view.deployments)


def invoke_inner(policy: object, view: DeploymentView, key: str) -> Wish:
    """What a policy inside another policy wants. `key` names its part of `view.state`. Raises on a bad answer."""
    state = view.state.setdefault(key, {})
    answer = parse_answer(invoke(policy, msgspec.structs.replace(view, state=state)))
    if isinstance(answer, Wish):
        return answer
    raise PluginError(policy_name(policy), str(answer) if isinstance(answer, Reason) else "gave no answer")


def policy_name(policy: object) -> str:
    """The name of a policy, such as target-ongoing for a TargetOngoing. A function has its own name."""
    own: Any = getattr(policy, "__name__", None)
    return own if isinstance(own, str) else kebab_case(type(policy).__name__)


def _callable(policy: object) -> Any:
    method = getattr(policy, "desired_replicas", None)
    if method is None and not callable(policy):
        raise PluginError(policy_name(policy), "is not a scaling policy: it has no desired_replicas(view)")
    return policy if method is None else method


# State


def state_size(state: Mapping[str, Any]) -> int:
    """Bytes of a policy's state when it is saved. Values that cannot be saved do not count."""
    try:
        return len(msgspec.json.encode(dict(state)))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return len(msgspec.json.encode(savable_state(state)))


def savable_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are plain data. Others are lost when the process ends."""
    kept: dict[str, Any] = {}
    for name, value in list(state.items()):  # a copy, as a call that is too slow may still write
        try:
            kept[str(name)] = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError):
            continue
    return kept


def restored(saved: object, kind: Any) -> Any:
    """Saved data as this type; None if it was saved by another version."""
    try:
        return msgspec.convert(saved, kind)
    except msgspec.ValidationError:
        return None


def copy_state(state: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A copy that a policy may change on its thread. The same object if it cannot be copied."""
    try:
        return deepcopy(state)
    except Exception:  # a user's object may raise anything
        return state
