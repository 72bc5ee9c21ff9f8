"""Background work of the plane and the gateway runs under `Tasks`, which starts it again when it fails.

Everything else that outlives a call is listed here, with the reason why it needs no keeper. The test reads the source;
nothing is imported.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.house import PACKAGE, SOURCES, kept_in, tree_of

STARTS = {"create_task", "ensure_future", "call_later", "call_at", "Thread", "run_coroutine_threadsafe", "to_thread"}
KEEPER = "runtimes/tasks.py"
ELSEWHERE = ("replica/", "simulator/", "runtimes/simulation/", "runtimes/inprocess/", "lab/traffic/replay.py")
"""Processes of their own, which the plane starts again; virtual time; programs of users."""

ALLOWED = {
    # One request, or one call of an operator
    "gateway/admin.py Admin.serve": "one admin request; its errors are answers",
    "gateway/embedded.py Embedded.stop": "the end of the plane, which waits for them",
    "gateway/owner.py GatewayOwner.stop": "the end of the gateways, which waits for it",
    "gateway/owner.py GatewayOwner._process_changed": "looks for the records of one gateway that has ended",
    "gateway/owner.py MergedMetrics.serve": "one page",
    "gateway/owner.py MergedMetrics._answer": "one page, for all who ask for it meanwhile",
    "gateway/process.py GatewayProcess.stop": "the end of the process, which waits for it",
    "gateway/process.py GatewayProcess._stop": "the end of the process, which waits for it",
    "gateway/plane_pages.py PlanePages._forward": "one page, or one stream; its errors are answers",
    "gateway/event_admin.py EventFeed._beat_later": "of one stream, which ends with its client",
    "gateway/pipelines/request.py PipelineRequest.__init__": "deadline of one request",
    "gateway/pipelines/request.py PipelineRequest._start": "deadline of one step",
    "gateway/pipelines/results.py SharedFiles.ended": "removes one answer; the sweep removes what it misses",
    "http/pool.py ConnectionPool.send": "one connection; its errors are told to the request",
    "runtimes/documents.py _loaded": "one document; its errors are answers",
    "runtimes/plane.py Plane.stop": "the end of the plane, which waits for it",
    "runtimes/plane.py Plane._stop": "the time limit of the end of the plane",
    "integrations/ray_serve/applications.py run_flow.begin": "steps of one request, which waits for them",
    "runtimes/ray/cluster.py RayCluster.connect": "the beginning of the plane, which waits for it",
    "runtimes/ray/cluster.py RayCluster.disconnect": "the end of the plane, which waits for it",
    "runtimes/ray/cluster.py RayCluster.nodes": "one question to Ray; the next follows",
    "runtimes/ray/cluster.py RayCluster.end": "the end of one actor, which is waited for",
    "runtimes/ray/cluster.py Bookings.book": "one booking, which is waited for",
    "runtimes/ray/cluster.py Bookings.free": "the end of one booking, which is waited for",
    "runtimes/ray/cluster.py Bookings.keep": "the end of bookings that nothing uses, which is waited for",
    "runtimes/machine/memory.py NodeMemory._serve": "one request of another node; its errors are answers",
    "runtimes/machine/memory.py NodeMemory._send": "one copy, which is waited for",
    "runtimes/ray/keeper.py Keeper.__init__": "of an actor; what a renewal raises is caught, and the next follows",
    "runtimes/ray/keeper.py Keeper._keep": "looks an actor up, and is awaited",
    "runtimes/ray/node.py NodeAgent.look": "one measurement, which is waited for",
    "runtimes/ray/runtime.py RayRuntime.adopt": "the beginning of the plane, which waits for it",
    # One probe, one measurement, one call of a policy: the next is not kept from coming
    "http/client.py Exchange.__init__": "time limit of one exchange",
    "runtimes/user_configs.py UserConfigs._update": "one configuration of one replica",
    "runtimes/autoscaling.py PolicyLoop._begin": "one call of a policy; its end is noticed however it ends",
    "runtimes/policy_runner.py PolicyRunner.run": "one call of a policy, on a thread of its own",
    "runtimes/machine/gpu_usage.py GpuUsage._begin": "one reading of GPU drivers",
    "runtimes/machine/gpu_usage.py GpuUsage.measured": "closes drivers that are not read; the next reading opens them",
    "runtimes/machine/gpu_usage.py GpuUsage._close_drivers": "closes the drivers; the next reading opens them again",
    "runtimes/machine/supervisor_link.py SupervisorLink.connection_lost": "reaps one supervisor",
    # Timers that are set again whatever their body does
    "runtimes/probes.py Exchanges.begin": "turn of waiting exchanges; set again before any begins",
    "runtimes/probes.py Exchanges._next_turn": "turn of waiting exchanges; set again before any begins",
    "runtimes/probes.py Scrapes._set_timer": "the next scrape; what a scrape raises is reported, and it is set again",
    # Timers of state machines: both catch what their body raises, report it, and set the timer again
    "runtimes/control_loop.py ControlLoop._wake_at": "timer of the controller",
    "runtimes/control_loop.py ControlLoop._try": "sends one signal again",
    "runtimes/traffic.py Lane._set_timer": "timer of a lane",
    "runtimes/recording.py Recorder.read": "end of a recording that is not read",
    "runtimes/shadowing.py Shadows.lease": "end of a canary that is not renewed",
    "runtimes/traffic.py Lane._wake": "timer of a lane, after a failure",
    "runtimes/gateway_processes.py GatewayProcesses._start_later": "one start of a gateway; what it raises is reported",
    "wire/blobs.py load_arrays": "loads a library once; where it fails, so does its first use",
    # Threads of policies inside Ray Serve
    "integrations/ray_serve/lanes.py ThreadWatch.call": "calls of policies; one that hangs is left behind",
    "integrations/ray_serve/scaling.py PolicyCall.__init__": "one call of a policy",
    "integrations/ray_serve/scaling.py ServeScaling._began": "exchange with the records; it catches what it raises",
    # Threads that have an event loop to themselves
    "gateway/deploying.py BackgroundPlane.__init__": "the thread of a plane in a program of the user",
    "gateway/deploying.py BackgroundPlane.run": "one call from the thread of the user",
}

KILLED_IN = {
    "tests/live/test_dead_tasks.py": {
        "cli/up.py",
        "gateway/gateway.py",
        "gateway/owner.py",
        "gateway/pipelines/results.py",
        "gateway/process.py",
        "runtimes/autoscaling.py",
        "runtimes/local/runtime.py",
        "runtimes/plane.py",
        "runtimes/promotions.py",
    },
    "tests/runtimes/local/test_background.py": {"runtimes/machine/processes.py"},
    "tests/runtimes/ray/test_planes.py": {"runtimes/ray/links.py", "runtimes/ray/node.py", "runtimes/ray/runtime.py"},
    # Inside the actors of Ray Serve; tests/runtimes/test_tasks.py shows what `Tasks` does there.
    "tests/runtimes/test_tasks.py": {"integrations/ray_serve/router.py"},
}
"""Which test kills the tasks that a module starts: each of these tests finds their names by `kept_in`."""


def started(source: Path) -> Iterator[str]:
    """`file Class.function` for each call that starts something which outlives it."""

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = names
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and len(names) < 2:
                inside = (*names, child.name)
            if isinstance(child, ast.Call):
                called = child.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in STARTS:
                    yield f"{source.relative_to(PACKAGE)} {'.'.join(names)}"
            yield from walk(child, inside)

    yield from walk(tree_of(source), ())


@cache
def found() -> set[str]:
    sources = {source: str(source.relative_to(PACKAGE)) for source in SOURCES}
    ours = [source for source, name in sources.items() if name != KEEPER and not name.startswith(ELSEWHERE)]
    return {where for source in ours for where in started(source)}


def test_what_outlives_a_call_is_kept_or_listed() -> None:
    unlisted = found() - ALLOWED.keys()
    assert unlisted == set(), "run it with `Tasks` of runtimes/tasks.py, or say here why it may end for good"


def test_the_list_names_only_what_is_there() -> None:
    assert ALLOWED.keys() - found() == set()


def test_each_module_with_background_tasks_has_a_test_that_kills_them() -> None:
    names = {str(source.relative_to(PACKAGE)) for source in SOURCES}
    starting = {name for name in names if not name.startswith(ELSEWHERE) and kept_in(name)}
    assert starting == set().union(*KILLED_IN.values())
    for test, modules in KILLED_IN.items():
        text = (PACKAGE.parent / test).read_text(encoding="utf-8")
        if "kept_in(" in text:
            assert {one for one in modules if f'"{one}"' not in text} == set(), f"{test} does not look there"
