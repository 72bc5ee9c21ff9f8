import pytest

from pointsman.render.sentences import detail
from pointsman.selection.columns import Roster
from pointsman.selection.labels import LabelColumn, LabelExpression, Labels, LabelSelector, Operator

A100 = {"gpu": "a100", "zone": "north"}


def expression(key: str, operator: Operator, *values: str) -> LabelExpression:
    return LabelExpression(key, operator, values)


@pytest.mark.parametrize(
    ("selector", "labels", "mismatch"),
    [
        (LabelSelector(), {}, None),
        (LabelSelector(), A100, None),
        (LabelSelector({"gpu": "a100"}), A100, None),
        (LabelSelector({"gpu": "h100"}), A100, "gpu is a100, not h100"),
        (LabelSelector({"gpu": "h100"}), {}, "gpu is absent"),
        (LabelSelector({"gpu": "a100", "zone": "south"}), A100, "zone is north, not south"),
        (LabelSelector({}, [expression("gpu", "In", "a100", "h100")]), A100, None),
        (LabelSelector({}, [expression("gpu", "In", "l4", "h100")]), A100, "gpu is a100, not l4 or h100"),
        (LabelSelector({}, [expression("gpu", "In", "l4")]), {}, "gpu is absent"),
        (LabelSelector({}, [expression("gpu", "NotIn", "l4")]), A100, None),
        (LabelSelector({}, [expression("gpu", "NotIn", "l4")]), {}, None),
        (LabelSelector({}, [expression("gpu", "NotIn", "l4", "a100")]), A100, "gpu is a100, which is excluded"),
        (LabelSelector({}, [expression("gpu", "Exists")]), A100, None),
        (LabelSelector({}, [expression("gpu", "Exists")]), {"gpu": ""}, None),
        (LabelSelector({}, [expression("gpu", "Exists")]), {}, "gpu is absent"),
        (LabelSelector({}, [expression("gpu", "DoesNotExist")]), {}, None),
        (LabelSelector({}, [expression("gpu", "DoesNotExist")]), A100, "gpu is a100, and must be absent"),
        (LabelSelector({"gpu": "a100"}, [expression("zone", "In", "south")]), A100, "zone is north, not south"),
        (LabelSelector({"gpu": "l4"}, [expression("zone", "In", "north")]), A100, "gpu is a100, not l4"),
    ],
)
def test_why_labels_do_not_match(selector: LabelSelector, labels: Labels, mismatch: str | None) -> None:
    facts = selector.mismatch(labels)
    assert (None if facts is None else detail("labels-differ", facts)) == mismatch
    assert selector.matches(labels) is (mismatch is None)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (LabelExpression("gpu", "in", ("l4",)), 'operator "in" is unknown; did you mean "In"?'),  # type: ignore[arg-type]
        (LabelExpression("gpu", "Gt", ("4",)), 'operator "Gt" is unknown; known: DoesNotExist, Exists, In'),  # type: ignore[arg-type]
        (LabelExpression("gpu", "In"), 'values of "gpu" are missing; operator In needs at least one'),
        (LabelExpression("gpu", "NotIn"), "operator NotIn needs at least one"),
        (LabelExpression("gpu", "Exists", ("l4",)), 'values of "gpu" are l4; operator Exists takes none'),
        (LabelExpression("gpu", "DoesNotExist", ("l4",)), "operator DoesNotExist takes none"),
    ],
)
def test_bad_expressions(bad: LabelExpression, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        LabelSelector({}, [bad])


class Box:
    """Something with labels."""

    def __init__(self, **labels: str) -> None:
        self.labels = labels


@pytest.mark.parametrize("arrays", [False, True])
def test_a_label_column_is_read_once_per_membership_and_judged_once_per_value(arrays: bool) -> None:
    boxes = [Box(size="8"), Box(size="2"), Box(), Box(size="8")]
    asked: list[str | None] = []

    def judge(value: str | None) -> float:
        asked.append(value)
        return float(value or 0)

    column: LabelColumn[Box] = LabelColumn("size")
    roster = Roster(boxes, arrays=arrays)
    assert list(column.judged(roster, judge)) == [8, 2, 0, 8]
    assert asked == ["8", "2", None]
    assert list(column.judged(roster.without([0, 2]), judge)) == [2, 8]
    boxes[0].labels = {"size": "5"}
    assert list(column.judged(roster, judge)) == [8, 2, 0, 8]
    assert list(column.judged(Roster(list(boxes), arrays=arrays), judge)) == [5, 2, 0, 8]
