"""The diamond, as a user writes it: two models of the same class side by side, and a function that joins them."""

import pointsman as pm


@pm.deployment
class Model:
    """Multiplies."""

    def __init__(self, val: int) -> None:
        self.val = val

    def forward(self, value: int) -> int:
        return self.val * value


@pm.deployment
def ensemble(a: int, b: int, c: int) -> int:
    return a + b + c


with pm.InputNode() as given:
    m1 = Model.bind(1)  # mypy takes no notice of decorators of classes
    m2 = Model.bind(2)  # mypy takes no notice of decorators of classes
    dag = ensemble.bind(m1.forward.bind(given[0]), m2.forward.bind(given[1]), given[2])
