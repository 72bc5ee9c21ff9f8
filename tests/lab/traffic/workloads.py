"""Small made-up traffic and fleets."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pointsman.lab.traffic import RecordedRequest, Recording, ReplayLoad, ReplaySetting, fleet_of

FLEET = "2x8B|h100_sxm|vllm|tp1"


def recorded(*requests: RecordedRequest, name: str = "made up") -> Recording:
    return Recording(name, lambda: requests)


def conversations(count: int = 20, turns: int = 4, seed: int = 1, per_second: float = 4.0) -> list[RecordedRequest]:
    """Sessions whose prompts grow by a block or two with each turn."""
    rng, made, blocks = random.Random(seed), [], 1
    for session in range(count):
        at, prompt = rng.uniform(0, count * turns / per_second), [0]
        for _ in range(turns):
            grown = rng.randint(1, 3)
            prompt += range(blocks, blocks + grown)
            blocks += grown
            one = RecordedRequest(
                timestamp=round(at * 1000),
                input_length=len(prompt) * 512 - rng.randint(0, 500),
                output_length=rng.randint(1, 120),
                hash_ids=tuple(prompt),
                session_id=f"s{session}",
                tenant=f"t{session % 2}",
            )
            made.append(one)
            at += rng.uniform(1.0, 5.0)
    return sorted(made, key=lambda one: one.timestamp)


def written(file: Path, requests: Sequence[RecordedRequest]) -> Path:
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in requests))
    return file


def setting(fleet: str = FLEET, **load: object) -> ReplaySetting:
    return ReplaySetting(fleet=fleet_of(fleet), load=ReplayLoad(**load))  # type: ignore[arg-type]
