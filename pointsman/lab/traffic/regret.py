"""The regret of a single decision: how outcomes would differ if one request had gone to another instance.

Enters: a trial and a request. Leaves: for each other instance, the difference that it makes. The one rule: the replay
is the same up to the decision. Then one choice is replaced, and after that the policy decides alone again.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import msgspec

from pointsman.errors import PointsmanError
from pointsman.lab.traffic.measures import Objectives
from pointsman.lab.traffic.replay import Replayed, Substitution, replay
from pointsman.lab.traffic.sources import recording_of
from pointsman.lab.traffic.trials import Progress, Trial
from pointsman.render.text import text_table


class Branch(msgspec.Struct, frozen=True):
    """The outcome if the request goes to one instance."""

    instance: str
    chosen: bool
    """Whether the policy has chosen this instance."""
    ttft_s: float
    """Time to the first token of the request."""
    tpot_s: float
    met: bool
    misses: int
    """Number of requests that missed their objectives, among all requests."""
    ttft_mean_s: float
    """Mean time to the first token over all served requests."""
    latency_mean_s: float


class Regret(msgspec.Struct, frozen=True):
    request: int
    input_tokens: int
    cached: dict[str, int]
    """Number of tokens of the prompt that each instance had cached."""
    branches: list[Branch]
    """The policy's choice, then the other instances from best to worst."""

    @property
    def misses(self) -> int:
        """Number of misses that the best other instance would have saved. 0 if the policy's choice is the best."""
        return max(self.branches[0].misses - min(one.misses for one in self.branches), 0)

    def as_text(self) -> str:
        own = self.branches[0]
        heads = [
            "instance",
            "TTFT",
            "TPOT ms",
            "in time",
            "cached",
            "misses of all",
            "mean TTFT of all",
            "mean e2e of all",
        ]
        rows = [
            [
                f"{one.instance} (chosen)" if one.chosen else one.instance,
                f"{one.ttft_s:.3f}",
                f"{one.tpot_s * 1000:.1f}",
                "yes" if one.met else "no",
                f"{self.cached[one.instance]:,}",
                f"{one.misses:,}" if one.chosen else f"{one.misses - own.misses:+,}",
                f"{one.ttft_mean_s:.4f}" if one.chosen else f"{one.ttft_mean_s - own.ttft_mean_s:+.4f}",
                f"{one.latency_mean_s:.4f}" if one.chosen else f"{one.latency_mean_s - own.latency_mean_s:+.4f}",
            ]
            for one in self.branches
        ]
        better = f"the best alternative saves {self.misses} misses" if self.misses else "no alternative saves a miss"
        return f"request {self.request}, {self.input_tokens:,} input tokens: {better}\n{text_table(heads, rows)}"

    def as_dict(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built | {"misses": self.misses}


def regret(
    trial: Trial,
    request: int,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Regret:
    """The regret of one decision. `request` is the number of the request in the order of arrival, from 0."""
    own = _replayed(trial, None)
    if not 0 <= request < len(own.ended):
        raise PointsmanError(f"there is no request {request}; they are numbered from 0 to {len(own.ended) - 1:,}")
    decided = own.ended[request]
    if not decided.instance:
        raise PointsmanError(f"request {request} was sent nowhere: {decided.outcome}")
    others = [name for name in own.line.load if name != decided.instance]
    branches, cached = [_branch(own, trial.objectives, request, chosen=True)], {decided.instance: decided.cached_tokens}
    workers = min(processes or os.cpu_count() or 1, len(others))
    substitutions = [Substitution(request, name) for name in others]
    if workers <= 1:
        made = map(partial(_substituted, trial), substitutions)
        found = list(made)
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = []
            for number, one in enumerate(pool.map(partial(_substituted, trial), substitutions), 1):
                found.append(one)
                if progress is not None:
                    progress(number, len(others), one[0].instance)
    for branch, tokens in found:
        branches.append(branch)
        cached[branch.instance] = tokens
    branches[1:] = sorted(branches[1:], key=lambda one: (one.misses, one.ttft_mean_s))
    return Regret(request, decided.request.input_length, cached, branches)


def _substituted(trial: Trial, substitution: Substitution) -> tuple[Branch, int]:
    found = _replayed(trial, substitution)
    return _branch(found, trial.objectives, substitution.request, chosen=False), found.ended[
        substitution.request
    ].cached_tokens


def _replayed(trial: Trial, substitution: Substitution | None) -> Replayed:
    recording = recording_of(trial.source, trial.first)
    return replay(recording, trial.setting, trial.policy, trial.seed, substitution=substitution)


def _branch(found: Replayed, objectives: Objectives, request: int, *, chosen: bool) -> Branch:
    served = [one for one in found.ended if one.served]
    own = found.ended[request]
    return Branch(
        own.instance,
        chosen,
        own.ttft_s,
        own.tpot_s,
        objectives.met(own),
        sum(not objectives.met(one) for one in found.ended),
        sum(one.ttft_s for one in served) / max(len(served), 1),
        sum(one.latency_s for one in served) / max(len(served), 1),
    )
