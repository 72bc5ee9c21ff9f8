"""A client for single requests: whether a server answers correctly, and how long an array took to arrive."""

import http.client
import json
from typing import Any

DIAMOND, CHAIN = "diamond", "chain"
"""The applications, by the names of their files in apps/."""
COUNT = 10_000_000 // 8
"""Numbers in an array of 10 MB."""


class Asker:
    """A keep-alive connection."""

    def __init__(self, port: int, path: str, timeout_s: float = 10.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._path = path

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, given: list[float]) -> Any:
        """The body of the response; OSError unless its status is 200."""
        try:
            self._connection.request("POST", self._path, json.dumps(given), {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise OSError(f"status {response.status}: {body[:200].decode(errors='replace')}")
            return json.loads(body)
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"no answer: {error!r}") from error

    def hand_over(self, value: float) -> tuple[float, float]:
        """Seconds from the creation of an array until the next replica starts, and until it has read the array."""
        found = self.ask([COUNT, value])
        if found["sum"] != COUNT * value:
            raise RuntimeError(f"wrong: the array of {COUNT} times {value} has the sum {found['sum']}")
        return found["handed_s"], found["read_s"]


def check(app: str, port: int, path: str) -> None:
    """OSError if the application does not answer, RuntimeError if the response is wrong."""
    with Asker(port, path) as asker:
        if app == CHAIN:
            asker.hand_over(1.0)
        elif (answer := asker.ask([1, 2, 3])) != 8:
            raise RuntimeError(f"wrong: 1*1 + 2*2 + 3 is {answer!r}")
