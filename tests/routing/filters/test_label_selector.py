import pytest

from pointsman.routing.filters import LabelSelectorFilter
from pointsman.selection.labels import LabelExpression
from tests.routing.fleets import Candidate, both_lengths, fleet_of, kept, labelled, reasons, scene

CANDIDATES = [labelled(gpu="a100", zone="north"), labelled(gpu="l4"), Candidate()]


@both_lengths
@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (LabelSelectorFilter(), [0, 1, 2]),
        (LabelSelectorFilter({"gpu": "a100"}), [0]),
        (LabelSelectorFilter({"gpu": "h100"}), []),
        (LabelSelectorFilter({}, [LabelExpression("gpu", "In", ("a100", "l4"))]), [0, 1]),
        (LabelSelectorFilter({}, [LabelExpression("gpu", "NotIn", ("a100",))]), [1, 2]),
        (LabelSelectorFilter({}, [LabelExpression("zone", "Exists")]), [0]),
        (LabelSelectorFilter({}, [LabelExpression("zone", "DoesNotExist")]), [1, 2]),
        (LabelSelectorFilter({"gpu": "l4"}, [LabelExpression("zone", "Exists")]), []),
    ],
)
def test_keeps_endpoints_that_match(selector: LabelSelectorFilter, expected: list[int], long: bool) -> None:
    assert kept(selector, *scene(CANDIDATES, long=long)) == expected


def test_says_why() -> None:
    assert reasons(LabelSelectorFilter({"gpu": "a100"}), *scene(CANDIDATES)) == [
        "labels do not match: gpu is l4, not a100",
        "labels do not match: gpu is absent",
    ]


@both_lengths
def test_labels_are_read_again_when_members_change(long: bool) -> None:
    fleet, selector = fleet_of(CANDIDATES, long=long), LabelSelectorFilter({"gpu": "l4"})
    assert kept(selector, *scene(CANDIDATES, fleet=fleet)) == [1]
    fleet.remove("0")
    assert kept(selector, *scene(CANDIDATES[1:], fleet=fleet)) == [0]


def test_bad_expressions_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="operator In needs at least one"):
        LabelSelectorFilter({}, [LabelExpression("gpu", "In")])
