"""The requests that clients send, as bytes, in sessions whose prompts share a prefix.

There are twice as many sessions as endpoints, so that a router with session affinity can use all endpoints.
"""

import json
import random
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

MODEL = "bench"
SESSIONS, QUESTIONS = 16, 4
WORDS = """
signal track points train carriage harbour siding junction platform freight timetable driver lever lamp whistle
coupling tunnel bridge northbound express local shunt brake wagon station gate switch route arrival departure
"""


def chat(prefix: str, question: str, tokens: int, pace_ms: int, *, stream: bool) -> bytes:
    """A request as an OpenAI client would send it; `seed` sets the backend's pace (see native/backend.c)."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": prefix}, {"role": "user", "content": question}],
            "max_tokens": tokens,
            "seed": pace_ms,
            "stream": stream,
        },
        separators=(",", ":"),
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench/1\r\nAccept: application/json\r\n"
        f"Authorization: Bearer bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@cache
def text(size: int, seed: int) -> str:
    """About `size` bytes of words, in lines."""
    rng, words = random.Random(seed), WORDS.split()
    lines: list[str] = []
    length = 0
    while length < size:
        lines.append(" ".join(rng.choices(words, k=10)))
        length += len(lines[-1]) + 2  # JSON escapes a newline as two characters
    return "\n".join(lines)[: size - len(lines)]


def small(tokens: int = 16, pace_ms: int = 5, *, stream: bool = False) -> list[bytes]:
    """Bodies of about 500 bytes, mostly the session's prefix: long enough for one block of prefix hashing."""
    return [
        chat(text(310, session), f"Question {number}: {text(40, number)}", tokens, pace_ms, stream=stream)
        for number in range(QUESTIONS)
        for session in range(SESSIONS)
    ]


def big(size: int) -> list[bytes]:
    """Bodies of about `size` bytes: a long document per session, then a question."""
    return [
        chat(text(size - 200, session), f"Question {number}: {text(40, number)}", 16, 5, stream=False)
        for number in range(2)
        for session in range(SESSIONS // 2)
    ]


def body_bytes(requests: Sequence[bytes]) -> float:
    """Mean size of the bodies."""
    return sum(len(request.partition(b"\r\n\r\n")[2]) for request in requests) / len(requests)


def write(requests: Sequence[bytes], file: Path) -> Path:
    """Write requests in the load generator's format: each after its length."""
    file.write_bytes(b"".join(struct.pack("<I", len(request)) + request for request in requests))
    return file
