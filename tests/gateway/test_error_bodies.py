"""What clients are told about wrong requests: the path, the method, the field, and the nearest right one."""

import pytest

from tests.gateway.bed import Bed
from tests.gateway.wire import post

COMPLETIONS = b"/v1/completions"
WRONG_BODY = "the body does not match the API: "


@pytest.mark.parametrize(
    ("request_", "status", "told"),
    [
        (
            post({}, b"/v1/completion"),
            404,
            "there is nothing at /v1/completion; did you mean /v1/completions?",
        ),
        (b"GET /v1/completions HTTP/1.1\r\nhost: gateway\r\n\r\n", 405, "/v1/completions takes POST"),
        (b"GET /v1/models/chut HTTP/1.1\r\nhost: gateway\r\n\r\n", 404, 'there is no model "chut"; there are: '),
        (post(b"", COMPLETIONS), 400, "the body is empty; send JSON"),
        (post(b"{", COMPLETIONS), 400, "the body is not JSON: "),
        (post([1], COMPLETIONS), 400, f"{WRONG_BODY}expected an object, found a list"),
        (
            post({"model": "m", "max_tokens": "many"}, COMPLETIONS),
            400,
            f"{WRONG_BODY}max_tokens: expected a whole number or null, found text",
        ),
        (
            post({"model": "m", "pointsman": {"prioritty": 1}}, COMPLETIONS),
            400,
            f'{WRONG_BODY}pointsman: unknown field "prioritty"',
        ),
        (post({"model": 7}, COMPLETIONS), 400, f"{WRONG_BODY}model: expected text, found a whole number"),
        (
            post({"model": "m"}, COMPLETIONS, ["x-pointsman-deadline-ms: soon"]),
            400,
            'x-pointsman-deadline-ms: expected a number, found "soon"',
        ),
    ],
)
def test_problems_of_a_request(bed: Bed, request_: bytes, status: int, told: str) -> None:
    got = bed.fetch(request_)
    assert got.status == status
    assert got.error["message"].startswith(told), got.error["message"]
