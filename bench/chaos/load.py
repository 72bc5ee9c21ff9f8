"""Steady load on a gateway from its own thread: each client sends its next request when the last one ends."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from random import Random
from types import TracebackType
from urllib.parse import urlsplit

from bench.chaos.clients import Check, Client, LoadRequest, Sample, Verdict, check_text

TOPICS = ("the signal box", "a train that is late", "points frozen in winter", "who oils the levers")
"""Prefixes that many prompts share, to exercise prefix caches."""
PAUSE_S = 0.1
"""Pause after a failed connection."""


class Load:
    """Load for the duration of a `with` block. Every request has ended when the block exits."""

    def __init__(
        self,
        url: str,
        models: Sequence[str],
        *,
        clients: int = 12,
        seed: int = 0,
        tokens: tuple[int, int] = (5, 40),
        check: Check = check_text,
        disconnect_share: float = 0.0,
        key: str = "",
    ) -> None:
        """`disconnect_share`: share of streams whose client disconnects. `key`: API key of all clients."""
        self.models = list(models)
        """May be changed at any time."""
        self.samples: list[Sample] = []
        """In the order in which requests ended."""
        self._url = urlsplit(url)
        self._clients = clients
        self._seed = seed
        self._tokens = tokens
        self._check = check
        self._disconnect_share = disconnect_share
        self._key = key
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> list[Sample]:
        """Send no more requests and wait for those in flight."""
        self._stopping = True
        self._thread.join()
        return self.samples

    def verdicts(self) -> Counter[str]:
        return Counter(sample.verdict.value for sample in self.samples)

    def unexpected(self, *allowed: Verdict) -> list[str]:
        """Requests that were neither served nor ended with one of these verdicts."""
        return [
            f"{sample.request.request_id} ({sample.request.model}, {'stream' if sample.request.stream else 'plain'})"
            f" {sample.verdict}: {sample.why}"
            for sample in self.samples
            if sample.verdict not in (Verdict.SERVED, *allowed)
        ]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        random = Random(f"{self._seed}/{number}")
        client = Client(self._url.hostname or "", self._url.port or 80, self._check, key=self._key)
        count = 0
        while not self._stopping:
            count += 1
            model = self.models[count % len(self.models)]
            request = LoadRequest(
                request_id=f"load-{self._seed}-{number}-{count}",
                model=model,
                text=f"{random.choice(TOPICS)}, client {number}, question {count} for {model}",
                tokens=random.randint(*self._tokens),
                chat=random.random() < 0.5,
                stream=random.random() < 0.6,
                disconnects=random.random() < self._disconnect_share,
            )
            sample = await client.send(request)
            self.samples.append(sample)
            if sample.verdict in (Verdict.UNREACHABLE, Verdict.LOST):
                await asyncio.sleep(PAUSE_S)
        client.close()
