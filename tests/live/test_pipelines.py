"""Applications on a real plane: every kind of graph, over HTTP, with real replicas."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import llama, manifest

Ask = Callable[..., httpx.Response]
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
        """Deploy it and wait; where it is reached."""
        text = pm.build(root, name=name, folder=plane.folder).to_yaml()
        plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
        plane.until(plane.is_settled, f"{name} ready")
        return f"/{name}"

    return deploy


def test_the_diamond(deploy: Deploy, client: httpx.Client) -> None:
    path = deploy("diamond", nodes.diamond())
    assert client.post(path, json=[1, 2, 3]).json() == 8
    answer = client.post(path, json=[1, 2])
    assert answer.status_code == 422
    assert answer.json() == {
        "detail": [{"loc": ["body"], "msg": "input[2]: the input has 2 items", "type": "bad_input"}]
    }
    assert client.post(path, content=b"{").status_code == 400
    assert client.get(path).status_code == 405


def test_a_chain_and_a_fan(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as value:
        ten = nodes.Model.bind(10)
        three = nodes.Model.bind(3)
        chained = three.later.bind(ten.forward.bind(value))
        fan = [ten.forward.bind(chained), three.forward.bind(chained)]
        dag = nodes.total.bind({"fan": nodes.total.bind(fan), "chained": chained, "one": 1})
    assert client.post(deploy("chain", dag), json=2).json() == 60 * 13 + 60 + 1


def test_a_node_that_is_used_twice_is_called_once(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as value:
        counter = nodes.Counter.bind()
        once = counter.count.bind(value)
        dag = nodes.total.bind([once, once])
    path = deploy("shared", dag)
    assert [client.post(path, json=0).json() for _ in range(3)] == [2, 4, 6]


def test_several_outputs(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as value:
        ten = nodes.Model.bind(10)
        one = ten.forward.bind(value["x"])
        two = nodes.total.bind([one, value["x"]])
    path = deploy("outputs", {"one": one, "both": [two, one], "input": value["x"], "said": "as it is"})
    assert client.post(path, json={"x": 4}).json() == {"one": 40, "both": [44, 40], "input": 4, "said": "as it is"}


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
)
def test_streams(
    deploy: Deploy, client: httpx.Client, method: str, value: Any, accept: str, kind: str, text: str
) -> None:
    with pm.InputNode() as given:
        teller = nodes.Teller.bind()
        dag = getattr(teller, method).bind(given)
    path = deploy(f"tell-{method}", dag)
    with client.stream("POST", path, json=value, headers={"accept": accept}) as answer:
        assert answer.headers["content-type"] == kind
        assert answer.headers["transfer-encoding"] == "chunked"
        assert "".join(answer.iter_text()) == text


def test_a_stream_that_breaks_says_so(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        dag = nodes.Teller.bind().breaks.bind(given)
    path = deploy("breaks", dag)
    with client.stream("POST", path, json=2, headers={"accept": "text/event-stream"}) as answer:
        said = "".join(answer.iter_text())
    assert said.startswith("data: 0 \n\ndata: 1 \n\ndata: ")
    assert "no more" in said
    with pytest.raises(httpx.RemoteProtocolError), client.stream("POST", path, json=2) as answer:
        answer.read()


def test_calls_are_batched(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        dag = nodes.Batched.bind().double.bind(given)
    path = deploy("batched", dag)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: client.post(path, json=number).json(), range(8)))
    assert [answer[0] for answer in answers] == [2 * number for number in range(8)]
    assert max(answer[1] for answer in answers) > 1


def test_nodes_choose_whom_to_call(deploy: Deploy, client: httpx.Client, plane: LivePlane) -> None:
    cheap = nodes.Model.bind(1)
    dear = nodes.Model.bind(100)
    path = deploy("routed", nodes.Router.bind(cheap, dear))
    answer = client.post(path, json=5)
    assert answer.json() == [5, 0, 1, 2], answer.text
    answer = client.post(path, json=50, headers={"x-request-id": "routed-1"})
    assert answer.json() == [5000, 0, 1, 2]
    told = plane.pointsman("explain", "routed-1").stdout
    assert "routed.dear-1" in told
    assert told.count("forward") == 4
    wrong = client.post(path, json=-1)
    assert wrong.status_code == 500
    assert "nothing" in wrong.json()["error"]["message"]


def test_shards_each_do_a_part(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        sharded = nodes.Sharded.bind()
        dag = sharded.part.bind(given)
    assert client.post(deploy("sharded", dag), json=[1, 2, 3, 4]).json() == {"parts": [4, 6], "by": 0}


def test_deadlines_end_late_work(deploy: Deploy, client: httpx.Client, plane: LivePlane) -> None:
    with pm.InputNode() as given:
        slow = nodes.Slow.bind()
        first = slow.slowly.bind(given)
        dag = nodes.total.bind([first])
    path = deploy("late", dag)
    headers = {"x-pointsman-deadline-ms": "150", "x-request-id": "late-1"}
    answer = client.post(path, json=30, headers=headers)
    assert answer.status_code == 504
    assert answer.json()["error"]["node"] == "slow"
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    plane.until(lambda: plane.instances("late.slow")["late.slow-1"]["in_flight"] == 0, "the slow call stopped")
    told = plane.pointsman("explain", "late-1").stdout
    assert "its deadline of 150 ms was missed" in told


def test_a_step_knows_how_much_time_is_left(deploy: Deploy, client: httpx.Client) -> None:
    with pm.InputNode() as given:
        dag = nodes.Slow.options(deadline_share=0.5).bind().time_left.bind(given)
    path = deploy("left", dag)
    assert client.post(path, json=1).json() is None
    left = client.post(path, json=1, headers={"x-pointsman-deadline-ms": "4000"}).json()
    assert 1.0 < left <= 2.0


def test_an_error_names_the_node_and_shows_the_trace_only_if_asked(deploy: Deploy, client: httpx.Client) -> None:
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


def test_a_preprocessor_makes_the_input(deploy: Deploy, client: httpx.Client) -> None:
    path = deploy("pre", nodes.diamond(preprocessor=nodes.three_numbers))
    assert client.post(path, content="1,2,3").json() == 8
    assert client.post(f"{path}?by=;", content="1;2;3").json() == 8
    wrong = client.post(path, content="one,2,3")
    assert wrong.status_code == 422
    assert "invalid literal" in wrong.json()["detail"][0]["msg"]


def test_a_schema_refuses_with_the_field(deploy: Deploy, client: httpx.Client) -> None:
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


def test_arrays_go_through_shared_memory(deploy: Deploy, client: httpx.Client, plane: LivePlane) -> None:
    with pm.InputNode() as size:
        maker = nodes.Arrays.bind()
        taker = nodes.Arrays.bind()
        dag = taker.sum.bind(maker.make.bind(size))
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
    plane.until(lambda: not shared_files(plane), "all files of ended requests removed")


def shared_files(plane: LivePlane) -> list[str]:
    """Those that requests refer to; what senders keep for themselves begins with a dot."""
    [folder] = {
        line.partition("=")[2]
        for pid in plane.pids().values()
        for line in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if line.startswith("POINTSMAN_SHM=")
    }
    return [file.name for file in Path(folder).iterdir() if not file.name.startswith(".")]


def test_models_are_nodes(deploy: Deploy, client: httpx.Client) -> None:
    tiny = pm.model("tiny")
    with pm.InputNode() as given:
        text = tiny.complete.bind(given, max_tokens=3, temperature=0)
        dag = {"text": text, "again": tiny.complete.bind(prompt=text, max_tokens=2)}
    answer = client.post(deploy("told", dag), json="def ").json()
    assert answer["text"]
    assert isinstance(answer["again"], str)
    with pm.InputNode() as given:
        streamed = tiny.chat.bind([{"role": "user", "content": given["question"]}], max_tokens=3, stream=True)
    with client.stream("POST", deploy("chat", streamed), json={"question": "Hello"}) as events:
        said = "".join(events.iter_text())
    assert said.rstrip().endswith("data: [DONE]")
    assert json.loads(said.split("\n\n")[0].removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_what_models_take_in_a_pipeline_is_their_tenants(
    plane: LivePlane, deploy: Deploy, client: httpx.Client
) -> None:
    tiny = pm.model("tiny")
    with pm.InputNode() as given:
        dag = tiny.complete.bind(given, max_tokens=4, temperature=0)
    path = deploy("charged", dag)
    before = metric(client, 'pointsman_tokens_total{deployment="tiny",kind="output"}')
    assert client.post(path, json="def ").status_code == 200
    assert metric(client, 'pointsman_tokens_total{deployment="tiny",kind="output"}') == before + 4
    assert metric(client, 'pointsman_requests_total{deployment="charged",status="200"}') == 1


def test_nodes_call_models_through_handles(plane: LivePlane, deploy: Deploy, client: httpx.Client) -> None:
    path = deploy("asks", nodes.Asks.bind(pm.model("tiny")))
    answer = client.post(path, json="def ", headers={"x-request-id": "asks-1"})
    assert answer.status_code == 200, answer.text
    whole, streamed = answer.json()
    assert whole == streamed != ""
    told = plane.pointsman("explain", "asks-1").stdout
    assert told.count("completions") == 2
    assert told.count("tiny-1") == 2
    assert plane.pointsman("explain", "asks-1.asks.1").stdout.startswith('request "asks-1.asks.1" is served')


def metric(client: httpx.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


@pytest.mark.parametrize(("idempotent", "status"), [(True, 200), (False, 502)])
def test_a_call_whose_replica_dies_is_made_again_only_if_it_may_be(
    plane: LivePlane, deploy: Deploy, client: httpx.Client, idempotent: bool, status: int
) -> None:
    with pm.InputNode() as given:
        slow = nodes.Slow.options(idempotent=idempotent, num_replicas=2).bind()
        dag = slow.slowly.bind(given)
    name = f"dies-{'again' if idempotent else 'once'}"
    path = deploy(name, dag)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, path, json=1.0, headers={"x-request-id": name})
        plane.until(lambda: busy(plane, f"{name}.slow"), "the call under way")
        [replica] = busy(plane, f"{name}.slow")
        os.kill(plane.pids(f"{name}.slow")[replica], signal.SIGKILL)
        answer = asked.result()
    assert answer.status_code == status, answer.text
    if not idempotent:
        assert answer.json()["error"]["node"] == "slow"
    steps = plane.admin.get("requests", name)["steps"]
    assert [step["tries"] for step in steps] == [2 if idempotent else 1]
    plane.until(plane.is_settled, "the replica replaced")


def busy(plane: LivePlane, deployment: str) -> list[str]:
    return [name for name, one in plane.instances(deployment).items() if one["in_flight"]]


ONE_MAY_WAIT = {
    "config": {
        "featureGates": ["flowControl"],
        "plugins": [{"type": "concurrency-detector", "parameters": {"maxConcurrency": 1}}],
        "schedulingProfiles": [{"name": "default"}],
        "flowControl": {"maxRequests": 1, "saturationDetector": {"pluginRef": "concurrency-detector"}},
    }
}


def test_a_node_whose_queue_is_full_refuses_and_nobody_else_notices(
    plane: LivePlane, deploy: Deploy, client: httpx.Client, tmp_path: Path
) -> None:
    with pm.InputNode() as given:
        quick = nodes.Counter.bind()
        slow = nodes.Slow.options(max_concurrency=1, scheduling=ONE_MAY_WAIT).bind()
        dag = {"count": quick.count.bind(given), "slow": slow.until_there.bind(given)}
    path, other, door = deploy("full", dag), deploy("diamond", nodes.diamond()), tmp_path / "door"

    def ask(name: str) -> httpx.Response:
        return client.post(path, json=str(door), headers={"x-request-id": name})

    def traffic() -> tuple[int, int]:
        [told] = [one for one in plane.status()["deployments"] if one["name"] == "full.slow"]
        return told["running"], told["waiting"]

    with ThreadPoolExecutor(2) as pool:
        served = pool.submit(ask, "served")
        plane.until(lambda: traffic() == (1, 0), "a call on the one replica")
        waits = pool.submit(ask, "waits")
        plane.until(lambda: traffic() == (1, 1), "a call in the queue")
        refused = ask("refused")
        assert client.post(other, json=[1, 2, 3]).json() == 8
        door.touch()
        answers = [served.result(), waits.result()]
    assert refused.status_code == 429, refused.text
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "not_served")
    assert (error["node"], error["step"]) == ("slow", "slow.until_there")
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


def test_a_client_that_does_not_read_holds_its_generator_up_and_nobody_else(
    plane: LivePlane, deploy: Deploy, client: httpx.Client, tmp_path: Path
) -> None:
    with pm.InputNode() as given:
        dag = nodes.Pours.bind().out.bind(given)
    path, told = deploy("pours", dag), tmp_path / "poured"
    address = urlsplit(plane.url)
    body = json.dumps(str(told)).encode()
    with socket.create_connection((address.hostname, address.port)) as lazy:
        lazy.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
        plane.until(told.exists, "the first pieces")
        seen: list[str] = []

        def stands_still() -> bool:
            seen.append(told.read_text())
            return len(seen) > 25 and len(set(seen[-25:])) == 1  # half a second

        plane.until(stands_still, "back-pressure")
        assert int(seen[-1]) < 64 << 20, "the rest of it is nobody's memory"
        assert client.post("/diamond", json=[1, 2, 3]).json() == 8
        assert len(lazy.recv(65536)) > 0
    plane.until(lambda: told.read_text() == "stopped", "the generator closed once its client is gone")
