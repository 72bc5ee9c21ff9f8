"""Applications on a real plane: every kind of graph, called over HTTP, on real replicas."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import llama, manifest

Deploy = Callable[[str, Any], str]


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> LivePlane:
    module_plane.up(manifest(llama("tiny", 1)))
    return module_plane


@pytest.fixture(scope="module")
def client(plane: LivePlane) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plane.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def deploy(plane: LivePlane) -> Deploy:
    def deploy(name: str, root: Any) -> str:
        """Deploy an application, wait until it is ready, and return its path."""
        text = pm.build(root, name=name, folder=plane.folder).to_yaml()
        plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
        plane.until(plane.is_settled, f"{name} ready")
        return f"/{name}"

    return deploy


def test_the_diamond_accepts_valid_input_only(deploy: Deploy, client: httpx.Client) -> None:
    path = deploy("diamond", nodes.diamond())
    assert client.post(path, json=[1, 2, 3]).json() == 8
    answer = client.post(path, json=[1, 2])
    assert answer.status_code == 422
    assert answer.json() == {
        "detail": [{"loc": ["body"], "msg": "input[2]: the input has 2 items", "type": "bad_input"}]
    }
    assert client.post(path, content=b"{").status_code == 400
    assert client.get(path).status_code == 405
    assert client.post(f"{path}/", json=[1, 2, 3]).json() == 8


def test_a_chain_with_a_fan_out(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as value:
        ten = nodes.Model.bind(10)
        three = nodes.Model.bind(3)
        chained = three.forward_async.bind(ten.forward.bind(value))
        fan = [ten.forward.bind(chained), three.forward.bind(chained)]
        dag = nodes.total.bind({"fan": nodes.total.bind(fan), "chained": chained, "one": 1})
    assert client.post(deploy("chain", dag), json=2).json() == 60 * 13 + 60 + 1


def test_a_shared_call_runs_once_per_request(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as value:
        counter = nodes.Counter.bind()
        once = counter.count.bind(value)
        dag = nodes.total.bind([once, once])
    path = deploy("shared", dag)
    assert [client.post(path, json=0).json() for _ in range(3)] == [2, 4, 6]


def test_an_application_returns_nested_outputs(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as value:
        ten = nodes.Model.bind(10)
        one = ten.forward.bind(value["x"])
        two = nodes.total.bind([one, value["x"]])
    path = deploy("outputs", {"one": one, "both": [two, one], "input": value["x"], "constant": "text"})
    assert client.post(path, json={"x": 4}).json() == {"one": 40, "both": [44, 40], "input": 4, "constant": "text"}


@pytest.mark.parametrize(
    ("method", "value", "accept", "kind", "text"),
    [
        ("words", "a b c", "*/*", "text/plain; charset=utf-8", "a b c "),
        (
            "words",
            "a b",
            "text/event-stream",
            "text/event-stream; charset=utf-8",
            "data: a \n\ndata: b \n\ndata: [DONE]\n\n",
        ),
        ("numbers", 2, "*/*", "application/x-ndjson", '{"number":0}\n{"number":1}\n'),
    ],
    ids=["text", "server-sent events", "JSON lines"],
)
def test_the_format_of_a_stream(
    deploy: Deploy, client: httpx.Client, method: str, value: Any, accept: str, kind: str, text: str
) -> None:
    with pm.InputNode() as given:
        streamer = nodes.Streamer.bind()
        dag = getattr(streamer, method).bind(given)
    path = deploy(f"stream-{method}", dag)
    with client.stream("POST", path, json=value, headers={"accept": accept}) as answer:
        assert answer.headers["content-type"] == kind
        assert answer.headers["transfer-encoding"] == "chunked"
        assert "".join(answer.iter_text()) == text


def test_a_failing_stream_reports_the_error(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        dag = nodes.Streamer.bind().fails.bind(given)
    path = deploy("fails", dag)
    with client.stream("POST", path, json=2, headers={"accept": "text/event-stream"}) as answer:
        text = "".join(answer.iter_text())
    assert text.startswith("data: 0 \n\ndata: 1 \n\ndata: ")
    [told] = [json.loads(line.removeprefix("data: "))["error"] for line in text.splitlines() if '"error"' in line]
    assert told["message"].endswith("ValueError: no more")
    assert told["code"] == "node_failed"
    with pytest.raises(httpx.RemoteProtocolError), client.stream("POST", path, json=2) as answer:
        answer.read()


def test_a_failing_stream_leaves_its_replica_alone(deploy: Deploy, client: httpx.Client, plane: LivePlane) -> None:
    """Six such calls once restarted it."""
    with pm.InputNode() as given:
        path = deploy("often", nodes.Streamer.bind().fails.bind(given))
    before = plane.pids("often.streamer")
    for number in range(12):
        accepted = {"accept": "text/event-stream"} if number % 2 else {}
        with suppress(httpx.RemoteProtocolError), client.stream("POST", path, json=1, headers=accepted) as answer:
            answer.read()
    assert plane.pids("often.streamer") == before
    assert [one["restarts"] for one in plane.instances("often.streamer").values()] == [0]


def test_calls_are_batched(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        dag = nodes.Batched.bind().double.bind(given)
    path = deploy("batched", dag)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: client.post(path, json=number).json(), range(8)))
    assert [answer[0] for answer in answers] == [2 * number for number in range(8)]
    assert max(answer[1] for answer in answers) > 1


def test_a_node_chooses_which_node_to_call(deploy: Deploy, client: httpx.Client, plane: LivePlane) -> None:
    cheap = nodes.Model.bind(1)
    expensive = nodes.Model.bind(100)
    path = deploy("routed", nodes.Router.bind(cheap, expensive))
    answer = client.post(path, json=5)
    assert answer.json() == [5, 0, 1, 2], answer.text
    answer = client.post(path, json=50, headers={"x-request-id": "routed-1"})
    assert answer.json() == [5000, 0, 1, 2]
    text = plane.pointsman("explain", "routed-1").stdout
    assert "routed.expensive-1" in text
    assert text.count("forward") == 4
    failed = client.post(path, json=-1)
    assert failed.status_code == 500
    assert "nothing" in failed.json()["error"]["message"]


def test_each_shard_computes_a_part(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        sharded = nodes.Sharded.bind()
        dag = sharded.part.bind(given)
    assert client.post(deploy("sharded", dag), json=[1, 2, 3, 4]).json() == {"parts": [4, 6], "by": 0}


def test_a_missed_deadline_cancels_the_call(deploy: Deploy, client: httpx.Client, plane: LivePlane) -> None:
    with pm.InputNode() as given:
        slow = nodes.Slow.bind()
        first = slow.sleep.bind(given)
        dag = nodes.total.bind([first])
    path = deploy("late", dag)
    headers = {"x-pointsman-deadline-ms": "150", "x-request-id": "late-1"}
    answer = client.post(path, json=30, headers=headers)
    assert answer.status_code == 504
    assert answer.json()["error"]["node"] == "slow"
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    plane.until(lambda: plane.instances("late.slow")["late.slow-1"]["in_flight"] == 0, "the slow call stopped")
    text = plane.pointsman("explain", "late-1").stdout
    assert "its deadline of 150 ms was missed" in text


def test_a_step_knows_its_remaining_time(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        dag = nodes.Slow.options(deadline_share=0.5).bind().time_left.bind(given)
    path = deploy("left", dag)
    assert client.post(path, json=1).json() is None
    left = client.post(path, json=1, headers={"x-pointsman-deadline-ms": "4000"}).json()
    assert 1.0 < left <= 2.0


def test_an_error_names_its_node_and_has_a_traceback_on_request(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        m1 = nodes.Model.bind(1)
        dag = nodes.ensemble.bind(m1.forward.bind(given), nodes.broken.bind(given))
    path = deploy("broken", dag)
    answer = client.post(path, json=7)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["message"] == 'node "broken": ValueError: cannot take 7'
    assert (error["node"], error["step"], error["code"]) == ("broken", "broken", "node_failed")
    assert "traceback" not in error
    traced = client.post(path, json=7, headers={"x-pointsman-traceback": "1"}).json()["error"]
    assert 'raise ValueError(f"cannot take {value!r}")' in traced["traceback"]


def test_a_preprocessor_parses_the_request(deploy: Deploy, client: httpx.Client) -> None:
    path = deploy("pre", nodes.diamond(preprocessor=nodes.three_numbers))
    assert client.post(path, content="1,2,3").json() == 8
    assert client.post(f"{path}?by=;", content="1;2;3").json() == 8
    wrong = client.post(path, content="one,2,3")
    assert wrong.status_code == 422
    assert "invalid literal" in wrong.json()["detail"][0]["msg"]


def test_a_schema_error_names_the_field(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode(schema=nodes.Order) as order:
        dag = nodes.price.bind(order.item, count=order.count)
    path = deploy("orders", dag)
    assert client.post(path, json={"item": "tea", "count": 4}).json() == {"item": "tea", "price": 12}
    wrong = client.post(path, json={"item": "tea", "count": "many"})
    assert wrong.status_code == 422
    assert wrong.json()["detail"][0]["loc"][-1] == "count"
    described = client.get(f"{path}/openapi.json").json()
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {"item", "count"}


def test_one_request_to_a_replica_serves_all_clients_that_ask_for_the_schema(
    deploy: Deploy, client: httpx.Client, plane: LivePlane
) -> None:
    with pm.InputNode(schema=nodes.Order) as order:
        dag = nodes.price.bind(order.item, count=order.count)
    path = deploy("described", dag)

    def asked() -> int:
        [ingress] = [one for one in plane.status()["deployments"] if one["name"] == "described.ingress"]
        return int(ingress["answered"])

    before, began = asked(), time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: client.get(f"{path}/openapi.json").text, range(200)))
    assert len(set(answers)) == 1
    assert '"count"' in answers[0]
    assert 1 <= asked() - before <= 2 + (time.monotonic() - began), "at most one a second"


def test_arrays_go_through_shared_memory(deploy: Deploy, client: httpx.Client, plane: LivePlane) -> None:
    with pm.InputNode() as size:
        producer = nodes.Arrays.bind()
        consumer = nodes.Arrays.bind()
        dag = consumer.sum.bind(producer.make.bind(size))
    path = deploy("arrays", dag)
    for _ in range(3):
        assert client.post(path, json=1_000_000).json() == 499999500000.0
    through_handles = deploy("delegates", nodes.Delegates.bind(nodes.Arrays.bind()))
    for _ in range(3):
        assert client.post(through_handles, json=100_000).json() == 4999950000.0 + 1.0
    with pm.InputNode(preprocessor=nodes.image_of) as image:
        dag = nodes.shape.bind(image)
    images = deploy("images", dag)
    for _ in range(3):
        assert client.post(images, content=b"x" * 500_000).json() == [500, 1000]
    plane.until(lambda: not shared_files(plane), "files of finished requests removed")


def shared_files(plane: LivePlane) -> list[str]:
    """Files that requests refer to; names of files that senders keep for reuse begin with a dot."""
    [folder] = {
        line.partition("=")[2]
        for pid in plane.pids().values()
        for line in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if line.startswith("POINTSMAN_SHM=")
    }
    return [file.name for file in Path(folder).iterdir() if not file.name.startswith(".")]


def test_a_model_is_a_node(deploy: Deploy, client: httpx.Client) -> None:
    tiny = pm.model("tiny")
    with pm.InputNode() as given:
        text = tiny.complete.bind(given, max_tokens=3, temperature=0)
        dag = {"text": text, "again": tiny.complete.bind(prompt=text, max_tokens=2)}
    answer = client.post(deploy("completions", dag), json="def ").json()
    assert answer["text"]
    assert isinstance(answer["again"], str)
    with pm.InputNode() as given:
        streamed = tiny.chat.bind([{"role": "user", "content": given["question"]}], max_tokens=3, stream=True)
    with client.stream("POST", deploy("chat", streamed), json={"question": "Hello"}) as events:
        stream = "".join(events.iter_text())
    assert stream.rstrip().endswith("data: [DONE]")
    assert json.loads(stream.split("\n\n")[0].removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_tokens_of_models_in_a_pipeline_are_counted(plane: LivePlane, deploy: Deploy, client: httpx.Client) -> None:
    tiny = pm.model("tiny")
    with pm.InputNode() as given:
        dag = tiny.complete.bind(given, max_tokens=4, temperature=0)
    path = deploy("charged", dag)
    before = metric(client, 'pointsman_tokens_total{deployment="tiny",kind="output"}')
    assert client.post(path, json="def ").status_code == 200
    name = 'pointsman_tokens_total{deployment="tiny",kind="output"}'
    plane.until(lambda: metric(client, name) == before + 4, "a new page of metrics")
    assert metric(client, 'pointsman_requests_total{deployment="charged",status="200"}') == 1


def test_nodes_call_models_through_handles(plane: LivePlane, deploy: Deploy, client: httpx.Client) -> None:
    path = deploy("calls", nodes.Caller.bind(pm.model("tiny")))
    answer = client.post(path, json="def ", headers={"x-request-id": "calls-1"})
    assert answer.status_code == 200, answer.text
    plain, streamed = answer.json()
    assert plain == streamed != ""
    text = plane.pointsman("explain", "calls-1").stdout
    assert text.count("completions") == 2
    assert text.count("tiny-1") == 2
    assert plane.pointsman("explain", "calls-1.caller.1").stdout.startswith('request "calls-1.caller.1" is served')


def metric(client: httpx.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


@pytest.mark.parametrize(("idempotent", "status"), [(True, 200), (False, 502)], ids=["idempotent", "not idempotent"])
def test_only_idempotent_calls_are_retried_after_a_replica_dies(
    plane: LivePlane, deploy: Deploy, client: httpx.Client, idempotent: bool, status: int
) -> None:
    with pm.InputNode() as given:
        slow = nodes.Slow.options(idempotent=idempotent, num_replicas=2).bind()
        dag = slow.sleep.bind(given)
    name = f"dies-{'retried' if idempotent else 'failed'}"
    path = deploy(name, dag)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(client.post, path, json=1.0, headers={"x-request-id": name})
        plane.until(lambda: busy(plane, f"{name}.slow"), "the call in flight")
        [replica] = busy(plane, f"{name}.slow")
        os.kill(plane.pids(f"{name}.slow")[replica], signal.SIGKILL)
        answer = response.result()
    assert answer.status_code == status, answer.text
    if not idempotent:
        assert answer.json()["error"]["node"] == "slow"
    steps = plane.admin.get("requests", name)["steps"]
    assert [step["tries"] for step in steps] == [2 if idempotent else 1]
    plane.until(plane.is_settled, "the replica replaced")


def busy(plane: LivePlane, deployment: str) -> list[str]:
    return [name for name, one in plane.instances(deployment).items() if one["in_flight"]]


QUEUE_OF_ONE = {
    "config": {
        "featureGates": ["flowControl"],
        "plugins": [{"type": "concurrency-detector", "parameters": {"maxConcurrency": 1}}],
        "schedulingProfiles": [{"name": "default"}],
        "flowControl": {"maxRequests": 1, "saturationDetector": {"pluginRef": "concurrency-detector"}},
    }
}


def test_a_full_queue_of_one_node_affects_no_other_application(
    plane: LivePlane, deploy: Deploy, client: httpx.Client, tmp_path: Path
) -> None:
    with pm.InputNode() as given:
        quick = nodes.Counter.bind()
        slow = nodes.Slow.options(max_concurrency=1, scheduling=QUEUE_OF_ONE).bind()
        dag = {"count": quick.count.bind(given), "slow": slow.until_file_exists.bind(given)}
    path, other, release = deploy("full", dag), deploy("diamond", nodes.diamond()), tmp_path / "release"

    def ask(name: str) -> httpx.Response:
        return client.post(path, json=str(release), headers={"x-request-id": name})

    def traffic() -> tuple[int, int]:
        [deployment] = [one for one in plane.status()["deployments"] if one["name"] == "full.slow"]
        return deployment["running"], deployment["waiting"]

    with ThreadPoolExecutor(2) as pool:
        served = pool.submit(ask, "served")
        plane.until(lambda: traffic() == (1, 0), "a call on the one replica")
        waits = pool.submit(ask, "waits")
        plane.until(lambda: traffic() == (1, 1), "a call in the queue")
        refused = ask("refused")
        assert client.post(other, json=[1, 2, 3]).json() == 8
        release.touch()
        answers = [served.result(), waits.result()]
    assert refused.status_code == 429, refused.text
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "not_served")
    assert (error["node"], error["step"]) == ("slow", "slow.until_file_exists")
    assert error["message"].startswith('node "slow": the queue is full: ')
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-request-id"] == "refused"
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.json()["slow"] for answer in answers] == ["done", "done"]
    assert [answer.json()["count"] for answer in answers] == [1, 2]
    assert traffic() == (0, 0)
    [_, step] = plane.admin.get("requests", "refused")["steps"]
    assert (step["node"], step["tries"], step["instance"]) == ("slow", 0, "")
    assert step["failure"].startswith("the queue is full: ")


def test_a_client_that_does_not_read_pauses_only_its_own_generator(
    plane: LivePlane, deploy: Deploy, client: httpx.Client, tmp_path: Path
) -> None:
    with pm.InputNode() as given:
        dag = nodes.Endless.bind().chunks.bind(given)
    path, other, progress = deploy("endless", dag), deploy("diamond", nodes.diamond()), tmp_path / "progress"
    address = urlsplit(plane.url)
    body = json.dumps(str(progress)).encode()
    with socket.create_connection((address.hostname, address.port)) as unread:
        unread.sendall(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body
        )
        plane.until(progress.exists, "the first pieces")
        seen: list[str] = []

        def is_paused() -> bool:
            seen.append(progress.read_text())
            return len(seen) > 25 and len(set(seen[-25:])) == 1  # half a second

        plane.until(is_paused, "back-pressure")
        assert int(seen[-1]) < 64 << 20, "the plane must not buffer the stream"
        assert client.post(other, json=[1, 2, 3]).json() == 8
        assert len(unread.recv(65536)) > 0
    plane.until(lambda: progress.read_text() == "stopped", "the generator closed after the disconnect")
