"""An engine that batches continuously, as vLLM does: every step extends all answers and reads some of the prompts.

Theory of operation. Jobs wait in order. They are admitted while there are seats (`max_num_seqs`), budget
(`max_num_batched_tokens`) and KV blocks. A job reads its prompt in as many steps as the budget requires, then writes a
token per step. Running answers come first: if an answer needs a block and no block is left, the job that was admitted
last loses its seat and starts again at the head of the queue. A step allocates blocks for the tokens that it computes,
and other jobs may share these blocks from that step on. The duration of a step is computed when the step begins; its
tokens exist when the step ends.

The effects of a step on answers are counted, not applied job by job: the number of a step determines in advance which
answers need a block in it, and which answers end. Steps that read no prompt can be taken together as a stretch, until
an answer ends or blocks run out: the duration of such a step is linear in its number.
"""

from collections import deque
from heapq import heappop, heappush
from math import inf, sqrt
from typing import NamedTuple

from pointsman.simulator.kv_cache import KvCache, Lease
from pointsman.simulator.performance import Counts, EngineLoad, EngineStep, Hardware, Job


class Limits(NamedTuple):
    """Settings of an engine; the names are vLLM's."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    kv_tokens: int | None = None
    """Size of the KV cache in tokens; None for the size that the hardware has."""
    time_scale: float = 1.0
    """Factor on the speed; 2 is twice as fast."""


class Seat(Lease):
    """A running job and its blocks."""

    __slots__ = ("computed", "since", "target")

    def __init__(self, target: int, computed: int) -> None:
        self.run = None
        self.own = 0
        self.target = target
        """Tokens that the job reads before it writes: its prompt, and the tokens that it wrote before a preemption."""
        self.computed = computed
        self.since = -1
        """The step in which the job wrote its first token; -1 while the job reads."""


class ContinuousBatching:
    """A `Pace` with continuous batching."""

    def __init__(self, hardware: Hardware, limits: Limits = Limits(), *, every_token: bool = True) -> None:  # noqa: B008
        """`every_token`: whether `advance` reports every token. If not, it reports only the first and last token of
        each job, so that steps can be taken as stretches."""
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens ({limits.max_num_batched_tokens}) must be at least max_num_seqs")
        self.counts = Counts()
        self.cache = KvCache(limits.kv_tokens or hardware.kv_tokens, limits.block_size)
        self._hardware = hardware
        self._step_ms = hardware.step_ms
        self._size = limits.block_size
        self._most_seats = limits.max_num_seqs
        self._budget = limits.max_num_batched_tokens
        self._every_token = every_token
        self._ms = 0.001 / limits.time_scale
        """A millisecond of the hardware, in seconds."""
        self._waiting: deque[Job] = deque()
        """Waiting jobs, preempted jobs first."""
        self._preempted: set[Job] = set()
        """Waiting jobs that were admitted before."""
        self._seats: dict[Job, Seat] = {}
        """Running jobs, in the order of admission."""
        self._writing = 0
        """Number of running jobs that write."""
        self._context = 0
        """Tokens in the caches of writing jobs."""
        self._step = 0
        self._blocks_due = [0] * limits.block_size
        """How many writing jobs need a new block in a step, by step number modulo block size."""
        self._any_due = bytearray(limits.block_size)
        """1 where `_blocks_due` is not 0."""
        self._last_steps: dict[int, list[Job]] = {}
        """For each step, the jobs that write their last token in that step."""
        self._ends: list[int] = []
        """A heap of the steps in `_last_steps`; some of them no longer have jobs."""
        self._parts: list[tuple[Job, Seat, int]] = []
        """For each prompt, the number of tokens that the current step reads."""
        self._partial: Job | None = None
        """The job that will not have read its whole prompt at the end of the current step. Only the last job can be in
        this state, because it gets the rest of the budget."""
        self._began_at = 0.0
        """When the current stretch began."""
        self._steps = 1
        """Number of steps in the current stretch."""
        self._step_s = 0.0
        """The duration of the stretch's first step; each further step takes `_more_s` longer than the step before."""
        self._more_s = 0.0
        self.ends_at: float | None = None
        """When the current stretch ends; None if there is none."""
        self._has_grown = False
        """Whether the blocks that the current step fills are allocated."""
        self._reported = (0, 0, 0)
        """Running jobs, waiting jobs and used blocks at the end of the last step."""
        self._left_waiting = 0
        """Jobs that waited when the current step had begun."""
        self._unreported: list[EngineStep] = []

    @property
    def running(self) -> int:
        return len(self._seats)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        return self.cache.usage

    @property
    def next_at(self) -> float | None:
        return self._unreported[0].at if self._unreported else self.ends_at

    def load(self, now: float) -> EngineLoad:
        self._run_until(now)
        cache, until = self.cache, self.ends_at
        if until is None or self._steps == 1:
            running, waiting, used = self._reported
            until = inf if until is None else until
        else:
            done = self._steps_done(now)
            running, waiting, used = self._state_after(done) if done else self._reported
            until = self._stays_until(done, until)
        return EngineLoad(running, waiting, used / cache.capacity, cache.block_size, cache.capacity, until)

    def _stays_until(self, done: int, ends_at: float) -> float:
        """When an answer next needs a block, or when the stretch ends if that is earlier. `done`: the number of steps
        of the stretch that have ended."""
        if not done:
            return self._end_of(1)
        size = self._size
        begin = (self._step + done) % size
        steps = self._any_due.find(1, begin) - begin
        if steps < 0:
            steps = self._any_due.find(1) + size - begin
        done += steps + 1
        return self._end_of(done) if done < self._steps else ends_at

    def _state_after(self, done: int) -> tuple[int, int, int]:
        """The reported state after `done` steps of the stretch: after at least one step, but not after the last."""
        return len(self._seats), self._left_waiting, self.cache.used + self._growth(self._step + 1, done - 1)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        return -(-(prompt_tokens + output_tokens) // self._size) <= self.cache.capacity

    def submit(self, job: Job, now: float) -> None:
        if job.output_tokens < 1 or job.prompt_tokens < 1:
            raise ValueError(
                f"a job must have tokens to read and to write, found {job.prompt_tokens} and {job.output_tokens}"
            )
        if not self.fits(job.prompt_tokens, job.output_tokens):
            tokens = job.prompt_tokens + job.output_tokens
            room = self.cache.capacity * self.cache.block_size
            raise ValueError(f"a job of {tokens} tokens does not fit into a KV cache of {room}")
        if self.ends_at is not None and self.ends_at <= now:
            self._run_until(now)
        job.arrived = now
        self._waiting.append(job)
        if self.ends_at is None:
            self._begin(now)
        elif self._steps > 1:
            # The current step ends the stretch: the job joins the next stretch, or shows as waiting.
            self._steps = self._steps_done(now) + 1
            self.ends_at = self._end_of(self._steps)

    def cancel(self, job: Job, now: float) -> None:
        self._run_until(now)
        if job in self._seats:
            if self._steps > 1:
                done = self._steps_done(now)
                if done:
                    self._reported = self._state_after(done)
                self.ends_at = self._end_of(done + 1)
                self._steps = 1
                self.cache.allocate(self._growth(self._step + 1, done))
                self._step += done
                self._context += done * self._writing
            self._leave(job)
        elif job in self._waiting:
            self._waiting.remove(job)
            self._preempted.discard(job)

    def advance(self, now: float) -> list[EngineStep]:
        ends_at = self.ends_at
        while ends_at is not None and ends_at <= now:
            self._end(ends_at)
            self._begin(ends_at)
            ends_at = self.ends_at
        steps = self._unreported
        if steps:
            self._unreported = []
        return steps

    def generated(self, job: Job, now: float) -> int:
        """The number of tokens that a job has written so far."""
        self._run_until(now)
        seat = self._seats.get(job)
        if seat is None or seat.since < 0:
            return job.generated
        done = self._steps_done(now) if self._steps > 1 else 0
        return job.generated + self._step + done - seat.since

    # A stretch of steps

    def _run_until(self, now: float) -> None:
        ends_at = self.ends_at
        while ends_at is not None and ends_at <= now:
            self._end(ends_at)
            self._begin(ends_at)
            ends_at = self.ends_at

    def _begin(self, now: float) -> None:
        """Decide what the next steps do and how long they take."""
        may_admit = not self._blocks_due[self._step % self._size] or self._grow_answers()
        self._has_grown = True
        self._steps = 1
        waiting = self._waiting
        if self._partial is not None or (waiting and may_admit):
            tokens, attended, may_admit = self._read_prompts(may_admit)
            if tokens:
                self._left_waiting = len(waiting)
                writing = self._writing
                duration_ms = self._step_ms(tokens + writing, attended, self._context, writing)
                self.ends_at = now + duration_ms * self._ms
                return
        self._left_waiting = len(waiting)
        writing = self._writing
        if not writing:
            self.ends_at = None
            return
        self._began_at = now
        self._step_s = step_s = self._step_ms(writing, 0.0, self._context, writing) * self._ms
        if self._every_token or (waiting and not may_admit):
            self.ends_at = now + step_s
        else:
            self._more_s = more_s = self._hardware.ck * writing * self._ms
            self._steps = steps = self._stretch()
            self.ends_at = now + steps * step_s + more_s * (steps * (steps - 1) // 2)

    def _read_prompts(self, may_admit: bool) -> tuple[int, float, bool]:
        """Give the prompts the part of the budget that the answers do not use.

        Returns the number of tokens to read, the attention that these tokens need, and whether jobs may be admitted.
        """
        cache, parts, waiting, seats = self.cache, self._parts, self._waiting, self._seats
        size, most_seats = self._size, self._most_seats
        left = budget = self._budget - self._writing
        attended = 0.0
        job, self._partial = self._partial, None
        while True:
            if job is not None:
                seat = seats[job]
                computed = seat.computed
                part = seat.target - computed
                if part > left:
                    part = left
                blocks = -(-(computed + part) // size) - seat.own - (0 if seat.run is None else seat.run.end)
                if blocks > cache.capacity - cache.used:
                    self._preempt(job)  # this job was admitted last
                    return 0, 0.0, False
                if blocks:
                    cache.allocate(blocks)
                    seat.own += blocks
            else:
                if not (may_admit and left and waiting) or len(seats) >= most_seats:
                    break
                job = waiting[0]
                target = job.prompt_tokens + job.generated
                # The answer continues from a computed token, so at least one token must be computed.
                cached = cache.known(job.hashes, (target - 1) // size)
                from_cache = computed = cached.blocks * size
                if job.transferred > computed:
                    computed = min(job.transferred, target - 1)
                part = target - computed
                if part > left:
                    part = left
                seat = Seat(target, computed)
                if not cache.lease(seat, cached, -(-(computed + part) // size)):
                    break
                waiting.popleft()
                seats[job] = seat
                self._count(job, from_cache)
            done = computed + part
            cache.publish(seat, job.hashes, done // size)
            parts.append((job, seat, part))
            attended += part * (computed + part / 2)
            left -= part
            if done < seat.target:
                self._partial = job
                break
            job = None
        return budget - left, attended, may_admit

    def _count(self, job: Job, cached_tokens: int) -> None:
        if job in self._preempted:
            self._preempted.remove(job)
        else:
            job.cached_tokens = cached_tokens
            self.counts.prefix_queries += job.prompt_tokens
            self.counts.prefix_hits += cached_tokens

    def _end(self, now: float) -> None:
        """End a stretch: jobs that write have more tokens, and jobs that have read their prompt have their first
        token."""
        produced = [job for job, seat in self._seats.items() if seat.since >= 0] if self._every_token else []
        steps, step, cache = self._steps, self._step, self.cache
        if steps > 1:
            growth = self._growth(step + 1, steps - 1)
            if growth:
                cache.allocate(growth)
        self._step = step = step + steps
        self._context += steps * self._writing
        self._has_grown = False
        finished = self._last_steps.pop(step - 1, None)
        if finished is None:
            finished = []
        else:
            for job in finished:
                self._leave(job)
        if self._parts:
            for job, seat, part in self._parts:
                seat.computed += part
                if seat.computed == seat.target and job in self._seats:  # otherwise the job was cancelled
                    produced.append(job)
                    if self._start_writing(job, seat):
                        finished.append(job)
            self._parts.clear()
        self._reported = (len(self._seats), self._left_waiting, cache.used)
        if produced or finished or self._every_token:
            self._unreported.append(EngineStep(now, produced, finished))

    def _stretch(self) -> int:
        """The number of steps that can be taken together, which is until an answer ends or blocks run out."""
        ends = self._ends
        while ends[0] not in self._last_steps:
            heappop(ends)
        steps = ends[0] - self._step + 1
        size, room = self._size, self.cache.room
        if self._writing * (steps // size + 1) > room:
            for number in range(1, steps):
                room -= self._blocks_due[(self._step + number) % size]
                if room < 0:
                    return number
        return steps

    def _end_of(self, steps: int) -> float:
        """The time when this many steps of the stretch have ended."""
        return self._began_at + steps * self._step_s + self._more_s * (steps * (steps - 1) // 2)

    def _steps_done(self, now: float) -> int:
        """The number of steps of this stretch that have ended at a time before the stretch's end."""
        began_at, step_s, more_s, steps = self._began_at, self._step_s, self._more_s, self._steps
        passed, half = now - began_at, more_s / 2
        first = step_s - half
        done = int(2 * passed / (first + sqrt(first * first + 4 * half * passed)))
        # Correct the result for rounding: it must agree with the ends that `_end_of` computes.
        while done and began_at + done * step_s + more_s * (done * (done - 1) // 2) > now:
            done -= 1
        while done + 1 < steps and began_at + (done + 1) * step_s + more_s * ((done + 1) * done // 2) <= now:
            done += 1
        return done if done < steps else steps - 1

    def _growth(self, first: int, steps: int) -> int:
        """Blocks that answers need in these steps."""
        size = self._size
        begin, blocks = first % size, 0
        if steps >= size:
            blocks = steps // size * self._writing
            steps %= size
        end = begin + steps
        return blocks + (self._due(begin, end) if end <= size else self._due(begin, size) + self._due(0, end - size))

    def _due(self, begin: int, end: int) -> int:
        """Blocks that answers need in steps with these numbers, modulo block size."""
        due = self._blocks_due
        if end - begin < 8 * self._writing:
            return sum(due[begin:end])
        find, blocks = self._any_due.find, 0
        at = find(1, begin, end)
        while at >= 0:
            blocks += due[at]
            at = find(1, at + 1, end)
        return blocks

    # Answers

    def _start_writing(self, job: Job, seat: Seat) -> bool:
        """Let a job that has read its prompt write its first token. Returns True if that is also its last token."""
        job.generated += 1
        rest = job.output_tokens - job.generated
        if not rest:
            self._forget(job, seat, seat.target)
            return True
        step = seat.since = self._step
        self._writing += 1
        self._context += seat.target
        due = (step - seat.target) % self._size
        self._blocks_due[due] += 1
        self._any_due[due] = 1
        last_step = step + rest - 1
        ending = self._last_steps.get(last_step)
        if ending is None:
            self._last_steps[last_step] = [job]
            heappush(self._ends, last_step)
        else:
            ending.append(job)
        return False

    def _grow_answers(self) -> bool:
        """Allocate blocks for the tokens that this step adds to answers. Returns False if a job was preempted to make
        room."""
        due = self._step % self._size
        room = True
        while self._blocks_due[due] > self.cache.room:
            self._preempt(next(reversed(self._seats)))
            room = False
        self.cache.allocate(self._blocks_due[due])
        return room

    def _preempt(self, job: Job) -> None:
        self._leave(job)
        self._waiting.appendleft(job)
        self._preempted.add(job)
        self.counts.preemptions += 1

    def _leave(self, job: Job) -> None:
        """Take a job's seat away, and set `generated` to the job's number of tokens so far."""
        seat = self._seats[job]
        if seat.since < 0:
            if self._partial is job:
                self._partial = None
            self._forget(job, seat, seat.computed)
            return
        cache = self.cache
        written = self._step - seat.since
        tokens = seat.target + written
        # The steps in which an answer needs a block, modulo block size.
        due = (seat.since - seat.target) % self._size
        self._blocks_due[due] -= 1
        self._any_due[due] = self._blocks_due[due] > 0
        last_step = seat.since + job.output_tokens - job.generated - 1
        last = self._last_steps.get(last_step)
        if last is not None:
            last.remove(job)
            if not last:
                del self._last_steps[last_step]
        job.generated += written
        self._writing -= 1
        self._context -= tokens
        seat.own = cache.blocks_for(tokens + self._has_grown) - seat.shared
        self._forget(job, seat, tokens)

    def _forget(self, job: Job, seat: Seat, tokens: int) -> None:
        """Free a job's blocks. Other prompts may reuse full blocks."""
        del self._seats[job]
        cache = self.cache
        if len(job.hashes) > (0 if seat.run is None else seat.run.end):
            cache.publish(seat, job.hashes, tokens // self._size)
        cache.release(seat)
