from pointsman.routing.endpoints import Metrics
from pointsman.routing.scorers import LoraAffinityScorer
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, fleet_of, scene, scores

REQUEST = RequestMetadata("r", model_name="poet")


def adapters(active: str = "", waiting: str = "", most: int = 2) -> Candidate:
    return Candidate(
        Metrics(
            active_models=frozenset(active.split()), waiting_models=frozenset(waiting.split()), max_active_models=most
        )
    )


@both_lengths
def test_loaded_then_room_then_waiting(long: bool) -> None:
    table = [
        (adapters("poet chef"), 1.0),
        (adapters("chef"), 0.8),
        (adapters("", "poet"), 0.8),  # room is looked at before the queue
        (adapters("chef clerk", "poet"), 0.6),
        (adapters("chef", "poet", most=2), 0.6),
        (adapters("chef", "chef", most=2), 0.8),  # counted once
        (adapters("chef clerk"), 0.0),
        (adapters(most=0), 0.0),
        (Candidate(), 0.0),
    ]
    cycle, roster = scene([row for row, _ in table], long=long, request=REQUEST)
    assert scores(LoraAffinityScorer(), cycle, roster) == [score for _, score in table]


@both_lengths
def test_new_reports_change_the_score_but_not_columns_already_given(long: bool) -> None:
    rows = [adapters("chef clerk"), adapters("chef clerk")]
    fleet, scorer = fleet_of(rows, long=long), LoraAffinityScorer()
    cycle, roster = scene(rows, request=REQUEST, fleet=fleet)
    before = scorer.scores(cycle, roster)
    fleet.measure("1", Metrics(active_models=frozenset({"poet"}), max_active_models=2), now=1.0)
    assert scores(scorer, cycle, roster) == [0.0, 1.0]
    assert list(before) == [0.0, 0.0]
    fleet.remove("0")
    cycle, roster = scene(rows[1:], request=REQUEST, fleet=fleet)
    assert scores(scorer, cycle, roster) == [1.0]


def test_each_model_has_its_own_scores() -> None:
    scorer, rows = LoraAffinityScorer(), [adapters("poet chef"), adapters("chef clerk")]
    for model, expected in {"poet": [1.0, 0.0], "clerk": [0.0, 1.0], "chef": [1.0, 1.0], "": [0.0, 0.0]}.items():
        fleet = fleet_of(rows)
        for _ in range(2):
            cycle, roster = scene(rows, request=RequestMetadata("r", model_name=model), fleet=fleet)
            assert scores(scorer, cycle, roster) == expected
