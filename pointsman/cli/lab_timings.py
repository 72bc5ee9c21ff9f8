"""The times of an engine's steps, measured through its API: with single prompts, and with concurrent answers."""

import asyncio
import json
import sys
import time
from itertools import count

from pointsman.control.desired import Address
from pointsman.errors import PointsmanError
from pointsman.http.client import HttpClient
from pointsman.lab.calibrate import BATCHES, CONTEXTS, PROMPTS, StepTiming

ANSWER = 24
"""Number of tokens of an answer whose time is measured."""
TIMEOUT_S = 300.0


async def timings_of(address: Address, model: str, repeat: int, max_prompt: int, max_batch: int) -> list[StepTiming]:
    """The measured times. `model`: if empty, the first model that the engine lists. `repeat`: tries per measurement."""
    client = HttpClient(address)
    try:
        return await EngineTimings(client, model or await _model_of(client), repeat).all(max_prompt, max_batch)
    finally:
        client.close()


async def _model_of(client: HttpClient) -> str:
    answer = await client.fetch("GET", "/v1/models", timeout_s=TIMEOUT_S)
    listed = json.loads(answer.body).get("data") if answer.status == 200 else None
    if not listed:
        raise PointsmanError("the engine lists no model; name one with --model")
    return str(listed[0]["id"])


class EngineTimings:
    """Measures the times of an engine's steps through its API.

    The shortest of several tries counts, because other load only makes steps longer.
    """

    def __init__(self, client: HttpClient, model: str, repeat: int) -> None:
        self._client = client
        self._model = model
        self._repeat = repeat
        self._numbers = count(time.monotonic_ns() % 1_000_000)
        self._characters = 4.0
        """Mean number of characters per token, as the engine counts tokens."""

    async def all(self, max_prompt: int, max_batch: int) -> list[StepTiming]:
        tokens, _ = await self._answer(256, 2)
        self._characters *= 256 / tokens
        found: list[StepTiming] = []
        for length in (one for one in PROMPTS if one <= max_prompt):
            tries = [await self._answer(length, 1) for _ in range(self._repeat)]
            found.append(StepTiming.of_prompt(tries[0][0], min(times[0] for _, times in tries)))
            self._progress(f"prompt of {length} tokens")
        contexts = [one for one in CONTEXTS if one <= max_prompt]
        for batch, length in [(1, one) for one in contexts] + [(one, contexts[0]) for one in BATCHES[1:]]:
            if batch <= max_batch:
                steps = [await self._together(length, batch) for _ in range(max(self._repeat // 2, 1))]
                found.append(StepTiming.of_answers(batch, steps[0][0], min(ms for _, ms in steps)))
                self._progress(f"{batch} answers after {length} tokens")
        return found

    async def _together(self, length: int, batch: int) -> tuple[float, float]:
        """The mean context of concurrent answers, and the time of a step while all of them are being written."""
        began = time.perf_counter()

        async def one() -> tuple[int, list[float]]:
            offset = (time.perf_counter() - began) * 1000.0
            tokens, times = await self._answer(length, ANSWER + batch)
            return tokens, [offset + each for each in times]

        answers = await asyncio.gather(*(one() for _ in range(batch)))
        start, end = max(times[0] for _, times in answers), min(times[-1] for _, times in answers)
        inside = [[at for at in times if start <= at <= end] for _, times in answers]
        longest = max(inside, key=len)
        if len(longest) < 3:
            raise PointsmanError(f"{batch} answers were not written together; lower --max-batch")
        before = len(answers[inside.index(longest)][1]) - len(longest)
        step_ms = (longest[-1] - longest[0]) / (len(longest) - 1)
        return answers[0][0] + before + len(longest) / 2, step_ms

    async def _answer(self, length: int, tokens: int) -> tuple[int, list[float]]:
        """Send a prompt that is new to the engine. Returns its number of tokens, and the arrival of each token of the
        answer, in ms."""
        number = next(self._numbers)
        prompt = f"{number} " + "the quick fox " * int(length * self._characters / 14 + 1)
        body = {
            "model": self._model,
            "prompt": prompt[: max(int(length * self._characters), 8)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data, times, prompt_tokens = bytearray(), list[float](), 0
        began = time.perf_counter()
        async with (
            asyncio.timeout(TIMEOUT_S),
            self._client.stream(
                "POST", "/v1/completions", json.dumps(body).encode(), "content-type: application/json\r\n"
            ) as response,
        ):
            async for piece in response.pieces():
                at = (time.perf_counter() - began) * 1000.0
                data += piece
                while (end := data.find(b"\n\n")) >= 0:
                    event, data = bytes(data[:end]), data[end + 2 :]
                    if not event.startswith(b"data: {"):
                        continue
                    chunk = json.loads(event[6:])
                    if "error" in chunk:
                        raise PointsmanError(f"the engine answered with an error: {chunk['error']}")
                    prompt_tokens = (chunk.get("usage") or {}).get("prompt_tokens", prompt_tokens)
                    if any(choice.get("text") for choice in chunk.get("choices", ())):
                        times.append(at)
        if response.status != 200:
            raise PointsmanError(
                f"the engine answered with {response.status}: {bytes(data[:200]).decode(errors='replace')}"
            )
        if not times or not prompt_tokens:
            raise PointsmanError("the engine streamed no tokens, or did not report its usage")
        return prompt_tokens, times

    def _progress(self, what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{what:<60}", end="", file=sys.stderr, flush=True)
