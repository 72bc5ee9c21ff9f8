"""Custom metrics, read from a real HTTP server that answers as a Prometheus does, or does not."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from pointsman.control.desired import Address
from pointsman.http.client import NoResponse
from pointsman.runtimes.autoscaling import CustomMetrics, answer_of
from pointsman.scaling.limits import MetricQuery
from tests.runtimes.local.planes import run


def vector(*values: str) -> dict[str, Any]:
    result = [{"metric": {"pod": str(place)}, "value": [1.5, value]} for place, value in enumerate(values)]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


ANSWERS: dict[str, Any] = {
    "up": vector("1", "2.5"),
    "none": vector(),
    "0/0": vector("NaN"),
    "scalar(3)": {"status": "success", "data": {"resultType": "scalar", "result": [1.5, "3"]}},
    "m[5m]": {"status": "success", "data": {"resultType": "matrix", "result": []}},
    "wrong(": {"status": "error", "errorType": "bad_data", "error": "unclosed left parenthesis"},
    "odd": {"status": "success", "data": {"resultType": "vector", "result": "x"}},
}
CUSTOM = b'pointsman_custom_metric{name="frames"} 12\npointsman_custom_metric{name="age"} 0.5\n'


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.path == "/metrics":
            body = CUSTOM
        elif asked.path == "/prefix/api/v1/query":
            query = parse_qs(asked.query)["query"][0]
            body = json.dumps(ANSWERS[query]).encode() if query in ANSWERS else b"<html>no"
        else:
            body = b"{}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", made.server_port
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.mark.parametrize(("query", "value"), [("up", 3.5), ("none", None), ("scalar(3)", 3.0)])
def test_the_series_of_a_query_are_summed(query: str, value: float | None) -> None:
    with server() as (url, _):
        assert asyncio.run(answer_of(MetricQuery("x", f"{url}/prefix/", query))) == value


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("m[5m]", "the query must give numbers of now, and gives a matrix"),
        ("wrong(", "unclosed left parenthesis"),
        ("odd", "not as a Prometheus does"),
        ("html", "not as a Prometheus does"),
    ],
)
def test_values_that_are_no_numbers_are_reported(query: str, why: str) -> None:
    with server() as (url, _), pytest.raises(NoResponse, match=why.replace("(", r"\(")):
        asyncio.run(answer_of(MetricQuery("x", f"{url}/prefix", query)))


def test_metrics_of_replicas_and_of_a_prometheus_are_read() -> None:
    told: list[tuple[str, float]] = []

    async def story() -> None:
        with server() as (url, port):
            gatherer = CustomMetrics(lambda: [Address("127.0.0.1", port, False)], lambda *one: told.append(one))
            gatherer.queries = (MetricQuery("load", f"{url}/prefix", "up"), MetricQuery("bad", url, "up"))
            await gatherer.once()
            [problem] = gatherer.problems("d")
            assert str(problem).startswith(f'"d": metric "bad" cannot be read from {url}: it answered with 200')
            gatherer.queries = gatherer.queries[:1]
            await gatherer.once()
            assert gatherer.problems("d") == []
        await gatherer.once()  # the server is gone: the replica's numbers are just not there
        assert [one.code for one in gatherer.problems("d")] == ["metric-not-read"]

    run(story())
    assert sorted(set(told)) == [("age", 0.5), ("frames", 12.0), ("load", 3.5)]


@pytest.mark.parametrize(("query", "why"), [("none", "finds nothing"), ("0/0", "gives nan")])
def test_a_query_that_gives_no_number_is_a_problem_until_it_does(query: str, why: str) -> None:
    told: list[tuple[str, float]] = []

    async def story() -> None:
        with server() as (url, _):
            gatherer = CustomMetrics(list, lambda *one: told.append(one))
            gatherer.queries = (MetricQuery("load", f"{url}/prefix", query),)
            await gatherer.once()
            [problem] = gatherer.problems("d")
            assert str(problem) == f'"d": metric "load": its query {why} at {url}/prefix'
            gatherer.queries = (MetricQuery("load", f"{url}/prefix", "up"),)
            await gatherer.once()
            assert gatherer.problems("d") == []

    run(story())
    assert told == [("load", 3.5)]


@pytest.mark.parametrize("url", ["http://host:abc", "http://host:99999", "http://[::1"])
def test_an_invalid_address_is_reported_and_others_are_read(url: str) -> None:
    told: list[tuple[str, float]] = []

    async def story() -> None:
        with server() as (good, _):
            gatherer = CustomMetrics(list, lambda *one: told.append(one))
            gatherer.queries = (MetricQuery("bad", url, "up"), MetricQuery("load", f"{good}/prefix", "up"))
            await gatherer.once()
            [problem] = gatherer.problems("d")
            assert str(problem).startswith(f'"d": metric "bad" cannot be read from {url}: this is not an address: ')

    run(story())
    assert told == [("load", 3.5)]
