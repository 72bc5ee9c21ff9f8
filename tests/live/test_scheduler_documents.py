"""Documents in the form of the published endpoint picker, on a live plane before servers that record what they get."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.chaos.planes import LivePlane
from tests.live.manifests import LIFECYCLE, manifest

HELD = 1000
"""A request for this many tokens is held until it is released."""
LONG_S = 30.0


class Got(NamedTuple):
    """A request as a server got it."""

    headers: Mapping[str, str]
    body: dict[str, Any]


class RecordingEngine(ThreadingHTTPServer):
    """A server with vLLM's pages, whose metrics a test sets, and which records requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.heat = 0.0
        self.got: list[Got] = []
        self.release = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def page(self) -> str:
        numbers = {"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0}
        return "".join(f"{name} {value}\n" for name, value in {**numbers, 'heat{of="gpu"}': self.heat}.items())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RecordingEngine

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self.server.page.encode() if self.path == "/metrics" else b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.got.append(Got({name.lower(): value for name, value in self.headers.items()}, body))
        tokens = body.get("max_tokens", 1)
        usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
        choice = {"index": 0, "text": "yes", "finish_reason": "length"}
        if body.get("stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self._event({"choices": [{**choice, "finish_reason": None}]})
            self.server.release.wait(LONG_S)
            self._event({"choices": [choice], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True
            return
        if tokens >= HELD:
            self.server.release.wait(LONG_S)
        self._answer(json.dumps({"object": "text_completion", "choices": [choice], "usage": usage}).encode())

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def document(*plugins: dict[str, Any] | str, **more: Any) -> dict[str, Any]:
    """The body of an EndpointPickerConfig."""
    return {"plugins": [{"type": one} if isinstance(one, str) else one for one in plugins], **more}


def plugin(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": kind, "parameters": parameters}


STAGES: list[dict[str, Any] | str] = [
    plugin("disagg-profile-handler", deciders={"prefill": "always-disagg-pd-decider"}),
    "always-disagg-pd-decider", "prefill-filter", "decode-filter",
]  # fmt: skip


def stages(*of_prefill: str) -> list[dict[str, Any]]:
    prefill = [{"pluginRef": name} for name in ("prefill-filter", *of_prefill)]
    return [{"name": "prefill", "plugins": prefill}, {"name": "decode", "plugins": [{"pluginRef": "decode-filter"}]}]


HEAT = {"name": "vllm", "customMetrics": [{"attributeKey": "heat", "metricSpec": "heat{of=gpu}"}]}
DOCUMENTS = {
    "shed": document(
        plugin("concurrency-detector", maxConcurrency=1),
        "queue-scorer",
        saturationDetector={"pluginRef": "concurrency-detector"},
        schedulingProfiles=[{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}],
    ),
    "custom": document(
        plugin("core-metrics-extractor", engineConfigs=[HEAT]),
        plugin("endpoint-attribute-scorer", attributeKey="heat", algorithm={"type": "linear_lower_is_better"}),
    ),
    "cool": document(
        plugin("core-metrics-extractor", engineConfigs=[HEAT]),
        plugin(
            "endpoint-attribute-filter",
            attribute="heat",
            onMissing="Fail",
            algorithm={"type": "threshold", "threshold": {"operator": "LessThan", "value": 2}},
        ),
    ),
    "near": document(
        *STAGES,
        plugin("topology-affinity-filter", minAffinity="rack"),
        plugin("file-discovery", path="servers.yaml"),
        dataLayer={"discovery": {"endpoints": {"pluginRef": "file-discovery"}}},
        schedulingProfiles=stages("topology-affinity-filter"),
    ),
    "row": document(
        *STAGES,
        plugin("topology-extractor", rack="row"),
        "topology-affinity-scorer",
        schedulingProfiles=stages("topology-affinity-scorer"),
    ),
    "session": document(
        *STAGES,
        plugin("session-affinity-scorer", profileName="prefill"),
        schedulingProfiles=stages("session-affinity-scorer"),
    ),
    "agents": document(
        "agent-identity",
        "program-aware-fairness",
        "queue-scorer",
        plugin("concurrency-detector", maxConcurrency=1),
        featureGates=["flowControl"],
        flowControl={
            "saturationDetector": {"pluginRef": "concurrency-detector"},
            "defaultPriorityBand": {"fairnessPolicyRef": "program-aware-fairness"},
        },
    ),
    "media": document("mm-embeddings-cache-scorer"),
    "older": document(plugin("prefix-cache-scorer", hashBlockSize=256, lruCapacityPerServer=1000)),
    "older-stages": document(
        "pd-profile-handler",
        *STAGES[2:],
        plugin("no-hit-lru-scorer", prefixPluginType="prefix-cache-scorer", prefixPluginName="prefix-cache-scorer"),
        plugin("active-request-scorer", requestTimeout="20m"),
        schedulingProfiles=stages("no-hit-lru-scorer", "active-request-scorer"),
    ),
    "flat-stages": document(
        plugin("disagg-profile-handler", prefillProfile="prefill", deciderPluginName="always-disagg-pd-decider"),
        *STAGES[1:],
        plugin("prefix-cache-scorer", blockSize=64, blockSizeTokens=64),
        schedulingProfiles=stages("prefix-cache-scorer"),
    ),
    "evict": document(
        "sheddable-eviction-filter",
        "priority-then-time-eviction-order-policy",
        plugin("concurrency-detector", maxConcurrency=2),
        featureGates=["flowControl"],
        flowControl={"saturationDetector": {"pluginRef": "concurrency-detector"}, "enableEviction": True},
    ),
    "tokens": document(plugin("inflight-load-producer", addEstimatedOutputTokens=True), "token-load-scorer"),
    "burst": document(
        plugin("burst-prefix-cache-producer", windowDurationMs=60_000, maxPerReplica=2), "prefix-cache-scorer"
    ),
}
ALONE = {"shed", "agents", "evict"}
"""Deployments with one server."""


class Scene:
    """A plane with a deployment for each document, and the servers behind all of them."""

    def __init__(self, plane: LivePlane, engines: list[RecordingEngine]) -> None:
        self.plane, self.engines = plane, engines
        self.url = plane.url

    def post(self, model: str, body: Mapping[str, Any] = {}, **headers: str) -> tuple[int, Mapping[str, str]]:
        """Status and headers of an answer."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        content = {"model": model, "max_tokens": 1} | ({} if "messages" in body else {"prompt": "hello"}) | dict(body)
        sent = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        request = urllib.request.Request(self.url + path, json.dumps(content).encode(), sent)
        try:
            with urllib.request.urlopen(request, timeout=LONG_S) as response:
                response.read()
                return response.status, {name.lower(): text for name, text in response.headers.items()}
        except urllib.error.HTTPError as error:
            error.read()
            return error.code, {name.lower(): text for name, text in error.headers.items()}

    def server(self, model: str, body: Mapping[str, Any] = {}, **headers: str) -> int:
        """Which server gets a request."""
        before = [len(engine.got) for engine in self.engines]
        assert self.post(model, body, **headers)[0] == 200
        [index] = [index for index, engine in enumerate(self.engines) if len(engine.got) > before[index]]
        return index

    def hold(self, model: str, body: Mapping[str, Any] = {}, **headers: str) -> tuple[threading.Thread, int]:
        """A request that does not end before its server's `release`; and the server."""
        before = [len(engine.got) for engine in self.engines]
        thread = threading.Thread(target=self.post, args=(model, {"max_tokens": HELD, **body}), kwargs=headers)
        thread.start()
        self.plane.until(lambda: [len(engine.got) for engine in self.engines] != before, "the request is held")
        [index] = [index for index, engine in enumerate(self.engines) if len(engine.got) > before[index]]
        return thread, index

    def waiting(self, deployment: str) -> int:
        [one] = [one for one in self.plane.status()["deployments"] if one["name"] == deployment]
        return int(one["waiting"])


@pytest.fixture(scope="module")
def live(module_plane: LivePlane) -> Iterator[Scene]:
    engines = [RecordingEngine() for _ in range(3)]
    roles = ["decode", "prefill", "prefill"]
    labels = [
        {
            "llm-d.ai/role": role,
            "topology.kubernetes.io/rack": rack,
            "kubernetes.io/hostname": f"{rack}-{role}",
            "row": row,
        }
        for role, rack, row in zip(roles, ["r1", "r1", "r2"], ["east", "west", "east"], strict=True)
    ]
    listed = [
        {
            "name": f"e{index}",
            "address": "127.0.0.1",
            "port": engine.address.rpartition(":")[2],
            "labels": labels[index],
        }
        for index, engine in enumerate(engines)
    ]
    Path(module_plane.folder / "servers.yaml").write_text(json.dumps({"endpoints": listed}))
    deployments = []
    for name, config in DOCUMENTS.items():
        servers = [
            {"url": f"http://{engine.address}", "name": f"e{index}", "engine": "vllm", "labels": labels[index]}
            for index, engine in enumerate(engines[: 1 if name in ALONE else 3])
        ]
        one = {"name": name, "model": name, "lifecycle": LIFECYCLE, "scheduling": {"config": config}}
        deployments.append(one | ({} if name == "near" else {"endpoints": servers}))
    module_plane.up(manifest(*deployments))
    yield Scene(module_plane, engines)
    for engine in engines:
        engine.release.set()
        engine.shutdown()
        engine.server_close()


@pytest.fixture(autouse=True)
def nothing_is_released(live: Scene) -> Iterator[None]:
    for engine in live.engines:
        engine.release.clear()
    yield
    for engine in live.engines:
        engine.release.set()


def test_without_flow_control_negative_priority_is_shed_at_saturation(live: Scene) -> None:
    batch = {"pointsman": {"priority": -1}}
    assert live.post("shed", batch)[0] == 200
    thread, _ = live.hold("shed")
    status, headers = live.post("shed", batch)
    assert (status, headers["x-llm-d-request-dropped-reason"]) == (429, "rejected-saturated")
    assert live.post("shed")[0] == 200, "others are not shed"
    live.engines[0].release.set()
    thread.join(LONG_S)
    assert live.post("shed", batch)[0] == 200


def test_custom_metrics_of_engines_feed_the_scorer_and_the_filter(live: Scene) -> None:
    for engine, heat in zip(live.engines, (9.0, 1.0, 5.0), strict=True):
        engine.heat = heat
    live.plane.until(lambda: {live.server("custom") for _ in range(8)} == {1}, "the metrics are read")
    live.plane.until(lambda: {live.server("cool") for _ in range(8)} == {1}, "the metrics are read")
    live.engines[1].heat, live.engines[2].heat = 7.0, 0.5
    live.plane.until(lambda: {live.server("custom") for _ in range(8)} == {2}, "newer metrics count")
    live.plane.until(lambda: {live.server("cool") for _ in range(8)} == {2}, "newer metrics count")


def prefillers(scene: Scene, model: str, number: int, **headers: str) -> set[str]:
    """Where requests of a deployment are prefilled."""
    for _ in range(number):
        assert scene.server(model, {}, **headers) == 0, "the only one that decodes"
    return {got.headers["x-prefiller-host-port"] for got in scene.engines[0].got[-number:]}


def test_prefill_is_near_decode_and_servers_are_listed_in_a_file(live: Scene) -> None:
    assert prefillers(live, "near", 6) == {live.engines[1].address}, "the prefiller of the same rack"


def test_labels_of_any_name_say_where_servers_are(live: Scene) -> None:
    assert prefillers(live, "row", 6) == {live.engines[2].address}, "the prefiller of the same row"


def test_a_session_follows_its_stage(live: Scene) -> None:
    assert len(prefillers(live, "session", 24)) == 2, "either of them, without a session"
    _, headers = live.post("session")
    first = live.engines[0].got[-1].headers["x-prefiller-host-port"]
    assert prefillers(live, "session", 8, x_session_token=headers["x-session-token"]) == {first}


def test_sessions_of_agents_share_by_what_they_were_served(live: Scene) -> None:
    engine = live.engines[0]
    assert live.post("agents", {"max_tokens": HELD - 1}, session_id="greedy")[0] == 200
    held, _ = live.hold("agents", session_id="other")
    threads = []
    for number, session in enumerate(("greedy", "modest"), start=1):
        thread = threading.Thread(target=live.post, args=("agents", {"user": session}), kwargs={"session_id": session})
        thread.start()
        threads.append(thread)
        live.plane.until(lambda number=number: live.waiting("agents") == number, "it waits")  # type: ignore[misc]
    engine.release.set()
    for thread in (held, *threads):
        thread.join(LONG_S)
    assert [got.body["user"] for got in engine.got[-2:]] == ["modest", "greedy"]


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_media_go_where_they_were_encoded(live: Scene, kind: str) -> None:
    def ask(url: str) -> int:
        part = {"type": kind, kind: {"url": url}}
        return live.server("media", {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]})

    first = {name: ask(f"http://host/{kind}/{name}") for name in ("a", "b", "c")}
    for _ in range(3):
        assert {name: ask(f"http://host/{kind}/{name}") for name in first} == first


def test_older_forms_work_and_prompts_are_hashed_one_by_one(live: Scene) -> None:
    one, other = "first " * 100, "second " * 100
    server = live.server("older", {"prompt": [one, other]})
    assert [live.server("older", {"prompt": other}) for _ in range(4)] == [server] * 4
    assert [live.server("older", {"prompt": one}) for _ in range(4)] == [server] * 4
    assert "hashBlockSize: is deprecated; declare approx-prefix-cache-producer" in live.plane.log()


def test_older_forms_of_stages_work_and_name_the_new_ones(live: Scene) -> None:
    both = {engine.address for engine in live.engines[1:]}
    assert prefillers(live, "older-stages", 4) == both, "the one that was not used for longest"
    assert prefillers(live, "flat-stages", 24) <= both
    for told in (
        '"pd-profile-handler" is deprecated; use "disagg-profile-handler"',
        "parameters.prefixPluginType: has no effect",
        "parameters.prefixPluginName: has no effect",
        "parameters.requestTimeout: has no effect",
        "parameters.prefillProfile: is deprecated; write profiles.prefill",
        "parameters.deciderPluginName: is deprecated; write deciders.prefill",
        "parameters.blockSize: is deprecated; declare approx-prefix-cache-producer",
        "parameters.blockSizeTokens: is deprecated; declare approx-prefix-cache-producer",
    ):
        assert told in live.plane.log()


def test_prefix_tokens_are_counted_after_an_apply(live: Scene) -> None:
    def counted() -> float:
        with urllib.request.urlopen(f"{live.url}/metrics", timeout=LONG_S) as page:
            lines = page.read().decode().splitlines()
        named = [one for one in lines if one.startswith("pointsman_prefix_tokens_total") and '"older"' in one]
        return sum(float(one.rpartition(" ")[2]) for one in named)

    live.server("older", {"prompt": "third " * 100})
    before = counted()
    assert before > 0
    done = live.plane.pointsman("apply", live.plane.folder / "manifest.yaml")
    assert done.stdout.splitlines()[0] == "nothing has changed", done.stderr
    live.server("older", {"prompt": "third " * 100})
    assert counted() > before


def test_a_running_request_that_may_be_shed_makes_room(live: Scene) -> None:
    """Of two, that of the lower priority."""
    engine, held = live.engines[0], {"max_tokens": HELD}
    with ThreadPoolExecutor(2) as pool:
        sent = []
        for number, priority in enumerate((-2, -1), start=len(engine.got) + 1):
            sent.append(pool.submit(live.post, "evict", held | {"pointsman": {"priority": priority}}))
            live.plane.until(lambda number=number: len(engine.got) == number, "it runs")  # type: ignore[misc]
        assert live.post("evict")[0] == 200
        status, headers = sent[0].result()
        assert (status, headers["x-llm-d-request-dropped-reason"]) == (429, "evicted")
        assert not sent[1].done()
        engine.release.set()
        assert sent[1].result()[0] == 200


def test_the_expected_answer_counts_as_load(live: Scene) -> None:
    threads = dict(live.hold("tokens", {"stream": True})[::-1] for _ in range(2))
    assert len(threads) == 2, "the second goes elsewhere"
    [idle] = {0, 1, 2} - set(threads)
    assert [live.server("tokens") for _ in range(4)] == [idle] * 4
    for index, thread in threads.items():
        live.engines[index].release.set()
        thread.join(LONG_S)


def test_a_burst_stays_together_up_to_its_limit(live: Scene) -> None:
    servers = [live.server("burst", {"prompt": "the same prompt " * 30}) for _ in range(6)]
    assert servers[0] == servers[1] != servers[2]


def test_what_has_no_effect_is_said_when_the_plane_starts(live: Scene, tmp_path: Path) -> None:
    config = document(
        "queue-scorer",
        plugin("file-discovery", path="x.yaml", watchFile=True),
        requestHandler={"propagatePriority": True},
    )
    config["dataLayer"] = {"discovery": {"pluginRef": "file-discovery"}}
    file = tmp_path / "m.yaml"
    file.write_text(manifest({"name": "a", "model": "a", "scheduling": {"config": config}}))
    told = live.plane.pointsman("plan", file).stdout
    assert "requestHandler.propagatePriority: has no effect" in told
    assert "parameters.watchFile: has no effect: the file is always watched" in told
