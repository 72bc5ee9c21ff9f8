import pytest

from pointsman.routing.endpoints import Attribute, Metrics, observe
from pointsman.routing.scorers import EndpointAttributeScorer
from pointsman.routing.scorers.attribute import AdaptiveRange, Algorithm, Direction, FixedRange, Normalization
from tests.routing.fleets import Candidate, both_lengths, fleet_of, kv, scene, scores, waiting

LOWER = Algorithm("linear_lower_is_better")
HIGHER = Algorithm("linear_higher_is_better")
ADAPTIVE = Algorithm("linear_lower_is_better", Normalization(adaptive_range=AdaptiveRange()))


def fixed(direction: Direction, low: float, high: float) -> Algorithm:
    return Algorithm(direction, Normalization(fixed_range=FixedRange(low, high)))


@both_lengths
@pytest.mark.parametrize(
    ("key", "algorithm", "candidates", "expected"),
    [
        ("waiting_queue_size", LOWER, [waiting(2), waiting(4), waiting(10)], [1.0, 0.75, 0.0]),
        ("waiting_queue_size", ADAPTIVE, [waiting(2), waiting(4), waiting(10)], [1.0, 0.75, 0.0]),
        ("waiting_queue_size", HIGHER, [waiting(2), waiting(4), waiting(10)], [0.0, 0.25, 1.0]),
        ("waiting_queue_size", LOWER, [waiting(3), waiting(3)], [1.0, 1.0]),
        ("waiting_queue_size", HIGHER, [waiting(3), waiting(3)], [1.0, 1.0]),
        ("waiting_queue_size", LOWER, [Candidate(), waiting(4), waiting(10)], [0.0, 1.0, 0.0]),
        ("waiting_queue_size", HIGHER, [Candidate(), waiting(4), waiting(10)], [0.0, 0.0, 1.0]),
        ("waiting_queue_size", LOWER, [Candidate(), Candidate()], [0.0, 0.0]),
        ("waiting_queue_size", LOWER, [], []),
        ("kv_cache_usage", fixed("linear_higher_is_better", 0.2, 0.6), [kv(0.1), kv(0.3), kv(0.9)], [0.0, 0.25, 1.0]),
        ("kv_cache_usage", fixed("linear_lower_is_better", 0.2, 0.6), [kv(0.1), kv(0.3), kv(0.9)], [1.0, 0.75, 0.0]),
        ("kv_cache_usage", fixed("linear_lower_is_better", 0, 1), [kv(0.3), kv(0.3)], [0.7, 0.7]),
        ("kv_cache_usage", fixed("linear_lower_is_better", 0, 1), [Candidate(), kv(0.3)], [0.0, 0.7]),
        ("num_blocks", HIGHER, [Candidate(Metrics(num_blocks=n)) for n in (10, 20)], [0.0, 1.0]),
        ("in_flight_requests", LOWER, [Candidate(requests=0), Candidate(requests=2)], [1.0, 0.0]),
        ("max_concurrency", HIGHER, [Candidate(), Candidate()], [0.0, 0.0]),  # no limit is no number
        ("active_models", HIGHER, [waiting(0), waiting(1)], [0.0, 0.0]),
        ("temperature", LOWER, [Candidate(), Candidate()], [0.0, 0.0]),
    ],
)
def test_scores(key: str, algorithm: Algorithm, candidates: list[Candidate], expected: list[float], long: bool) -> None:
    scorer = EndpointAttributeScorer(key, algorithm)
    assert scores(scorer, *scene(candidates, long=long)) == pytest.approx(expected)


@both_lengths
@pytest.mark.parametrize("key", ["temperature", "gpu/temperature", "waiting_queue_size"])
def test_attributes_of_other_producers(key: str, long: bool) -> None:
    candidates = [waiting(1), waiting(2), waiting(3), waiting(4)]
    fleet = fleet_of(candidates, long=long)
    attribute: Attribute[object] = Attribute(key)
    for place, value in {"0": 40, "1": 80.0, "2": "hot"}.items():
        observe(fleet, place, attribute, value, now=0.0)
    scorer = EndpointAttributeScorer(key, LOWER, producer="thermometer")
    assert scores(scorer, *scene(candidates, fleet=fleet)) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("key", "algorithm", "message"),
    [
        ("", LOWER, "attributeKey is empty"),
        ("gpu/temperature", LOWER, 'producer is missing; attributeKey "gpu/temperature" has a "/"'),
        ("load", Algorithm("linear"), 'algorithm.type is "linear"; it must be linear_lower_is_better or'),  # type: ignore[arg-type]
        ("load", fixed("linear_lower_is_better", 1, 1), "fixedRange is 1 to 1; its min must be below its max"),
        ("load", fixed("linear_lower_is_better", 2, 1), "fixedRange is 2 to 1"),
        (
            "load",
            Algorithm("linear_lower_is_better", Normalization(FixedRange(0, 1), AdaptiveRange())),
            "fixedRange and adaptiveRange; only one",
        ),
    ],
)
def test_bad_parameters(key: str, algorithm: Algorithm, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EndpointAttributeScorer(key, algorithm)
