"""An engine that batches continuously, as vLLM does: every step extends all answers and reads some of the prompts.

Theory of operation. Jobs wait in order, are admitted while there are seats (`max_num_seqs`), budget
(`max_num_batched_tokens`) and KV blocks, read their prompt in as many steps as the budget requires, then write a token
per step. Running answers come first: when one needs a block and none is left, the job that was admitted last loses its
seat and starts again at the head of the queue. The duration of a step is computed when it begins; its tokens are there
when it ends.

The effects of a step on answers are counted, not applied job by job: which answers need a block and which end is known
in advance by the number of the step.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from pointsman.simulator.performance import Counts, EngineStep, Hardware, Job

# The blocks of a KV cache: owners, content, and eviction.
#
# A block is free, or used by running jobs, or idle: it holds part of a text that may be asked for again. Idle blocks
# are evicted in the order of their last use, the end of a text before its beginning.


class Lease:
    __slots__ = ("own", "shared")

    def __init__(self) -> None:
        self.shared: list[int] = []
        """Hashes of blocks that other jobs may use too; always those at the beginning."""
        self.own = 0
        """Further blocks, of this job only."""


class KvCache:
    """Counts blocks; it stores no data."""

    def __init__(self, kv_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = kv_tokens // block_size
        self._users: dict[int, int] = {}
        """Hash -> number of leases that share the block."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Hashes of idle blocks, the least recently used first."""
        self._own = 0

    @property
    def used(self) -> int:
        """Blocks of running jobs."""
        return len(self._users) + self._own

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def usage(self) -> float:
        return self.used / self.capacity if self.capacity else 1.0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def known(self, hashes: Sequence[int], limit: int) -> int:
        """How many blocks at the beginning are cached, at most `limit`."""
        users, idle = self._users, self._idle
        for index, block in enumerate(hashes):
            if index == limit or (block not in users and block not in idle):
                return index
        return min(len(hashes), limit)

    def lease(self, hashes: Sequence[int], known: int, blocks: int) -> Lease | None:
        """Allocate blocks, of which the first `known` are cached; None if there is not enough room."""
        idle_hits = sum(block in self._idle for block in hashes[:known])
        if self.used + idle_hits + blocks - known > self.capacity:
            return None
        lease = Lease()
        for block in hashes[:known]:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
            lease.shared.append(block)
        lease.own = blocks - known
        self.extend(lease.own)
        return lease

    def has_room(self, blocks: int) -> bool:
        return self.used + blocks <= self.capacity

    def extend(self, blocks: int) -> None:
        """Allocate blocks, evicting idle ones; `settle` assigns them to a lease later."""
        self._own += blocks
        while len(self._users) + len(self._idle) + self._own > self.capacity:
            self._idle.popitem(last=False)

    def settle(self, lease: Lease, blocks: int) -> None:
        """Assign to a job the blocks that were allocated with `extend`: it has this many now."""
        lease.own = blocks - len(lease.shared)

    def publish(self, lease: Lease, hashes: Sequence[int], blocks: int) -> None:
        """The first `blocks` blocks are computed: other jobs may share them, unless another job computed the same."""
        for block in hashes[len(lease.shared) : blocks]:
            if block in self._users:
                break
            self._idle.pop(block, None)  # computed again although it was cached: the old one is evicted
            self._users[block] = 1
            lease.shared.append(block)
            lease.own -= 1
            self._own -= 1

    def release(self, lease: Lease) -> None:
        """Free the blocks of a job; shared ones stay until the room is needed."""
        self._own -= lease.own
        for block in reversed(lease.shared):
            users = self._users.pop(block) - 1
            if users:
                self._users[block] = users
            else:
                self._idle[block] = None
        lease.own = 0
        lease.shared.clear()


