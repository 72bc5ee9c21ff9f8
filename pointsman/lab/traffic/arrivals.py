"""When requests of a recording arrive: faster, from more clients, spread within coarse timestamps, or one by one.

Enters: a recording and a load. Leaves: requests with the second of their arrival, counted from 0. The one rule: the
same seed gives the same arrivals, whatever the policy, so that policies can be compared seed by seed.
"""

import heapq
import math
import random
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import msgspec

from pointsman.errors import PointsmanError
from pointsman.lab.traffic.recording import RecordedRequest, Recording

CLIENT_SHIFT_S = 60.0
"""The recording of each further client begins at most this much later, so that bursts do not coincide."""
CLIENT_STEP = 1 << 44
"""Distance between the block names of two clients, so that clients share no prompts."""


class ReplayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How a recording is replayed."""

    speed: float = 1.0
    """2: twice as many requests per second."""
    clients: bool = False
    """Whether to add clients instead of compressing time; each replays the recording with its own prompts."""
    spread: bool = True
    """Whether to spread requests that share a coarse timestamp evenly at random until the next one."""
    closed: bool = False
    """Whether a turn of a session waits for the end of the one before it, and for its think time."""

    def check(self) -> None:
        if not 0 < self.speed < math.inf:
            raise PointsmanError(f"the speed is {self.speed:g}; it must be above 0")


class Arrival(NamedTuple):
    at: float
    """Seconds since the first arrival."""
    number: int
    """Position in the order of arrival, from 0."""
    request: RecordedRequest


def arrivals(recording: Recording, load: ReplayLoad, seed: int) -> Iterator[Arrival]:
    """Arrivals in order of time. A closed loop may delay them."""
    load.check()
    each: Iterator[tuple[float, RecordedRequest]]
    if not load.clients:
        each = ((at / load.speed, request) for at, request in _spread(recording, load.spread, seed))
    else:
        each = _several_clients(recording, load, seed)
    for number, (at, request) in enumerate(each):
        yield Arrival(at, number, request)


def _spread(recording: Recording, spread: bool, seed: int) -> Iterator[tuple[float, RecordedRequest]]:
    """Requests with their seconds since the first arrival. Requests with equal timestamps keep their order."""
    survey = recording.survey()
    if not spread or not survey.tick_ms:
        yield from (((one.timestamp - survey.began_ms) / 1000, one) for one in recording)
        return
    rng = random.Random(f"arrivals {seed}")
    for timestamp, same in groupby(recording, key=lambda one: one.timestamp):
        together = list(same)
        offsets = sorted(rng.random() for _ in together)
        for offset, one in zip(offsets, together, strict=True):
            yield (timestamp - survey.began_ms + offset * survey.tick_ms) / 1000, one


def _several_clients(recording: Recording, load: ReplayLoad, seed: int) -> Iterator[tuple[float, RecordedRequest]]:
    whole, part = int(load.speed), load.speed - int(load.speed)
    rng = random.Random(f"clients {seed}")
    streams = []
    for client in range(whole + (part > 1e-9)):
        shift_s = rng.uniform(0.0, CLIENT_SHIFT_S) if client else 0.0
        share = 1.0 if client < whole else part
        streams.append(_one_client(recording, load, seed + 1_000_003 * client, client, shift_s, share))
    yield from heapq.merge(*streams, key=lambda one: one[0])


def _one_client(
    recording: Recording, load: ReplayLoad, seed: int, client: int, shift_s: float, share: float
) -> Iterator[tuple[float, RecordedRequest]]:
    """A share of the conversations. Turns of one conversation are kept or dropped together."""
    for at, one in _spread(recording, load.spread, seed):
        # The second block identifies a conversation: the first is often a system prompt that all conversations share.
        conversation = one.session_id or (one.hash_ids[1] if len(one.hash_ids) > 1 else f"{at}")
        if share < 1.0 and random.Random(f"{conversation}").random() >= share:
            continue
        if client:
            one = msgspec.structs.replace(
                one,
                hash_ids=tuple(block + client * CLIENT_STEP for block in one.hash_ids),
                session_id=f"{one.session_id}~{client}" if one.session_id else "",
            )
        yield at + shift_s, one
