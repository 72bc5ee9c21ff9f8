"""Tokens per second and KV cache usage per replica."""

from pointsman.parameters import Above0, Share
from pointsman.scaling.policies.sizing import checked, replicas_for
from pointsman.scaling.policy import DeploymentView, Wish


class TokenThroughput:
    """As many replicas as the tokens per second and the usage of KV caches need."""

    def __init__(self, tokens_per_s_per_replica: Above0 | None = None, kv_target: Share | None = 0.8) -> None:
        if tokens_per_s_per_replica is None and kv_target is None:
            raise ValueError("tokensPerSPerReplica or kvTarget must be given")
        checked("tokensPerSPerReplica", tokens_per_s_per_replica)
        checked("kvTarget", kv_target)
        if kv_target is not None and kv_target > 1:
            raise ValueError(f"kvTarget is a share of the KV cache, from 0 to 1, found {kv_target:g}")
        self.tokens, self.kv = tokens_per_s_per_replica, kv_target

    def desired_replicas(self, view: DeploymentView) -> Wish:
        needed: dict[str, int] = {}
        if self.tokens is not None and view.tokens_per_s is not None:
            why = f"{view.tokens_per_s:.0f} tokens/s, {self.tokens:g} per replica"
            needed[why] = replicas_for(view.tokens_per_s / self.tokens, view)
        # Use the last value and not the mean, because the mean may include a time with another number of replicas.
        if self.kv is not None and view.kv_usage.last is not None and view.replicas:
            why = f"KV caches of {view.replicas} are {view.kv_usage.last:.0%} full, {self.kv:.0%} wanted"
            needed[why] = replicas_for(view.replicas * view.kv_usage.last / self.kv, view)
        if not needed:
            least = min(view.target, 1) if not view.load else max(view.target, 1)
            return Wish(least, f"neither tokens nor KV caches were measured, {view.load:g} requests: {least}")
        why, replicas = max(needed.items(), key=lambda item: item[1])
        if view.queued and replicas < max(view.target, 1):  # waiting requests have no tokens yet
            replicas = max(view.target, 1)
            why = f"{why}, and {view.queued:g} requests wait"
        replicas = max(replicas, 1) if view.load else replicas
        return Wish(replicas, f"{why}: {replicas}")
