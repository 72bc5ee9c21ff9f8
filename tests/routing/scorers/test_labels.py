import pytest

from pointsman.routing.scorers import HeaderLabelAffinityScorer
from tests.routing.fleets import Candidate, both_lengths, labelled, scene, scores

CANDIDATES = [labelled(tier="gold"), labelled(tier="Gold"), labelled(zone="gold"), Candidate()]


@both_lengths
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-tier": "gold"}, [1.0, 0.0, 0.0, 0.0]),
        ({"x-tier": "Gold"}, [0.0, 1.0, 0.0, 0.0]),
        ({"x-tier": "lead"}, [0.0] * 4),
        ({"x-other": "gold"}, [0.0] * 4),
        ({}, [0.0] * 4),
    ],
)
def test_scores(headers: dict[str, str], expected: list[float], long: bool) -> None:
    scorer = HeaderLabelAffinityScorer(header_name="X-Tier", label_key="tier")
    assert scores(scorer, *scene(CANDIDATES, long=long, headers=headers)) == expected


@pytest.mark.parametrize(("header", "label", "message"), [("", "tier", "headerName is empty"), ("h", "", "labelKey")])
def test_both_names_are_required(header: str, label: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeaderLabelAffinityScorer(header, label)
