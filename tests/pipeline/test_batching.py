"""The mark of methods that take batches, and how calls are joined and results parted."""

from typing import Any

import pytest

from pointsman.errors import PointsmanError
from pointsman.pipeline.options import Batching, batch, batching_of, joined, parted


def test_the_mark() -> None:
    class Model:
        @batch(max_batch_size=4, wait_ms=2)
        def marked(self, xs: list[int]) -> list[int]:
            return xs

        @batch
        def defaults(self, xs: list[int]) -> list[int]:
            return xs

        def plain(self, x: int) -> int:
            return x

    assert batching_of(Model().marked) == Batching(max_batch_size=4, wait_ms=2)
    assert batching_of(Model.defaults) == Batching()
    assert batching_of(Model().plain) is None
    assert Model().marked([1]) == [1]


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"max_batch_size": 1.5}, {"wait_ms": -1}, {"wait_ms": "5"}])
def test_invalid_settings(options: dict[str, Any]) -> None:
    with pytest.raises(PointsmanError, match=next(iter(options))):
        batch(**options)


def test_many_calls_become_one() -> None:
    assert joined([((1, "a"), {"k": 5}), ((2, "b"), {"k": 6})]) == ([[1, 2], ["a", "b"]], {"k": [5, 6]})
    assert joined([((), {})]) == ([], {})


def test_there_is_a_result_for_each() -> None:
    assert parted((1, 2), 2, "f") == [1, 2]
    wrongs: list[tuple[Any, str]] = [([1], "1 results"), ("ab", "a str"), (None, "a NoneType"), ({}, "a dict")]
    for wrong, said in wrongs:
        with pytest.raises(PointsmanError, match=said):
            parted(wrong, 2, "f")
