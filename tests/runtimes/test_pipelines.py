"""Pipelines that run in this process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import pointsman as pm
from pointsman.errors import PointsmanError
from pointsman.pipeline.flow import BadInput


@pm.deployment
class Model:
    made = 0

    def __init__(self, val: int) -> None:
        type(self).made += 1
        self.val = val

    def forward(self, value: int) -> int:
        return self.val * value

    async def slowly(self, value: int) -> int:
        await asyncio.sleep(0)
        return self.val * value

    def count(self, to: int) -> Iterator[int]:
        yield from range(to)

    async def count_slowly(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    @pm.batch(max_batch_size=4)
    def many(self, values: list[int]) -> list[int]:
        return [self.val * value for value in values]


@pm.deployment
def ensemble(a: int, b: int, c: int = 0) -> int:
    return a + b + c


@pm.deployment
def total(values: Any) -> int:
    return sum(values.values() if isinstance(values, dict) else values)


@pm.deployment
class Router:
    def __init__(self, cheap: Any, dear: Any) -> None:
        self.cheap, self.dear = cheap, dear

    async def __call__(self, value: int) -> int:
        chosen = self.cheap if value < 10 else self.dear
        return int(await chosen.forward(value)) + int(sum([piece async for piece in self.dear.count.stream(3)]))

    def plainly(self, value: int) -> int:
        return int(self.cheap.slowly.remote(value).result(5))


@pm.deployment(shards=3)
class Sharded:
    def __init__(self) -> None:
        self.rank = pm.current().rank or 0

    def part(self, values: list[int]) -> int:
        assert pm.current().rank == self.rank
        assert pm.current().shards == 3
        return sum(values[self.rank :: 3])

    def join(self, parts: list[int]) -> int:
        assert self.rank == 0
        return sum(parts)


def diamond(method: str = "forward") -> Any:
    with pm.InputNode() as dag_input:
        m1 = Model.bind(1)
        m2 = Model.bind(2)
        one = getattr(m1, method).bind(dag_input[0])
        two = getattr(m2, method).bind(dag_input[1])
        return ensemble.bind(one, two, dag_input[2])


@pytest.mark.parametrize("method", ["forward", "slowly", "many"])
def test_the_diamond(method: str) -> None:
    assert diamond(method).execute(1, 2, 3) == 8


def test_objects_are_made_once() -> None:
    before = Model.body.made
    dag = diamond()
    assert [dag.execute(1, number, 3) for number in range(3)] == [4, 6, 8]
    assert Model.body.made - before == 2


def test_a_shared_call_is_made_once_per_request() -> None:
    calls: list[int] = []

    @pm.deployment
    def noted(value: int) -> int:
        calls.append(value)
        return value

    with pm.InputNode() as dag_input:
        once = noted.bind(dag_input)
        dag = ensemble.bind(once, once, once)
    assert dag.execute(7) == 21
    assert calls == [7]


def test_nested_containers_and_input_by_name() -> None:
    with pm.InputNode() as dag_input:
        m1 = Model.bind(10)
        one = m1.forward.bind(dag_input["one"])
        dag = total.bind({"a": one, "b": total.bind([one, dag_input.two, 3])})
    assert dag.execute(one=1, two=2) == 10 + 15
    with pytest.raises(BadInput, match=r"input\['one'\]: the input has only 'two'"):
        dag.execute(two=2)


def test_generators_stream_at_the_end_and_are_collected_in_the_middle() -> None:
    with pm.InputNode() as dag_input:
        m1 = Model.bind(1)
        last = m1.count.bind(dag_input)
        middle = total.bind(m1.count_slowly.bind(dag_input))
    assert list(last.execute(3)) == [0, 1, 2]
    assert middle.execute(4) == 6


@pytest.mark.parametrize(("value", "result"), [(2, 2 + 3), (20, 2000 + 3)])
def test_nodes_choose_which_node_to_call(value: int, result: int) -> None:
    cheap = Model.bind(1)
    dear = Model.bind(100)
    router = Router.bind(cheap, dear)
    assert router.execute(value) == result


def test_plain_code_waits_for_handles() -> None:
    with pm.InputNode() as dag_input:
        router = Router.bind(Model.bind(5), Model.bind(1))
        dag = router.plainly.bind(dag_input)
    assert dag.execute(3) == 15


def test_it_runs_inside_a_loop_too() -> None:
    async def main() -> int:
        return int(diamond("slowly").execute(1, 2, 3))

    assert asyncio.run(main()) == 8


def test_shards_each_do_a_part() -> None:
    with pm.InputNode() as dag_input:
        sharded = Sharded.bind()
        dag = sharded.part.bind(dag_input)
    assert dag.execute([1, 2, 3, 4, 5]) == 15


def test_errors_of_user_code_are_raised_unchanged() -> None:
    @pm.deployment
    def broken(value: int) -> int:
        raise ValueError(f"no {value}")

    with pytest.raises(ValueError, match="no 3"):
        broken.bind(3).execute()


def test_models_need_a_gateway() -> None:
    with pytest.raises(PointsmanError, match='model "llama" runs behind a gateway'):
        pm.model("llama").chat.bind("hello").execute()
