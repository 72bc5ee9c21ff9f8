"""The ingress: user code that creates the input of a request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pointsman.wire import decode_plain, decode_value
from tests.replica.replicas import Replica, Response, replica

CODE = """
from pydantic import BaseModel, Field

class Asked(BaseModel):
    text: str
    count: int = Field(default=1, ge=1)

class HttpError(Exception):
    def __init__(self, status_code, detail): self.status_code, self.detail = status_code, detail

async def to_int(request): return int(await request.body())
async def to_list(request): return [int(word) for word in (await request.text()).split()]
def plain(request): return {"path": request.url.path, "method": request.method, "token": request.headers["X-Token"],
                            "absent": request.headers.get("nothing"), "q": request.query_params["q"],
                            "all": request.query_params.getlist("q"), "none": request.query_params.get("z")}
async def to_asked(request): return {"text": (await request.json())["t"], "count": 2}
async def refuses(request): raise HttpError(401, "who are you?")
async def breaks(request): raise RuntimeError("oh no")
"""
WHOLE: list[Any] = [[]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(CODE)
    return tmp_path


def parts(answer: Response) -> list[Any]:
    assert answer.status == 200, answer.body
    return [decode_value(part) for part in decode_plain(answer.body)]


@pytest.fixture
def validating(folder: Path) -> Iterator[Replica]:
    with replica(folder, kind="ingress", schema="app.py:Asked") as running:
        yield running


def test_a_preprocessor_creates_the_input(folder: Path) -> None:
    with replica(folder, kind="ingress", preprocessor="app.py:to_list") as running:
        paths = [[[2, False]], [[0, False]], []]
        assert parts(running.input(b"1 2 3", paths)) == [3, 1, [1, 2, 3]]
        answer = running.input(b"1 2", paths)
        assert answer.status == 422
        assert answer.json()["detail"][0]["msg"] == "input[2]: the input has 2 items"
        answer = running.input(b"1 x", paths)
        assert answer.status == 422
        assert "invalid literal for int()" in answer.json()["detail"][0]["msg"]
    with replica(folder, kind="ingress", preprocessor="app.py:to_int") as running:
        assert parts(running.input(b"7", [[[0, False]]])) == [7]


def test_a_plain_preprocessor_gets_the_whole_request(folder: Path) -> None:
    with replica(folder, kind="ingress", preprocessor="app.py:plain") as running:
        for _ in range(12):  # in a thread, then on the loop
            answer = running.input(b"", WHOLE, method="PUT", query="q=1&q=2", headers={"x-token": "abc"})
            (made,) = parts(answer)
            assert made == {
                "path": "/app", "method": "PUT", "token": "abc", "absent": None, "q": "2", "all": ["1", "2"],
                "none": None,
            }  # fmt: skip
        answer = running.input(b"", WHOLE)
        assert (answer.status, answer.json()["type"]) == (500, "KeyError")


@pytest.mark.parametrize(
    ("preprocessor", "status", "expected"),
    [("refuses", 401, {"detail": "who are you?"}), ("breaks", 500, {"type": "RuntimeError", "message": "oh no"})],
)
def test_a_preprocessor_that_refuses(folder: Path, preprocessor: str, status: int, expected: dict[str, str]) -> None:
    with replica(folder, kind="ingress", preprocessor=f"app.py:{preprocessor}") as running:
        answer = running.input(b"", WHOLE)
        assert answer.status == status
        assert expected.items() <= answer.json().items()


def test_a_schema_creates_the_input(validating: Replica) -> None:
    answer = validating.input(b'{"text": "x", "count": 3}', [[["text", False]], [["count", True]]])
    assert parts(answer) == ["x", 3]
    assert parts(validating.input(b'{"text": "x"}', [[["count", True]]])) == [1]


@pytest.mark.parametrize(
    ("body", "places"),
    [
        (b'{"count": 0}', [["text"], ["count"]]),
        (b'{"text": 1, "count": "many"}', [["text"], ["count"]]),
        (b"not json", [["body"]]),
        (b"", [["body"]]),
        (b"[1]", [[]]),
    ],
)
def test_invalid_input_is_reported_by_field(validating: Replica, body: bytes, places: list[Any]) -> None:
    answer = validating.input(body, WHOLE)
    assert answer.status == 422
    detail = answer.json()["detail"]
    assert [one["loc"] for one in detail] == places
    assert all(one.keys() == {"loc", "msg", "type"} for one in detail)


def test_a_preprocessor_and_a_schema(folder: Path) -> None:
    with replica(folder, kind="ingress", preprocessor="app.py:to_asked", schema="app.py:Asked") as running:
        assert parts(running.input(b'{"t": "y"}', [[["text", True]], [["count", True]]])) == ["y", 2]
        assert running.input(b'{"t": 5}', WHOLE).json()["detail"][0]["loc"] == ["text"]


def test_the_schema_is_reported(validating: Replica, folder: Path) -> None:
    schema = validating.value("openapi")
    assert schema["properties"]["count"]["minimum"] == 1
    assert schema["required"] == ["text"]
    with replica(folder, kind="ingress", preprocessor="app.py:to_int") as running:
        assert running.value("openapi") is None
