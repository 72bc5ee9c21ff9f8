"""A scaling policy under test: called for one deployment, or for an application whose nodes all have the same view."""

import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, get_type_hints

import msgspec

from pointsman.lab.check.report import CheckListener
from pointsman.lab.check.scaling_cases import DEFAULT_VIEW
from pointsman.scaling import ApplicationView, DeploymentView, by_node, invoke

NODES = ("first", "second")
"""Of an application."""


class PolicyUnderTest:
    """One fresh policy. An exception is an answer, too."""

    def __init__(self, policy: object, for_application: bool, listener: CheckListener) -> None:
        self._policy, self._for_application, self._listener = policy, for_application, listener

    def answers(self, view: DeploymentView) -> Mapping[str, object]:
        """Its answer, or one for each node."""
        if not self._for_application:
            return {"": _answer(self._policy, view, self._listener)}
        nodes = {node: msgspec.structs.replace(view, name=node) for node in NODES}
        whole = ApplicationView(name="app", now=view.now, deployments=nodes, state=view.state)
        return by_node(_answer(self._policy, whole, self._listener), NODES)


class PolicyFactory:
    """Builds fresh policies, and finds out whether they are for a deployment or for an application."""

    def __init__(self, build: Callable[[], object], listener: CheckListener) -> None:
        self._build, self._listener = build, listener
        self.for_application = False

    def __call__(self) -> PolicyUnderTest:
        return PolicyUnderTest(self._policy(), self.for_application, self._listener)

    def recognise(self) -> None:
        """Annotations decide. A policy without annotations is called for one deployment; it is for an application if it
        reads `view.deployments` or returns a mapping."""
        policy = self._policy()
        hints = _hints(policy)
        if {ApplicationView, DeploymentView} & set(hints):
            self.for_application = ApplicationView in hints
            return
        answer = _answer(policy, msgspec.structs.replace(DEFAULT_VIEW, state={}), self._listener)
        self.for_application = isinstance(answer, Mapping) or _misses(answer, "deployments")

    def _policy(self) -> object:
        with self._listener.time_limit():
            return self._build()


BuildScaling: TypeAlias = Callable[[], PolicyUnderTest]


def is_scaling_policy(subject: object) -> bool:
    """Whether it has desired_replicas, or is a function: no other kind of plugin is one."""
    return hasattr(subject, "desired_replicas") or (callable(subject) and not isinstance(subject, type))


def _answer(policy: object, view: DeploymentView | ApplicationView, listener: CheckListener) -> object:
    with listener.time_limit():
        try:
            return invoke(policy, view)
        except KeyboardInterrupt as error:
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                raise  # Ctrl-C
            return error
        except BaseException as error:
            return error


def _misses(answer: object, name: str) -> bool:
    """Whether the policy failed because the view of a deployment has no such attribute."""
    return isinstance(answer, AttributeError) and answer.name == name and isinstance(answer.obj, DeploymentView)


def _hints(policy: object) -> list[Any]:
    """The types of its parameters, as far as they are annotated."""
    method = getattr(policy, "desired_replicas", policy)
    try:
        hints = get_type_hints(getattr(method, "func", method))
    except (NameError, TypeError):
        return []
    return [hint for name, hint in hints.items() if name != "return"]
