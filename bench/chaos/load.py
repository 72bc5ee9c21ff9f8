"""Steady load on a gateway, in a thread of its own: so many clients, each asking as soon as it is answered."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from random import Random
from types import TracebackType
from urllib.parse import urlsplit

from bench.chaos.clients import Ask, Check, Client, Sample, Verdict, word_for_word

TOPICS = ("the signal box", "a train that is late", "points frozen in winter", "who oils the levers")
"""Beginnings that many prompts share, so that prefix caches have something to do."""
PAUSE_S = 0.02
"""After nobody could be reached."""


class Load:
    """A block of load: `with Load(...) as load`, and when it is left, every request has ended."""

    def __init__(
        self,
        url: str,
        models: Sequence[str],
        *,
        clients: int = 12,
        seed: int = 0,
        tokens: tuple[int, int] = (5, 40),
        check: Check = word_for_word,
        leavers: float = 0.0,
    ) -> None:
        """`leavers`: the share of streams whose client goes away."""
        self.models = list(models)
        """Whom clients ask for; may be changed at any time."""
        self.samples: list[Sample] = []
        """In the order in which they ended."""
        self._url = urlsplit(url)
        self._clients = clients
        self._seed = seed
        self._tokens = tokens
        self._check = check
        self._leavers = leavers
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
        """Nothing new is asked; what is under way is read to its end."""
        self._stopping = True
        self._thread.join()
        return self.samples

    def verdicts(self) -> Counter[str]:
        """How many ended how."""
        return Counter(sample.verdict.value for sample in self.samples)

    def bad(self, *fine: Verdict) -> list[str]:
        """What ended otherwise than served, or as these."""
        return [
            f"{sample.ask.request_id} ({sample.ask.model}, {'stream' if sample.ask.stream else 'plain'})"
            f" {sample.verdict}: {sample.why}"
            for sample in self.samples
            if sample.verdict not in (Verdict.SERVED, *fine)
        ]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        random = Random(f"{self._seed}/{number}")
        client = Client(self._url.hostname or "", self._url.port or 80, self._check)
        count = 0
        while not self._stopping:
            count += 1
            model = self.models[count % len(self.models)]
            ask = Ask(
                request_id=f"load-{self._seed}-{number}-{count}",
                model=model,
                text=f"{random.choice(TOPICS)}, client {number}, question {count} for {model}",
                tokens=random.randint(*self._tokens),
                chat=random.random() < 0.5,
                stream=random.random() < 0.6,
                leaves=random.random() < self._leavers,
            )
            sample = await client.ask(ask)
            self.samples.append(sample)
            if sample.verdict in (Verdict.UNREACHABLE, Verdict.LOST):
                await asyncio.sleep(PAUSE_S)
        client.close()
