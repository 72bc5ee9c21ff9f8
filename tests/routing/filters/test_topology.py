import pytest

from pointsman.routing.extractors import TopologyExtractor
from pointsman.routing.filters import TopologyAffinityFilter
from pointsman.routing.plugins import NEAR
from pointsman.routing.scorers import TopologyAffinityScorer
from pointsman.routing.topology import Level
from tests.routing.fleets import Candidate, both_lengths, kept, reasons, scene, scores


def at(host: str = "", rack: str = "", zone: str = "", region: str = "") -> Candidate:
    prefix = "topology.kubernetes.io/"
    labels = {f"{prefix}rack": rack, f"{prefix}zone": zone, f"{prefix}region": region}
    return Candidate(labels={name: value for name, value in labels.items() if value}, host=host)


PEER = at("h1", "r1", "z1", "eu")
ROWS = [PEER, at("h1"), at("h2", "r1", "z1", "eu"), at("h3", "r2", "z1", "eu"), at("h4", "", "", "eu"), at("h5"), at()]
LOCATOR = TopologyExtractor()


@both_lengths
@pytest.mark.parametrize(
    ("level", "expected"), [("host", [0, 1]), ("rack", [0, 1, 2]), ("zone", [0, 1, 2, 3]), ("region", [0, 1, 2, 3, 4])]
)
def test_levels_that_are_near_enough(level: Level, expected: list[int], long: bool) -> None:
    cycle, roster = scene(ROWS, long=long)
    cycle[NEAR] = roster[0]
    assert kept(TopologyAffinityFilter(level, LOCATOR), cycle, roster) == expected


@both_lengths
def test_scores_by_the_nearest_common_level(long: bool) -> None:
    cycle, roster = scene(ROWS, long=long)
    cycle[NEAR] = roster[0]
    assert scores(TopologyAffinityScorer(LOCATOR), cycle, roster) == [1.0, 1.0, 0.2, 0.05, 0.02, 0.0, 0.0]


def test_without_a_peer_all_pass_and_none_scores() -> None:
    cycle, roster = scene(ROWS)
    assert kept(TopologyAffinityFilter("host", LOCATOR), cycle, roster) == [0, 1, 2, 3, 4, 5, 6]
    assert scores(TopologyAffinityScorer(LOCATOR), cycle, roster) == [0.0] * 7


def test_an_unknown_peer_is_none() -> None:
    cycle, roster = scene(ROWS)
    cycle[NEAR] = roster[6]
    assert kept(TopologyAffinityFilter("host", LOCATOR), cycle, roster) == [0, 1, 2, 3, 4, 5, 6]
    assert scores(TopologyAffinityScorer(LOCATOR), cycle, roster) == [0.0] * 7


def test_if_no_candidate_is_near_enough_all_pass() -> None:
    cycle, roster = scene([at("h1", "r1"), at("h2", "r2"), at("h3", "r3")])
    cycle[NEAR] = roster[0]
    rest = roster.without([0])
    assert kept(TopologyAffinityFilter("rack", LOCATOR), cycle, rest) == [0, 1]


def test_a_header_may_say_where_the_peer_is() -> None:
    cycle, roster = scene(ROWS, headers={"x-peer-topology": "host=elsewhere,rack=r1"})
    assert kept(TopologyAffinityFilter("rack", LOCATOR, "X-Peer-Topology"), cycle, roster) == [0, 2]
    assert scores(TopologyAffinityScorer(LOCATOR, "x-peer-topology"), cycle, roster)[2] == 0.2
    assert kept(TopologyAffinityFilter("rack", LOCATOR), cycle, roster) == [0, 1, 2, 3, 4, 5, 6], "unless configured"
    cycle[NEAR] = roster[3]
    assert kept(TopologyAffinityFilter("rack", LOCATOR, "x-peer-topology"), cycle, roster) == [3], "a known one wins"


def test_the_reason() -> None:
    cycle, roster = scene([PEER, at("h2", "r2")])
    cycle[NEAR] = roster[0]
    [why] = reasons(TopologyAffinityFilter("rack", LOCATOR), cycle, roster)
    assert why == "far from the endpoint of another stage: not the same rack"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match='minAffinity is "room"; it must be one of host, rack, zone, region'):
        TopologyAffinityFilter("room")  # type: ignore[arg-type]