class Limits(NamedTuple):
    """Settings of an engine; the names are vLLM's."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    kv_tokens: int | None = None
    """None for that of the hardware."""
    time_scale: float = 1.0
    """2 is twice as fast."""


class _Seat:
    __slots__ = ("computed", "lease", "since", "target")

    def __init__(self, lease: Lease, target: int, computed: int) -> None:
        self.lease = lease
        self.target = target
        """Tokens to read before it writes: the prompt, and what it had written before it was preempted."""
        self.computed = computed
        self.since = -1
        """The step in which it wrote first; -1 while it reads."""


class ContinuousBatching:
    """A `Pace` with continuous batching."""

    def __init__(self, hardware: Hardware, limits: Limits = Limits()) -> None:  # noqa: B008
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens ({limits.max_num_batched_tokens}) must be at least max_num_seqs")
        self.counts = Counts()
        self.cache = KvCache(limits.kv_tokens or hardware.kv_tokens, limits.block_size)
        self._hardware = hardware
        self._limits = limits
        self._waiting: dict[Job, None] = {}
        self._preempted: list[Job] = []
        """Jobs that lost their seat; the last comes first."""
        self._seats: dict[Job, _Seat] = {}
        """In the order of admission."""
        self._reading: dict[Job, _Seat] = {}
        self._writing: dict[Job, _Seat] = {}
        self._context = 0
        """Tokens in the caches of all writing jobs."""
        self._step = 0
        self._blocks_due = [0] * limits.block_size
        """By step number modulo block size: how many writing jobs need a new block in that step."""
        self._last_steps: dict[int, dict[Job, None]] = {}
        """Step -> jobs that write their last token in it."""
        self._parts: Sequence[tuple[Job, int]] = ()
        """Tokens that the current step reads of each prompt."""
        self._ends_at: float | None = None
        self._has_grown = False
        """The blocks that the current step fills are allocated."""
        self._unreported: list[EngineStep] = []

    @property
    def running(self) -> int:
        return len(self._seats)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def kv_usage(self) -> float:
        return self.cache.usage

    @property
    def next_at(self) -> float | None:
        return self._unreported[0].at if self._unreported else self._ends_at

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        return self.cache.blocks_for(prompt_tokens + output_tokens) <= self.cache.capacity

    def submit(self, job: Job, now: float) -> None:
        if job.output_tokens < 1 or job.prompt_tokens < 1:
            raise ValueError(
                f"a job must have tokens to read and to write, found {job.prompt_tokens} and {job.output_tokens}"
            )
        if not self.fits(job.prompt_tokens, job.output_tokens):
            tokens = job.prompt_tokens + job.output_tokens
            room = self.cache.capacity * self.cache.block_size
            raise ValueError(f"a job of {tokens} tokens does not fit into a KV cache of {room}")
        self._run_until(now)
        job.arrived = now
        self._waiting[job] = None
        if self._ends_at is None:
            self._begin(now)

    def cancel(self, job: Job, now: float) -> None:
        self._run_until(now)
        if job in self._waiting:
            del self._waiting[job]
        elif job in self._preempted:
            self._preempted.remove(job)
        elif job in self._seats:
            self._leave(job)

    def advance(self, now: float) -> list[EngineStep]:
        self._run_until(now)
        steps, self._unreported = self._unreported, []
        return steps

    def generated(self, job: Job) -> int:
        seat = self._writing.get(job)
        return job.generated if seat is None else job.generated + self._step - seat.since

    # A step

    def _run_until(self, now: float) -> None:
        while self._ends_at is not None and self._ends_at <= now:
            ended = self._ends_at
            self._unreported.append(self._end(ended))
            self._begin(ended)

    def _begin(self, now: float) -> None:
        """Decide what the next step does and how long it takes."""
        may_admit = self._grow_answers()
        writing = len(self._writing)
        budget = self._limits.max_num_batched_tokens - writing
        parts: list[tuple[Job, int]] = []
        attended = 0.0
        reading = list(self._reading)
        while budget > 0:
            job = reading.pop(0) if reading else self._admit() if may_admit else None
            if job is None:
                break
            seat = self._reading[job]
            part = min(seat.target - seat.computed, budget)
            parts.append((job, part))
            attended += part * (seat.computed + part / 2)
            budget -= part
        self._parts = parts
        if not writing and not parts:
            self._ends_at = None
            return
        tokens = self._limits.max_num_batched_tokens - budget
        duration_ms = self._hardware.step_ms(tokens, attended, self._context, writing)
        self._ends_at = now + duration_ms / 1000.0 / self._limits.time_scale

    def _end(self, now: float) -> EngineStep:
        """Jobs that write have one more token; jobs that have read their prompt have their first."""
        produced = list(self._writing)
        finished = list(self._last_steps.pop(self._step, ()))
        self._step += 1
        self._has_grown = False
        self._context += len(self._writing)
        for job in finished:
            self._leave(job)
        for job, part in self._parts:
            seat = self._reading.get(job)
            if seat is None:  # cancelled meanwhile
                continue
            seat.computed += part
            if seat.computed == seat.target:
                produced.append(job)
                if self._start_writing(job, seat):
                    finished.append(job)
        return EngineStep(now, produced, finished)

    def _admit(self) -> Job | None:
        """Seat the job at the head of the queue; None if there is none, or no room."""
        if len(self._seats) >= self._limits.max_num_seqs:
            return None
        job = self._preempted[-1] if self._preempted else next(iter(self._waiting), None)
        if job is None:
            return None
        target = job.prompt_tokens + job.generated
        # At least one token must be computed, to continue from.
        known = self.cache.known(job.hashes, (target - 1) // self.cache.block_size)
        lease = self.cache.lease(job.hashes, known, self.cache.blocks_for(target))
        if lease is None:
            return None
        if self._preempted:
            self._preempted.pop()
        else:
            del self._waiting[job]
            job.cached_tokens = known * self.cache.block_size
            self.counts.prefix_queries += job.prompt_tokens
            self.counts.prefix_hits += job.cached_tokens
        self._seats[job] = self._reading[job] = _Seat(lease, target, known * self.cache.block_size)
        return job

    # Answers

    def _start_writing(self, job: Job, seat: _Seat) -> bool:
        """It has read its prompt and written one token. True if that was its last."""
        job.generated += 1
        if job.generated == job.output_tokens:
            del self._reading[job]
            self._forget(job, seat, seat.target)
            return True
        self.cache.publish(seat.lease, job.hashes, seat.target // self.cache.block_size)
        seat.since = self._step
        del self._reading[job]
        self._writing[job] = seat
        self._context += seat.target
        self._blocks_due[self._residue(seat)] += 1
        self._last_steps.setdefault(self._last_step(job, seat), {})[job] = None
        return False

    def _grow_answers(self) -> bool:
        """Allocate blocks for the tokens that this step adds to answers. False if a job was preempted to make room."""
        due = self._step % self.cache.block_size
        room = True
        while not self.cache.has_room(self._blocks_due[due]):
            self._preempt(next(reversed(self._seats)))
            room = False
        self.cache.extend(self._blocks_due[due])
        self._has_grown = True
        return room

    def _preempt(self, job: Job) -> None:
        self._leave(job)
        self._preempted.append(job)
        self.counts.preemptions += 1

    def _leave(self, job: Job) -> None:
        """Take its seat away; `generated` says how far it got."""
        seat = self._seats[job]
        if self._reading.pop(job, None) is not None:
            self._forget(job, seat, seat.computed)
            return
        written = self._step - seat.since
        tokens = seat.target + written
        self._blocks_due[self._residue(seat)] -= 1
        last = self._last_steps.get(self._last_step(job, seat))
        if last is not None:
            last.pop(job, None)
        job.generated += written
        del self._writing[job]
        self._context -= tokens
        self.cache.settle(seat.lease, self.cache.blocks_for(tokens + self._has_grown))
        self._forget(job, seat, tokens)

    def _forget(self, job: Job, seat: _Seat, tokens: int) -> None:
        """Free its blocks; full ones may be reused by other prompts."""
        del self._seats[job]
        self.cache.publish(seat.lease, job.hashes, tokens // self.cache.block_size)
        self.cache.release(seat.lease)

    def _residue(self, seat: _Seat) -> int:
        """The steps in which an answer needs a block, modulo block size."""
        return (seat.since - seat.target) % self.cache.block_size

    def _last_step(self, job: Job, seat: _Seat) -> int:
        return seat.since + job.output_tokens - job.generated - 1
