"""A scaling policy that is tried: asked for one deployment, or for an application whose nodes all look the same."""

import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, get_type_hints

import msgspec

from pointsman.lab.check.report import Watch
from pointsman.lab.check.sights import PLAIN
from pointsman.scaling import ApplicationView, DeploymentView, ask, by_node

NODES = ("first", "second")
"""Of an application: the same view twice."""


class PolicyUnderTest:
    """One fresh policy. Whatever it does, an answer comes back, or nothing ever does and the watch sees it."""

    def __init__(self, policy: object, for_application: bool, watch: Watch) -> None:
        self._policy, self._for_application, self._watch = policy, for_application, watch

    def answers(self, view: DeploymentView) -> Mapping[str, object]:
        """Its answer, or one for each node."""
        if not self._for_application:
            return {"": _asked(self._policy, view, self._watch)}
        nodes = {node: msgspec.structs.replace(view, name=node) for node in NODES}
        seen = ApplicationView(name="app", now=view.now, deployments=nodes, state=view.state)
        return by_node(_asked(self._policy, seen, self._watch), NODES)


class Fresh:
    """Makes policies to be tried, and finds out what they are asked for."""

    def __init__(self, build: Callable[[], object], watch: Watch) -> None:
        self._build, self._watch = build, watch
        self.for_application = False

    def __call__(self) -> PolicyUnderTest:
        return PolicyUnderTest(self._made(), self.for_application, self._watch)

    def recognise(self) -> None:
        """It is for a whole application if its annotations say so; without any it is asked for one deployment, and then
        it is if it looks for `view.deployments`, or answers with a mapping."""
        policy = self._made()
        hints = _hints(policy)
        if {ApplicationView, DeploymentView} & set(hints):
            self.for_application = ApplicationView in hints
            return
        answer = _asked(policy, msgspec.structs.replace(PLAIN, state={}), self._watch)
        self.for_application = isinstance(answer, Mapping) or _missed(answer, "deployments")

    def _made(self) -> object:
        with self._watch.answering():
            return self._build()


Build: TypeAlias = Callable[[], PolicyUnderTest]


def is_scaling_policy(subject: object) -> bool:
    """An object with desired_replicas, or a function, which can be nothing else."""
    return hasattr(subject, "desired_replicas") or (callable(subject) and not isinstance(subject, type))


def _asked(policy: object, view: DeploymentView | ApplicationView, watch: Watch) -> object:
    with watch.answering():
        try:
            return ask(policy, view)
        except KeyboardInterrupt as error:
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                raise  # somebody pressed Ctrl-C
            return error
        except BaseException as error:  # whatever else ends a program
            return error


def _missed(answer: object, name: str) -> bool:
    """Whether it looked for this in the view of a deployment, where it is not."""
    return isinstance(answer, AttributeError) and answer.name == name and isinstance(answer.obj, DeploymentView)


def _hints(policy: object) -> list[Any]:
    """The types of what it takes, as far as it says them."""
    method = getattr(policy, "desired_replicas", policy)
    try:
        hints = get_type_hints(getattr(method, "func", method))
    except (NameError, TypeError):  # nothing can be said about its types
        return []
    return [hint for name, hint in hints.items() if name != "return"]
