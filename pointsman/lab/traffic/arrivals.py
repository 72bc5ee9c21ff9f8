"""When the requests of a recording arrive in a replay.

They may arrive faster, come from more clients, be spread within coarse timestamps, or wait for the turn before them.

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
"""Maximum delay with which each further client begins the recording. It keeps their bursts from coinciding."""
CLIENT_STEP = 1 << 44
"""Distance between the block names of two clients. It keeps clients from sharing prompts."""


class ReplayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How a recording is replayed."""

    speed: float = 1.0
    """Factor on the rate. 2 means twice as many requests per second."""
    clients: bool = False
    """Whether to add clients instead of compressing time. Each client replays the recording with its own prompts."""
    spread: bool = True
    """Whether to spread requests that share a coarse timestamp at random over the time until the next timestamp."""
    closed: bool = False
    """Whether a turn of a session waits until the previous turn has ended and its own think time has passed."""

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
    """Arrivals in order of time. A closed loop may delay arrivals later."""
    load.check()
    each: Iterator[tuple[float, RecordedRequest]]
    if not load.clients:
        each = ((at / load.speed, request) for at, request in _spread(recording, load.spread, seed))
    else:
        each = _several_clients(recording, load, seed)
    for number, (at, request) in enumerate(each):
        yield Arrival(at, number, request)


def _spread(recording: Recording, spread: bool, seed: int) -> Iterator[tuple[float, RecordedRequest]]:
    """Each request with its seconds since the first arrival. Requests with equal timestamps keep their order."""
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
    """The arrivals from one client, with a share of the conversations. Conversations are kept or dropped as a whole."""
    for at, one in _spread(recording, load.spread, seed):
        # The second block identifies a conversation. The first block is often a shared system prompt.
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
