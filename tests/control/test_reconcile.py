"""Steps and their reasons, for the controller and for previews."""

import copy

import pytest

from pointsman.control.desired import Desired, DesiredDeployment, DesiredEndpoint, DesiredEngine
from pointsman.control.events import DrainAsked, Exited, PlaneStopping
from pointsman.control.instances import Instance, Phase
from pointsman.control.reconcile import between_recipes, reconcile
from pointsman.types import ExecutionInstance
from tests.control.worlds import World, adopted, deployment, server, servers, wish, with_lifecycle

V0, V1 = deployment(), deployment(version=1)
CHANGED = "engine.version 0 -> 1"


def instance(name: str, phase: Phase = Phase.READY, spec: DesiredDeployment = V0) -> Instance:
    serves = phase in (Phase.READY, Phase.UNHEALTHY)
    serving = ExecutionInstance(instance_id=name) if serves else None
    return Instance(id=name, spec=spec, recipe=spec.recipe, phase=phase, serving=serving)


@pytest.mark.parametrize(
    ("desired", "observed", "expected"),
    [
        (wish(), [], []),
        (wish(V0), [], [("start", "m-1", "1 replica is wanted, 0 there")]),
        (wish(V0), [instance("m-1")], []),
        (wish(V0), [instance("m-1", Phase.BACKING_OFF)], []),
        (
            wish(deployment(replicas=3)),
            [instance("m-2")],
            [
                ("start", "m-1", "3 replicas are wanted, 1 there"),
                ("start", "m-3", "3 replicas are wanted, 1 there"),
            ],
        ),
        (
            wish(V0),
            [instance("m-1", Phase.STARTING), instance("m-10"), instance("m-9")],
            [
                ("stop", "m-10", "1 replica is wanted, 3 there"),
                ("stop", "m-1", "1 replica is wanted, 3 there"),
            ],
        ),
        (wish(), [instance("m-1")], [("stop", "m-1", 'deployment "m" was removed')]),
        (
            wish(V1),
            [instance("m-1")],
            [("replace", "m-1", CHANGED), ("start", "m-2", "to take over from m-1")],
        ),
        (wish(V1), [instance("m-1", Phase.STARTING)], [("restart", "m-1", CHANGED)]),
        (wish(V1), [instance("m-1", Phase.BACKING_OFF)], [("restart", "m-1", CHANGED)]),
        (wish(V1), [instance("m-1", Phase.STOPPING)], [("restart", "m-1", CHANGED)]),
        (wish(V1), [instance("m-1"), instance("m-2", Phase.STARTING, V1)], [("replace", "m-1", CHANGED)]),
        (wish(V1), [instance("m-1"), instance("m-2", Phase.UNHEALTHY, V1)], [("replace", "m-1", CHANGED)]),
        (wish(V1), [instance("m-1"), instance("m-2", Phase.READY, V1)], [("stop", "m-1", CHANGED)]),
        (
            wish(deployment(max_concurrency=4, labels={"zone": "a"}, aliases=("chat", "small"))),
            [instance("m-1")],
            [("update", "m-1", "aliases none -> chat, small, max_concurrency none -> 4, label zone none -> a")],
        ),
        (
            wish(deployment(engine=None)),
            [instance("m-1")],
            [("stop", "m-1", "engine simulated -> none, engine.version 0 -> none")],
        ),
        (
            wish(deployment(replicas=2, version=1)),
            [instance("m-1")],
            [
                ("replace", "m-1", CHANGED),
                ("start", "m-2", "2 replicas are wanted, 1 there"),
                ("start", "m-3", "to take over from m-1"),
            ],
        ),
        (wish(servers(server())), [], [("add", "gpu", "it is listed, at http://gpu:1")]),
    ],
)
def test_the_next_steps(desired: Desired, observed: list[Instance], expected: list[tuple[str, str, str]]) -> None:
    before = copy.deepcopy(observed)
    assert [(step.what.value, step.subject, str(step.why)) for step in reconcile(desired, observed)] == expected
    assert observed == before


def test_everything_is_stopped_on_shutdown() -> None:
    [step] = reconcile(wish(V0), [instance("m-1")], shutting_down=True)
    assert (step.what.value, str(step.why)) == ("stop", "the plane is stopping")


def running(*deployments: DesiredDeployment) -> World:
    world = World()
    world.apply(*deployments)
    world.behave()
    return world


def preview(world: World, *deployments: DesiredDeployment) -> list[tuple[str, str, str]]:
    before = world.controller.instances()
    steps = world.controller.preview(wish(*deployments))
    assert world.controller.instances() == before
    return [(step.what.value, step.subject, str(step.why)) for step in steps]


