"""The largest or smallest answer of several policies."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pointsman.scaling.policy import DeploymentView, ScalingPolicy, Wish, invoke_inner, policy_name


class Combined(ABC):
    """Calls all its policies, and chooses one answer. If one of them fails, it fails."""

    word = ""

    @abstractmethod
    def choice(self, numbers: Sequence[int]) -> int:
        """The number to choose."""

    def __init__(self, policies: Sequence[ScalingPolicy]) -> None:
        if not policies:
            raise ValueError("policies is empty; name at least one")
        self.policies = tuple(policies)
        self.windows = tuple({length for policy in policies for length in getattr(policy, "windows", ())})

    def desired_replicas(self, view: DeploymentView) -> Wish:
        wishes = [invoke_inner(policy, view, str(index)) for index, policy in enumerate(self.policies)]
        names = [policy_name(policy) for policy in self.policies]
        replicas = self.choice([wish.replicas for wish in wishes])
        index = next(index for index, wish in enumerate(wishes) if wish.replicas == replicas)
        listed = ", ".join(f"{name} {wish.replicas}" for name, wish in zip(names, wishes, strict=True))
        chosen = wishes[index]
        return Wish(replicas, f"{self.word} of {listed}; {names[index]}: {chosen.why}", chosen.refused)


class MaxOf(Combined):
    """The largest answer of several policies."""

    word = "most"

    def choice(self, numbers: Sequence[int]) -> int:
        return max(numbers)


class MinOf(Combined):
    """The smallest answer of several policies."""

    word = "least"

    def choice(self, numbers: Sequence[int]) -> int:
        return min(numbers)
