"""Asks policies. Whatever they do, an answer comes back; the guard says what it is worth."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from pointsman.errors import PluginError, UnknownName
from pointsman.scaling.answers import Stay, TooMuch, TooSlow, understood
from pointsman.scaling.policy import Wish
from pointsman.scaling.view import ApplicationView, DeploymentView
from pointsman.selection.plugins import kebab_case


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
