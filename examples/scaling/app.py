"""A scaling policy, rehearsed on two weeks of synthetic load, then run live: from zero, under a burst of chats.

python examples/scaling/app.py [FOLDER]

FOLDER (else the current one) gets fortnight.csv and fortnight.svg.
"""

import csv
import json
import math
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import Request, urlopen

HERE = Path(__file__).parent
MONDAY = datetime(2026, 11, 2, tzinfo=UTC)
BIN = timedelta(minutes=10)
DAY = 144
"""Bins of a day."""
BURSTS = {3 * DAY + 66: 2.5, 6 * DAY + 80: 2.0, 8 * DAY + 20: 3.0, 11 * DAY + 100: 1.8}
"""Unpredictable bursts: first bin, and factor for half an hour."""
QUESTIONS = ["Say hello.", "Name a colour.", "Name an animal.", "Count to three.", "What is a train?", "Say goodbye."]
TIMEOUT_S = 60.0


def fortnight() -> Iterator[tuple[str, float]]:
    """(time, requests per second) every ten minutes: quiet nights, office hours from nine, calm weekends."""
    rng = random.Random(7)
    for index in range(14 * DAY):
        at = MONDAY + index * BIN
        hour, weekend = at.hour + at.minute / 60, at.weekday() >= 5
        waking = max(math.sin(math.pi * (hour - 6) / 17), 0.0) if 6 <= hour < 23 else 0.0
        office = 0.0 if weekend or not 9 <= hour < 17.5 else 1.0
        rate = 8 + (25 if weekend else 40) * waking + 60 * office
        burst = max((size for start, size in BURSTS.items() if start <= index < start + 3), default=1.0)
        yield at.isoformat(), round(rate * burst * math.exp(rng.gauss(0, 0.05)), 2)


def rehearse(folder: Path) -> None:
    """The cost of the policy, compared with two built-in ones."""
    with (folder / "fortnight.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("time", "rps"), *fortnight()])
    pointsman(
        "rehearse",
        "scaling",
        'policy.py:as_before={"replica_per_s": 5}',
        'target-ongoing={"target": 4}',
        'predictive={"replicaPerSecond": 5}',
        *("--load", folder / "fortnight.csv", "--capacity", "5", "--start-up", "5m", "--interval", "2m"),
        *("--cost", "2.5", "--svg", folder / "fortnight.svg"),
    )


def live() -> None:
    """The same policy on a plane: no instance, then a burst, then the decisions and their reasons."""
    with plane() as (url, state), ThreadPoolExecutor(len(QUESTIONS)) as clients:
        began = time.monotonic()
        for question, answer in zip(QUESTIONS, clients.map(lambda words: chat(url, words), QUESTIONS), strict=True):
            print(f"{question} -> {answer}")
        print(f"{len(QUESTIONS)} requests answered after {time.monotonic() - began:.1f} s, from zero\n")
        pointsman("explain", "deployment", "chat", "--state", state)


@contextmanager
def plane() -> Iterator[tuple[str, Path]]:
    """`pointsman up` in its own process and state directory, for a while: where it listens, and its state."""
    with tempfile.TemporaryDirectory(prefix="pointsman-") as folder:
        state, log = Path(folder, "state"), Path(folder, "up.log")
        with log.open("w", encoding="utf-8") as out:
            up = subprocess.Popen(command("up", HERE / "models.yaml", "--state", state), stdout=out, stderr=out)
        try:
            yield url_of(state, up, log), state
        finally:
            up.terminate()
            try:
                up.wait(TIMEOUT_S)
            finally:
                up.kill()


def url_of(state: Path, up: "subprocess.Popen[bytes]", log: Path) -> str:
    """The address of a plane, once it listens."""
    until = time.monotonic() + TIMEOUT_S
    while up.poll() is None and time.monotonic() < until:
        told = subprocess.run(
            command("status", "--json", "--state", state), capture_output=True, text=True, check=False
        )
        if told.returncode == 0:
            return str(json.loads(told.stdout)["url"])
        time.sleep(0.1)
    raise RuntimeError(f"the plane has not started:\n{log.read_text(encoding='utf-8')}")


def chat(url: str, words: str) -> str:
    """Ask one question; the first line of the answer."""
    asked = {"model": "smollm2", "max_tokens": 24, "temperature": 0, "messages": [{"role": "user", "content": words}]}
    request = Request(f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    return text.strip().partition("\n")[0]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "pointsman.cli.main", *map(str, words)]


def pointsman(*words: str | Path) -> None:
    """Run a command, and print it with its output."""
    print(f"$ pointsman {shlex.join(map(str, words))}", flush=True)
    subprocess.run(command(*words), cwd=HERE, check=True)
    print(flush=True)


if __name__ == "__main__":
    rehearse(Path(*sys.argv[1:2]).absolute())
    live()
