"""Runs many replays on all cores. Each is run once, and its figures are stored.

Enters: trials, each a policy at a speed with a seed. Leaves: their figures. The one rule: figures are stored
under a hash of everything on which they depend: the recording, the policy with its code, the setting, and this package.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import msgspec

import pointsman
from pointsman.lab.traffic.measures import Objectives, RunCounters, RunFigures
from pointsman.lab.traffic.policies import TriedPolicy
from pointsman.lab.traffic.replay import ReplaySetting, replay
from pointsman.lab.traffic.sources import recording_of
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One replay. It is plain data, so that it can run in another process."""

    source: str
    """The path of a file, or a text that begins with `generate:`."""
    first: int | None = None
    policy: TriedPolicy | None
    """None if the manifest is used without changes."""
    setting: ReplaySetting
    seed: int = 0
    objectives: Objectives = Objectives()
    gpu_price: float = DEFAULT_PRICE_PER_GPU_HOUR
    name: str = ""
    """The name in reports. Empty if the policy's name is used."""

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        return "manifest" if self.policy is None else self.policy.name

    def run(self, progress: Callable[[float], None] | None = None) -> RunFigures:
        """Run the replay. `progress` is called with the finished share."""
        counters = RunCounters(self.objectives)
        recording = recording_of(self.source, self.first)
        replayed = replay(recording, self.setting, self.policy, self.seed, progress, ended=counters.add)
        return counters.figures(
            replayed,
            policy=self.label,
            speed=self.setting.load.speed,
            seed=self.seed,
            gpu_price=self.gpu_price,
        )

    def key(self) -> str:
        """A hash of everything on which the figures depend."""
        plan = self.setting.fleet.plan(self.policy, self.setting.deployment)
        recipes = [one.scheduling_recipe for one in plan.deployments]
        content = {
            "recording": recording_of(self.source, self.first).survey().digest,
            "policy": recipes,
            "setting": self.setting,
            "seed": self.seed,
            "objectives": self.objectives,
            "gpu_price": self.gpu_price,
            "package": package_digest(),
        }
        return sha256(msgspec.json.encode(content)).hexdigest()[:32]


@cache
def package_digest() -> str:
    """A hash of the source of this package, because another version may decide differently."""
    whole = sha256()
    folder = Path(pointsman.__file__).parent
    for file in sorted(folder.rglob("*.py")) + sorted(folder.rglob("*.json")):
        whole.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return whole.hexdigest()


class TrialCache:
    """Stores figures by their keys, each in a file of its own."""

    def __init__(self, folder: Path | None) -> None:
        """If `folder` is None, nothing is stored."""
        self._folder = folder

    def get(self, key: str) -> RunFigures | None:
        if self._folder is None:
            return None
        try:
            return msgspec.json.decode((self._folder / f"{key}.json").read_bytes(), type=RunFigures)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:  # the file is incomplete: its writing was cut off
            return None

    def put(self, key: str, found: RunFigures) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f"{key}.{os.getpid()}.part"
        part.write_bytes(msgspec.json.encode(found))
        part.replace(self._folder / f"{key}.json")


def default_cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "pointsman" / "lab"


class Finished(msgspec.Struct, frozen=True):
    trial: Trial
    figures: RunFigures
    cached: bool


Progress: TypeAlias = Callable[[float, int, str], None]
"""A function that is called with three values: the number of finished trials, plus the finished share of the running
trial if it is known; the number of all trials; and the label of the last trial."""


def run_trials(
    trials: Sequence[Trial],
    cache_: TrialCache,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[Finished]:
    """Run the trials that are not stored. Returns the figures of all trials, in the order of the trials."""
    done: dict[int, Finished] = {}
    keys = [trial.key() for trial in trials]
    for index, (trial, key) in enumerate(zip(trials, keys, strict=True)):
        known = cache_.get(key)
        if known is not None:
            done[index] = Finished(trial, msgspec.structs.replace(known, policy=trial.label), True)
    left = [index for index in range(len(trials)) if index not in done]

    def within(trial: Trial, share: float) -> None:
        if progress is not None:
            progress(len(done) + share, len(trials), trial.label)

    for index, found in _run([(index, trials[index]) for index in left], processes, within):
        cache_.put(keys[index], found)
        done[index] = Finished(trials[index], found, False)
        if progress is not None:
            progress(len(done), len(trials), trials[index].label)
    return [done[index] for index in range(len(trials))]


def _run(
    trials: Sequence[tuple[int, Trial]], processes: int | None, within: Callable[[Trial, float], None]
) -> Iterator[tuple[int, RunFigures]]:
    """Run trials. If they run one after another, `within` is called with a trial and its finished share."""
    workers = min(processes or os.cpu_count() or 1, len(trials))
    if workers <= 1:
        yield from ((index, trial.run(partial(within, trial))) for index, trial in trials)
        return
    # Processes are spawned, not forked, because the parent may have threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_run_one, trial): index for index, trial in trials}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_one(trial: Trial) -> RunFigures:
    return trial.run()


def grid(
    base: Trial, policies: Iterable[TriedPolicy | None], speeds: Sequence[float], seeds: int, first_seed: int = 0
) -> list[Trial]:
    """Every policy at every speed with every seed."""
    replace = msgspec.structs.replace
    return [
        replace(
            base,
            policy=policy,
            seed=first_seed + seed,
            setting=replace(base.setting, load=replace(base.setting.load, speed=speed)),
        )
        for policy in policies
        for speed in speeds
        for seed in range(seeds)
    ]
