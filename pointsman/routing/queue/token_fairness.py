"""Fairness by tokens served: the virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024)."""

from pointsman.routing.queue.fairness import Turns
from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap

MAX_IDLE_FLOWS = 1_024
"""Maximum number of idle flows remembered per band. Beyond it, the flow with the lowest counter is dropped."""


class VirtualTokenCounterFairnessPolicy:
    """The flow that was served the fewest tokens is next, counted as input_weight * input + output_weight * output.

    A request is charged when it is taken, for its expected output: `default_output_tokens`, or `max_tokens` if that is
    less. When it ends, the charge is corrected to its actual output. The counter of a flow that starts to wait is
    raised to the lowest counter among the waiting flows, so that idle flows do not save up turns. If no flow waits, it
    is raised to the counter of the flow that waited last.

    The bound: let U be the largest charge for one request. The counters of two waiting flows differ by at most U,
    because only the lowest counter is charged, and no counter starts below it. So over any period in which two flows
    always had waiting requests, their charges differ by at most 2U, and by at most U if their counters began equal.
    Corrections only add what was in flight when the flow was last chosen. If n requests of a flow are in flight,
    and each uses at most E more or less than expected, U becomes U + n*E for the one flow + n*E for the other.
    """

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0, default_output_tokens: int = 256) -> None:
        for parameter, weight in (("inputWeight", input_weight), ("outputWeight", output_weight)):
            if not weight >= 0:
                raise ValueError(f"{parameter} is {weight:g}; it must be 0 or more")
        if default_output_tokens < 1:
            raise ValueError(f"defaultOutputTokens is {default_output_tokens}; it must be at least 1")
        self.input_weight = input_weight
        self.output_weight = output_weight
        self.default_output_tokens = default_output_tokens

    def for_band(self) -> Turns:
        return _ByTokens(self)

    def charge(self, item: Queued) -> float:
        """The charge for a request before its output is known."""
        return self.input_weight * item.request.input_tokens + self.output_weight * self._expected_output(item)

    def correction(self, item: Queued, output_tokens: int) -> float:
        """What to add to the charge once the output is known."""
        return self.output_weight * (output_tokens - self._expected_output(item))

    def _expected_output(self, item: Queued) -> int:
        limit = item.request.max_tokens
        return self.default_output_tokens if limit is None else min(limit, self.default_output_tokens)


class _Account:
    __slots__ = ("counter", "head_seq", "in_flight")

    def __init__(self) -> None:
        self.counter = 0.0
        self.head_seq = 0
        self.in_flight = 0
        """Requests charged and not yet corrected."""


class _ByTokens(Turns):
    """Counters of the flows that wait or have requests in flight, and of idle flows above the floor.

    Idle flows at the floor are forgotten: when they return, their counters are raised to the floor anyway.
    """

    def __init__(self, policy: VirtualTokenCounterFairnessPolicy) -> None:
        self._policy = policy
        self._accounts: dict[str, _Account] = {}
        self._waiting: LazyHeap[str] = LazyHeap()
        self._idle: LazyHeap[str] = LazyHeap()
        """Flows that neither wait nor have requests in flight, and are above the floor."""
        self._floor = 0.0
        """The lowest counter among the waiting flows when the last choice was made; never falls."""

    def waits(self, flow: str, head: Queued) -> None:
        account = self._accounts.get(flow)
        if account is None:
            account = self._accounts[flow] = _Account()
        if flow not in self._waiting:
            self._idle.discard(flow)
            lowest = self._waiting.first_key()
            account.counter = max(account.counter, self._floor, self._floor if lowest is None else lowest)
        account.head_seq = head.seq
        self._waiting.put(flow, account.counter, head.seq)

    def leaves(self, flow: str) -> None:
        self._waiting.discard(flow)
        account = self._accounts[flow]
        if not self._waiting:
            self._raise_floor(account.counter)
        self._moved(flow, account)

    def next(self) -> str | None:
        return self._waiting.first()

    def taken(self, item: Queued) -> None:
        account = self._accounts[item.flow]
        self._raise_floor(self._waiting.first_key())
        account.counter += self._policy.charge(item)
        account.in_flight += 1

    def returned(self, item: Queued) -> None:
        self._settle(item.flow, -self._policy.charge(item))

    def ended(self, item: Queued, output_tokens: int) -> None:
        self._settle(item.flow, self._policy.correction(item, output_tokens))

    def _settle(self, flow: str, difference: float) -> None:
        account = self._accounts[flow]
        account.counter += difference
        account.in_flight -= 1
        self._moved(flow, account)

    def _moved(self, flow: str, account: _Account) -> None:
        """Move a flow to where its counter belongs."""
        if flow in self._waiting:
            self._waiting.put(flow, account.counter, account.head_seq)
        elif account.in_flight == 0:
            if account.counter > self._floor:
                self._idle.put(flow, account.counter, flow)
                if len(self._idle) > MAX_IDLE_FLOWS:
                    del self._accounts[self._idle.pop()]
            else:
                del self._accounts[flow]

    def _raise_floor(self, counter: float) -> None:
        if counter <= self._floor:
            return
        self._floor = counter
        while self._idle and self._idle.first_key() <= counter:
            del self._accounts[self._idle.pop()]
