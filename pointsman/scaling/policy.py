"""What a scaling policy is: an object with one method, or a plain function."""

import inspect
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping, MutableMapping
from copy import deepcopy
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from pointsman.errors import PluginError, UnknownName
from pointsman.render.text import one_line
from pointsman.scaling.view import ApplicationView, DeploymentView
from pointsman.selection.plugins import kebab_case


class Wish(msgspec.Struct, frozen=True):
    """What a policy wants, and why in its own words. A bare number will do as well."""

    replicas: int
    why: str = ""
    refused: str = ""
    """What it would have wanted and does not allow itself, such as what is beyond a budget."""


@runtime_checkable
class ScalingPolicy(Protocol):
    """Says how many replicas it wants. It is called every few seconds, on a thread of its own; it must not block, and
    keeps what it must remember in `view.state`. The guard bounds, delays and records what it says."""

    def desired_replicas(self, view: DeploymentView) -> "int | Wish": ...


@runtime_checkable
class ApplicationScalingPolicy(Protocol):
    """The same for all nodes of an application at once; nodes that it leaves out stay as they are."""

    def desired_replicas(self, view: ApplicationView) -> "Mapping[str, int | Wish]": ...


PolicyFunction: TypeAlias = Callable[[Any], Any]


# What a policy answered, understood: a wish, or in words what is wrong with it.


MOST = 1_000_000
"""More replicas than this is a mistake, whoever asks for them."""
LONGEST = 500
"""Characters of a policy's own words."""


class TooSlow(msgspec.Struct, frozen=True):
    """The answer came too late to count, or has not come yet."""

    seconds: float


class TooMuch(msgspec.Struct, frozen=True):
    """It has written down more in `view.state` than is kept for it."""

    size_bytes: int
    limit_bytes: int


class Stay(msgspec.Struct, frozen=True):
    """Nothing was said about this deployment: it stays as it is."""


def understood(answer: object, time_limit_s: float = 0.5) -> Wish | Stay | str:
    """A wish with a whole number, or what is wrong."""
    if isinstance(answer, Stay):
        return answer
    if isinstance(answer, TooSlow):
        return _late(answer.seconds, time_limit_s)
    if isinstance(answer, TooMuch):
        size, limit = (f"{bytes_ / 1024:.0f} KiB" for bytes_ in (answer.size_bytes, answer.limit_bytes))
        return f"wrote {size} into view.state; it may keep {limit}, and what it wrote this time is forgotten"
    if isinstance(answer, BaseException):
        return one_line(f"raised {type(answer).__name__}: {_text(answer)}", LONGEST).rstrip(": ")
    wish = answer if isinstance(answer, Wish) else Wish(answer)  # type: ignore[arg-type]
    replicas = _whole(wish.replicas)
    if replicas is None or not 0 <= replicas <= MOST:
        found = f"a Wish for {_shown(wish.replicas)}" if wish is answer else _shown(answer)
        return f"returned {found}; it must be a whole number of replicas from 0 to {MOST:,}, or a Wish for one"
    return Wish(replicas, _said(wish.why), _said(wish.refused))


def _late(seconds: float, time_limit_s: float) -> str:
    """How long it has taken so far, unless that is only just too long."""
    limit = f"{time_limit_s:g} s"
    so_far = f"{seconds:.3g} s"
    if seconds <= time_limit_s or so_far == limit:
        return f"took more than {limit} (timeLimit)"
    return f"took {so_far}; it may take {limit} (timeLimit)"


def _whole(value: object) -> int | None:
    """3, 3.0 and the whole numbers of other libraries; neither True nor 2.5."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # an object may do anything when it is asked
        return None


def _shown(value: object) -> str:
    try:
        return one_line(reprlib.repr(value), LONGEST)
    except Exception:
        return f"a {type(value).__name__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def _said(words: object) -> str:
    return one_line(words, LONGEST) if isinstance(words, str) else ""


# Asks policies. Whatever they do, an answer comes back; the guard says what it is worth.


def ask(policy: object, view: DeploymentView | ApplicationView) -> object:
    """What an object or a plain function answers, or the exception that it raised."""
    try:
        answer = _call(policy)(view)
    except (Exception, SystemExit) as error:
        return error
    if inspect.iscoroutine(answer):
        answer.close()
        return TypeError(f"{policy_name(policy)} is async; a scaling policy is a plain function that does not wait")
    return answer


def ask_application(policy: object, view: ApplicationView) -> dict[str, object]:
    """What a policy for a whole application answers, by node, for the guard of each."""
    return by_node(ask(policy, view), view.deployments)


def by_node(answer: object, nodes: Collection[str]) -> dict[str, object]:
    """An answer for a whole application, taken apart: nodes that are left out stay, and a bad answer is bad for all."""
    if isinstance(answer, Mapping):
        unknown = [name for name in answer if name not in nodes]
        if not unknown:
            return {node: answer.get(node, Stay()) for node in nodes}
        answer = UnknownName("node", str(unknown[0]), nodes)
    elif not isinstance(answer, BaseException | TooSlow | TooMuch):
        answer = TypeError(f"an application's policy returns a number for each node, found {type(answer).__name__}")
    return dict.fromkeys(nodes, answer)


def ask_inner(policy: object, view: DeploymentView, place: str) -> Wish:
    """What a policy inside another one wants, with notes of its own. Raises if it breaks its contract."""
    notes = view.state.setdefault(place, {})
    wish = understood(ask(policy, msgspec.structs.replace(view, state=notes)))
    if isinstance(wish, Wish):
        return wish
    raise PluginError(policy_name(policy), wish if isinstance(wish, str) else "said nothing")


def policy_name(policy: object) -> str:
    """target-ongoing for a TargetOngoing; a function's own name for a function."""
    own: Any = getattr(policy, "__name__", None)
    return own if isinstance(own, str) else kebab_case(type(policy).__name__)


def _call(policy: object) -> Any:
    method = getattr(policy, "desired_replicas", None)
    if method is None and not callable(policy):
        raise PluginError(policy_name(policy), "is no scaling policy: it has no desired_replicas(view)")
    return policy if method is None else method


# What a policy writes down between two calls: plain data, and not much, as it is copied and saved all the time.


MOST_BYTES = 64 * 1024


def ask_with_notes(policy: object, view: DeploymentView | ApplicationView) -> object:
    """As `ask`; but whoever has written down too much has said nothing."""
    answer = ask(policy, view)
    size = size_of(view.state)
    return TooMuch(size, MOST_BYTES) if size > MOST_BYTES else answer


def size_of(notes: Mapping[str, Any]) -> int:
    """Bytes that it takes to save them; what cannot be saved takes none."""
    try:
        return len(msgspec.json.encode(dict(notes)))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return len(msgspec.json.encode(plain(notes)))


def plain(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The notes that can be saved; whatever else a policy put there is lost with the process."""
    kept: dict[str, Any] = {}
    for name, note in list(notes.items()):  # a policy that takes too long may still be writing
        try:
            kept[str(name)] = msgspec.json.decode(msgspec.json.encode(note))
        except (TypeError, ValueError, OverflowError, RecursionError):
            continue
    return kept


def copied(notes: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For a policy to write to on its thread, while others may read these."""
    try:
        return deepcopy(notes)
    except Exception:  # something of its own that cannot be copied; then it has to be careful itself
        return notes
