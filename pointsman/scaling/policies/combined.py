"""Several policies as one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pointsman.scaling.policy import ScalingPolicy, Wish, invoke_inner, policy_name
from pointsman.scaling.view import DeploymentView


class Combined(ABC):
    """Asks all of them, and lets one decide. If one of them breaks its contract, none does."""

    word = ""

    @abstractmethod
    def choice(self, numbers: Sequence[int]) -> int:
        """Which of these it is."""

    def __init__(self, policies: Sequence[ScalingPolicy]) -> None:
        if not policies:
            raise ValueError("policies is empty; name at least one")
        self.policies = tuple(policies)
        self.windows = tuple({length for policy in policies for length in getattr(policy, "windows", ())})

    def desired_replicas(self, view: DeploymentView) -> Wish:
        wishes = [invoke_inner(policy, view, str(place)) for place, policy in enumerate(self.policies)]
        names = [policy_name(policy) for policy in self.policies]
        replicas = self.choice([wish.replicas for wish in wishes])
        place = next(place for place, wish in enumerate(wishes) if wish.replicas == replicas)
        all_of_them = ", ".join(f"{name} {wish.replicas}" for name, wish in zip(names, wishes, strict=True))
        chosen = wishes[place]
        return Wish(replicas, f"{self.word} of {all_of_them}; {names[place]}: {chosen.why}", chosen.refused)


class MaxOf(Combined):
    """As many as the one that wants most."""

    word = "most"

    def choice(self, numbers: Sequence[int]) -> int:
        return max(numbers)


class MinOf(Combined):
    """As many as the one that wants least."""

    word = "least"

    def choice(self, numbers: Sequence[int]) -> int:
        return min(numbers)
