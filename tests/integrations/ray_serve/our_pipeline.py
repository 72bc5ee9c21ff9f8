"""The diamond with our decorators; one node calls another through a handle."""

from typing import Any

import pointsman as pm


@pm.deployment
class Model:
    def __init__(self, val: int) -> None:
        self.val = val

    def forward(self, given: int) -> int:
        return self.val * given


@pm.deployment
class Ensemble:
    def __init__(self, m2: Any) -> None:
        self.m2 = m2

    async def add(self, a: int, b: int, c: int) -> int:
        return a + int(await self.m2.forward(b)) + c


with pm.InputNode() as dag_input:
    m1 = Model.bind(1)
    m2 = Model.bind(2)
    ensemble = Ensemble.bind(m2)
    dag = ensemble.add.bind(m1.forward.bind(dag_input[0]), dag_input[1], dag_input[2])
