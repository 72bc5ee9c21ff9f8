"""Filters of workers: what they reject, and why."""

import pytest

from pointsman.placement.asks import Ask, EngineAbility
from pointsman.placement.filters import ChosenByHand, IsReady, MatchesLabels, SuitsEngine
from pointsman.placement.fleet import Host
from pointsman.selection import Filter, LabelExpression, LabelSelector
from pointsman.types import WorkerStatus
from tests.placement.fleets import LLAMA, ask, fleet, gpu, rejections, worker

OR_CPU = "; if the engine runs without one, set placement.cpu"
WHERE = fleet(
    worker("w0", 80, labels={"zone": "a", "tier": "gold"}),
    worker("w1", gpu(0, 64, vendor="apple", model="M4"), labels={"zone": "b"}, status=WorkerStatus.DRAINING),
    worker("w2", labels={"zone": "c"}, status=WorkerStatus.LOST),
    worker("w3", gpu(0, 24, model="L4"), gpu(1, 24, model="L4")),
)


def by(*expressions: LabelExpression, **labels: str) -> Ask:
    return ask(1, selector=LabelSelector(labels, expressions))


@pytest.mark.parametrize(
    ("chooser", "asked", "expected"),
    [
        (MatchesLabels(), ask(1), {}),
        (
            MatchesLabels(),
            by(zone="a"),
            {
                "w1": "label mismatch: zone is b, not a",
                "w2": "label mismatch: zone is c, not a",
                "w3": "label mismatch: zone is absent",
            },
        ),
        (
            MatchesLabels(),
            by(LabelExpression("zone", "In", ("a", "b"))),
            {"w2": "label mismatch: zone is c, not a or b", "w3": "label mismatch: zone is absent"},
        ),
        (
            MatchesLabels(),
            by(LabelExpression("zone", "NotIn", ("a", "b"))),
            {
                "w0": "label mismatch: zone is a, which is excluded",
                "w1": "label mismatch: zone is b, which is excluded",
            },
        ),
        (MatchesLabels(), by(LabelExpression("zone", "Exists")), {"w3": "label mismatch: zone is absent"}),
        (
            MatchesLabels(),
            by(LabelExpression("tier", "DoesNotExist")),
            {"w0": "label mismatch: tier is gold, and must be absent"},
        ),
        (IsReady(), ask(1), {"w1": "not ready: draining", "w2": "not ready: lost"}),
        (ChosenByHand(), ask(1), {}),
        (
            ChosenByHand(),
            ask(1, workers=frozenset({"w0", "w9"})),
            dict.fromkeys(("w1", "w2", "w3"), "not chosen by hand"),
        ),
        (
            ChosenByHand(),
            ask(1, gpus=frozenset({("w3", 1)})),
            dict.fromkeys(("w0", "w1", "w2"), "not chosen by hand"),
        ),
        (
            SuitsEngine(),
            ask(1),
            {
                "w1": f"no GPU for the engine: it has M4, not amd or nvidia{OR_CPU}",
                "w2": f"no GPU for the engine: it has none, not amd or nvidia{OR_CPU}",
            },
        ),
        (
            SuitsEngine(),
            ask(1, gpu_models=frozenset({"L4"})),
            {
                "w0": f"no GPU for the engine: it has H100, not L4{OR_CPU}",
                "w1": f"no GPU for the engine: it has M4, not L4{OR_CPU}",
                "w2": f"no GPU for the engine: it has none, not L4{OR_CPU}",
            },
        ),
        (
            SuitsEngine(),
            ask(1, engine=EngineAbility(vendors=frozenset({"apple"}))),
            {
                "w0": f"no GPU for the engine: it has H100, not apple{OR_CPU}",
                "w2": f"no GPU for the engine: it has none, not apple{OR_CPU}",
                "w3": f"no GPU for the engine: it has L4, not apple{OR_CPU}",
            },
        ),
        (SuitsEngine(), ask(1, engine=LLAMA), {}),
        (SuitsEngine(), ask(1, cpu=True), {}),
    ],
)
def test_rejections(chooser: Filter[Host], asked: Ask, expected: dict[str, str]) -> None:
    assert rejections(chooser, asked, WHERE) == expected
    assert rejections(chooser, asked, WHERE) == expected, "also from the cache"
    for among in (["w1", "w3"], ["w0", "w2"]):
        left = {name: why for name, why in expected.items() if name in among}
        assert rejections(chooser, asked, WHERE, among) == left, "and among the remaining candidates"


def test_the_cache_ends_when_members_change() -> None:
    where, ready = fleet(worker("w0"), worker("w1")), IsReady()
    assert rejections(ready, ask(1), where) == {}
    where.put(worker("w0", status=WorkerStatus.LOST))
    assert rejections(ready, ask(1), where) == {"w0": "not ready: lost"}
    where.put(worker("w0"))
    assert rejections(ready, ask(1), where) == {}


def test_the_cache_is_bounded() -> None:
    chooser = ChosenByHand()
    for number in range(1000):
        assert len(rejections(chooser, ask(1, workers=frozenset({f"x{number}"})), WHERE)) == 4
    assert rejections(chooser, ask(1, workers=frozenset({"w0", "w1", "w2", "w3"})), WHERE) == {}
