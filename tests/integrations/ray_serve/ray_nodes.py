"""Classes and functions of Ray for the tests."""

import ray


@ray.remote
class Model:
    def __init__(self, val: int) -> None:
        self.val = val

    def forward(self, given: int) -> int:
        return self.val * given


def ensemble(a: int, b: int, c: int) -> int:
    return a + b + c