def test_a_preview_of_the_first_desired_state() -> None:
    assert preview(World(), V0) == [("start", "m-1", "1 replica is wanted, 0 there")]


def test_a_preview_of_the_first_desired_state_after_an_adoption() -> None:
    world = World()
    world.tell(adopted("m-1", V0))
    world.tell(adopted("m-2", V1))
    assert preview(world, deployment(replicas=3, labels={"zone": "a"})) == [
        ("restart", "m-2", "engine.version 1 -> 0"),
        ("start", "m-3", "3 replicas are wanted, 2 there"),
    ]


def test_a_preview_of_the_current_state_is_empty() -> None:
    world = running(deployment(replicas=2))
    assert preview(world, deployment(replicas=2)) == []
    world.apply(deployment(replicas=2, version=1))
    assert preview(world, deployment(replicas=2, version=1)) == [], "it is under way"


def test_a_preview_of_a_new_recipe_names_all_replaced_instances() -> None:
    assert preview(running(deployment(replicas=2)), deployment(replicas=2, version=1)) == [
        ("replace", "m-1", CHANGED),
        ("replace", "m-2", CHANGED),
        ("start", "m-3", "to take over from m-1"),
    ]


def test_a_preview_of_a_lifecycle() -> None:
    assert preview(running(V0), with_lifecycle(V0, drain_timeout_s=2.5, failures_until_unhealthy=3)) == [
        ("update", "m", "failures_until_unhealthy 2 -> 3, drain_timeout_s 60 -> 2.5"),
    ]


def test_a_preview_of_limits_for_instances_not_in_service_yet() -> None:
    world = World()
    world.apply(V0)
    assert preview(world, deployment(max_concurrency=3)) == [("update", "m-1", "max_concurrency none -> 3")]


def test_a_preview_of_external_servers() -> None:
    world = running(servers(server("a"), server("b")))
    assert preview(world, servers(server("a", 2), server("c"))) == [
        ("add", "m-a", "it is listed, at http://a:2"),
        ("replace", "a", "url http://a:1 -> http://a:2"),
        ("add", "c", "it is listed, at http://c:1"),
        ("remove", "b", "it is no longer listed"),
    ]


def test_a_preview_during_a_drain_has_only_new_steps() -> None:
    world = running(deployment(replicas=2))
    world.tell(DrainAsked("m-1"))
    assert preview(world, deployment(replicas=3)) == [("start", "m-4", "to take over from m-1")]


def test_a_preview_of_a_restart() -> None:
    world = running(V0)
    world.tell(Exited("m-1", "exit code 1"))
    assert preview(world, V1) == [("restart", "m-1", CHANGED)]


def test_a_preview_during_shutdown_is_empty() -> None:
    world = running(V0)
    world.tell(PlaneStopping())
    assert preview(world, deployment(replicas=4)) == []


def recipe(model: str = "llama", engine: DesiredEngine | None = None) -> str:
    return DesiredDeployment(name="m", model=model, engine=engine).recipe


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (recipe("a"), recipe("b"), "model a -> b"),
        (recipe(engine=DesiredEngine("vllm")), recipe(engine=DesiredEngine("sglang")), "engine vllm -> sglang"),
        (
            recipe(engine=DesiredEngine("vllm", {"args": ["-x"], "gpus": 1})),
            recipe(engine=DesiredEngine("vllm", {"args": ["-y"], "gpus": 1})),
            'engine.args ["-x"] -> ["-y"]',
        ),
        ("not a recipe", recipe(), "it was started from another recipe"),
        ("3", recipe(), "it was started from another recipe"),
        ('["a", {}]', recipe(), "it was started from another recipe"),
        ('["a", "b"]', recipe(), "it was started from another recipe"),
        ('["a", {"type": "x", "parameters": 3}]', recipe(), "it was started from another recipe"),
        (" " + recipe(), recipe(), "it was started from another recipe"),
    ],
)
def test_the_difference_of_recipes(before: str, after: str, words: str) -> None:
    assert str(between_recipes(before, after)) == words


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://gpu:8000", ("gpu", 8000, False)),
        ("https://gpu:8443", ("gpu", 8443, True)),
        ("https://[fe80::1]:8443", ("fe80::1", 8443, True)),
        ("https://gpu", ("gpu", 443, True)),
        ("http://[::1]", ("::1", 80, False)),
        ("http://gpu:8000/", ("gpu", 8000, False)),
        ("", ("", 80, False)),
    ],
)
def test_the_address_of_a_server(url: str, address: tuple[str, int, bool]) -> None:
    assert DesiredEndpoint(name="gpu", url=url).address[:3] == address
