"""Our own document as a whole: what it wants to run, what it leaves out, and where its paths lead."""

import sys
from pathlib import Path
from typing import Any

import pytest

from pointsman.config import (
    DeploymentPlan,
    PointsmanPlan,
    endpoint_engine,
    load,
    load_endpoints,
    load_manifest,
)
from pointsman.config.machines import RuntimeSpec, WorkerSpec
from pointsman.config.schema import GatewaySpec, PriceSpec
from pointsman.control.desired import Desired, DesiredEndpoint, DesiredEngine, Lifecycle
from pointsman.engines import Command, LlamaCpp, OpenAI, Simulated, Vllm
from pointsman.errors import ConfigError
from pointsman.routing.dispatcher import Dispatcher

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def deployment(fields: str, **settings: Any) -> DeploymentPlan:
    [plan] = load_manifest(f"deployments:\n- name: a\n  model: m\n{fields}", **settings).deployments
    return plan


SIMULATED = "  engine: {type: simulated}\n"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_load_without_a_note(file: Path) -> None:
    plan = load(file)
    assert isinstance(plan, PointsmanPlan)
    assert plan.warnings == ()
    for one in plan.deployments:
        Dispatcher(one.dispatch_plan())


def test_a_deployment_of_an_engine() -> None:
    plan = deployment("""\
  aliases: [other]
  replicas: 3
  engine: {type: simulated, parameters: {maxNumSeqs: 8}}
  maxConcurrency: 5
  labels: {zone: a}
  lifecycle: {startTimeout: 2m, probeInterval: 500ms, failuresUntilUnhealthy: 4, backoffMax: 5s}
  price: {perMillionInputTokens: 0.5}
""")
    wanted = plan.desired
    assert (plan.name, plan.model, wanted.name, wanted.model, wanted.aliases) == ("a", "m", "a", "m", ("other",))
    assert (wanted.replicas, wanted.max_concurrency, wanted.labels) == (3, 5, {"zone": "a"})
    assert wanted.lifecycle == Lifecycle(
        start_timeout_s=120.0, probe_interval_s=0.5, failures_until_unhealthy=4, backoff_max_s=5.0
    )
    assert isinstance(plan.engine, Simulated)
    assert plan.engine.slots == wanted.engine_slots == 8
    assert plan.price == PriceSpec(per_million_input_tokens=0.5)
    assert plan.endpoints_file is None


def test_defaults_of_a_manifest() -> None:
    plan = load_manifest("deployments:\n- {name: a, model: m, engine: {type: simulated}}\n")
    assert plan.gateway == GatewaySpec()
    assert plan.workers == ()
    [one] = plan.deployments
    assert (one.desired.replicas, one.desired.lifecycle, one.price) == (1, Lifecycle(), None)
    assert plan.desired() == Desired({"a": one.desired})
    assert load_manifest("deployments: []").desired() == Desired()


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---", "---\n...\n", "null"])
def test_an_empty_manifest_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the manifest is empty; list what should run .*pointsman down"):
        load_manifest(text, file="m.yaml")


def test_a_deployment_of_endpoints_runs_nothing() -> None:
    plan = deployment("""\
  endpoints:
  - {url: "http://GPU-1:8000/"}
  - {url: "https://[::1]:8443", name: spare, engine: vllm, maxConcurrency: 4, labels: {zone: b}}
""")
    assert plan.engine is None
    assert (plan.desired.replicas, plan.desired.engine) == (0, None)
    assert plan.desired.endpoints == (
        DesiredEndpoint(name="gpu-1:8000", url="http://gpu-1:8000", messages_api="translated"),
        DesiredEndpoint(
            name="spare",
            url="https://[::1]:8443",
            engine="vllm",
            max_concurrency=4,
            labels={"zone": "b"},
            messages_api="native",
        ),
    )


def test_a_deployment_may_have_an_engine_and_endpoints() -> None:
    plan = deployment(SIMULATED + "  endpoints: [{url: 'http://localhost:1'}]\n")
    assert (plan.desired.replicas, len(plan.desired.endpoints)) == (1, 1)


# What instances are started from


def recipe(parameters: str, **settings: Any) -> str:
    return deployment(f"  engine: {{type: simulated, parameters: {parameters}}}\n", **settings).desired.recipe


def test_equivalent_parameters_have_the_same_recipe() -> None:
    assert recipe("{}") == recipe("{maxNumSeqs: 256}") == recipe("{faults: []}")
    assert recipe("{}") != recipe("{maxNumSeqs: 255}")


def test_equivalent_scheduling_has_the_same_recipe() -> None:
    def how(text: str) -> str:
        return deployment(SIMULATED + text).scheduling_recipe

    assert how("") == how("  scheduling:\n") == how("  scheduling: {parameters: {}}\n")
    assert how("  scheduling: {policy: fifo}\n") == how("  scheduling:\n    # first come\n    policy: 'fifo'\n")
    assert len({how(""), how("  scheduling: {policy: fifo}\n"), how("  scheduling: {policy: priority}\n")}) == 3
    config = "  scheduling: {config: {plugins: [{type: queue-scorer, weight: %d}]}}\n"
    assert how(config % 1) != how(config % 2)


# Paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny.gguf").touch()
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    return tmp_path


LLAMA = "  engine: {type: llama.cpp, parameters: {model: %s}}\n"


def parameters(plan: DeploymentPlan) -> Any:
    assert plan.desired.engine is not None
    return plan.desired.engine.parameters


def test_weights_are_relative_to_the_folder_of_the_document(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = str(folder / "weights" / "tiny.gguf")
    (folder / "m.yaml").write_text("deployments:\n- name: a\n  model: m\n" + LLAMA % "weights/tiny.gguf")
    [from_file] = load_manifest(folder / "m.yaml").deployments
    from_text = deployment(LLAMA % "weights/tiny.gguf", folder=folder)
    absolute = deployment(LLAMA % weights)
    monkeypatch.chdir(folder)
    [from_here] = load_manifest(Path("m.yaml")).deployments
    assert from_file.desired == from_text.desired == absolute.desired == from_here.desired
    assert parameters(from_file)["model"] == weights
    assert isinstance(from_file.engine, LlamaCpp)
    assert weights in from_file.engine.launch("m", "127.0.0.1", 1).argv


def test_weights_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    plan = deployment(LLAMA % "~/weights/tiny.gguf", folder="/")
    assert parameters(plan)["model"] == str(folder / "weights" / "tiny.gguf")


def test_weights_inside_a_package_stay_as_they_are(folder: Path) -> None:
    assert parameters(deployment(LLAMA % "'package:some/weights.gguf'"))["model"] == "package:some/weights.gguf"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("org/model-8b", "org/model-8b"),
        ("./elsewhere", "{folder}/elsewhere"),
        ("weights", "{folder}/weights"),
        ("/data/model", "/data/model"),
    ],
)
def test_a_model_of_vllm_is_a_path_only_if_it_looks_like_one(folder: Path, written: str, meant: str) -> None:
    plan = deployment(f"  engine: {{type: vllm, parameters: {{model: {written}}}}}\n", folder=folder)
    assert isinstance(plan.engine, Vllm)
    assert parameters(plan)["model"] == meant.format(folder=folder)


def test_tls_files_are_relative_to_the_document(folder: Path) -> None:
    text = "gateway: {tls: {certFile: cert.pem, keyFile: ./key.pem}}\n"
    tls = load_manifest(text, folder).gateway.tls
    assert tls is not None
    assert (tls.cert_file, tls.key_file) == (str(folder / "cert.pem"), str(folder / "key.pem"))


def test_an_endpoints_file_may_not_exist_yet(folder: Path) -> None:
    plan = load_manifest("deployments:\n- {name: a, model: m, endpointsFile: servers.yaml}\n", folder)
    [one] = plan.deployments
    assert one.endpoints_file == folder / "servers.yaml"
    assert one.desired.endpoints == ()
    message = f"there is no {folder / 'servers.yaml'} yet; its endpoints join as soon as the file exists"
    [warning] = plan.warnings
    assert str(warning) == f"<text>:2: warning: deployments[0].endpointsFile: {message}"
    one.endpoints_file.write_text("- {url: 'http://localhost:1', engine: sglang}\n- {url: 'http://localhost:2'}\n")
    assert [endpoint.name for endpoint in load_endpoints(one.endpoints_file)] == ["localhost:1", "localhost:2"]
    assert load_manifest("deployments:\n- {name: a, model: m, endpointsFile: servers.yaml}\n", folder).warnings == ()
    one.endpoints_file.write_text("")
    assert load_endpoints(one.endpoints_file) == ()


# Engines


OWN = """
from pointsman.engines import Engine, LaunchSpec

class Mine(Engine):
    name = "mine"

    def __init__(self, speed: int, loud: bool = False) -> None:
        self.speed, self.loud = speed, loud

    def launch(self, model, host, port):
        return LaunchSpec(("serve", str(port), str(self.speed)))

class Reader(Mine):
    def __init__(self) -> None:
        super().__init__(1)

class Unfinished(Engine):
    name = "unfinished"
"""


@pytest.fixture
def own_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_engines.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_engines")
def test_a_users_own_engine() -> None:
    plan = deployment("  engine: {type: 'my_engines:Mine', parameters: {speed: 3}}\n")
    assert plan.engine is not None
    assert plan.engine.launch("m", "h", 80).argv == ("serve", "80", "3")
    assert plan.desired.engine == DesiredEngine(
        "my_engines:Mine", {"speed": 3, "loud": False}, messages_api="translated"
    )
    assert plan.desired.engine_slots is None


@pytest.mark.usefixtures("own_engines")
def test_the_adapters_of_endpoints() -> None:
    assert isinstance(endpoint_engine("openai"), OpenAI)
    assert isinstance(endpoint_engine("llama.cpp"), LlamaCpp)
    assert endpoint_engine("my_engines:Reader").name == "mine"
    with pytest.raises(ConfigError, match=r'there is no engine "vlm"; did you mean "vllm"\?'):
        endpoint_engine("vlm")
    with pytest.raises(ConfigError, match="give it an of_endpoint"):
        endpoint_engine("my_engines:Mine")
    with pytest.raises(ConfigError, match='engine "command" cannot read a server that is already running'):
        endpoint_engine("command")


def test_a_command_is_an_engine() -> None:
    plan = deployment("  engine: {type: command, parameters: {command: 'serve --port {port}', slots: 2}}\n")
    assert isinstance(plan.engine, Command)
    assert plan.desired.engine_slots == 2


# The front door


def test_hashes_are_in_lower_case() -> None:
    plan = load_manifest(f"""\
gateway:
  adminKeySha256: {"AB" * 32}
  tenants: [{{name: red, requestsPerMinute: 60}}]
  keys: [{{sha256: {"CD" * 32}, tenant: red}}]
""")
    assert plan.gateway.admin_key_sha256 == "ab" * 32
    assert plan.gateway.keys[0].sha256 == "cd" * 32


@pytest.mark.parametrize(
    ("listen", "open_to_all"),
    [
        ("127.0.0.1:80", False),
        ("127.8.8.8:0", False),
        ("localhost:80", False),
        ("'[::1]:80'", False),
        ("0.0.0.0:80", True),
        ("'[::]:80'", True),
        ("10.1.2.3:80", True),
        ("my-machine:80", True),
    ],
)
def test_a_gateway_without_keys_on_a_public_address_gives_a_warning(listen: str, open_to_all: bool) -> None:
    warnings = load_manifest(f"gateway: {{listen: {listen}}}\n").warnings
    assert bool(warnings) is open_to_all
    for warning in warnings:
        assert (
            "has no keys: everyone on the network may send requests; make one with: pointsman key --tenant NAME"
            in warning.message
        )
    tenant = f"tenants: [{{name: t}}], keys: [{{sha256: {'0a' * 32}, tenant: t}}]"
    assert load_manifest(f"gateway: {{listen: {listen}, {tenant}}}\n").warnings == ()


PRICED = "deployments:\n- {name: a, model: m, engine: {type: simulated}, price: {%s}}\n"
BUDGET = "gateway:\n  tenants:\n  - {name: free}\n  - {name: t, costBudget: 5}\n"


@pytest.mark.parametrize("price", ["", "perGpuHour: 3", "perMillionOutputTokens: 0"])
def test_a_budget_that_never_runs_out_gives_a_warning(price: str) -> None:
    [warning] = load_manifest(BUDGET + PRICED % price).warnings
    assert (warning.line, warning.field) == (4, "gateway.tenants[1].costBudget")
    assert warning.message == (
        "never runs out, as no deployment has a price of tokens; set price.perMillionInputTokens or "
        "price.perMillionOutputTokens of deployments"
    )


@pytest.mark.parametrize("price", ["perMillionInputTokens: 1", "perMillionOutputTokens: 0.5"])
def test_a_budget_with_a_price(price: str) -> None:
    unpriced = "- {name: b, model: n, engine: {type: simulated}}\n"
    assert load_manifest(BUDGET + PRICED % price + unpriced).warnings == ()


def test_workers_of_a_cluster() -> None:
    text = "runtime: {type: ray, address: 'h:6379'}\nworkers:\n- {name: n1, labels: {rack: r1}}\n- {name: n2}\n"
    plan = load_manifest(text)
    assert (plan.runtime.type, plan.runtime.address) == ("ray", "h:6379")
    assert [one.name for one in plan.workers] == ["n1", "n2"]


def test_a_runtime_may_be_one_word_or_have_settings() -> None:
    assert load_manifest("runtime: ray\n").runtime == RuntimeSpec(type="ray")
    assert load_manifest("runtime: local\n").runtime == RuntimeSpec()
    plan = load_manifest("runtime: {type: ray, namespace: team-a, lease: 5s, orphanGrace: 2m}\n")
    assert (plan.runtime.namespace, plan.runtime.lease, plan.runtime.orphan_grace) == ("team-a", 5.0, 120.0)


def test_gateways_on_nodes() -> None:
    plan = load_manifest("runtime: ray\ngateway: {nodes: [n1, n2], listen: 'node:8080'}\n")
    assert (plan.gateway.nodes, plan.gateway.listen) == (["n1", "n2"], "node:8080")


def test_this_machine_may_be_named() -> None:
    plan = load_manifest("workers: [{name: localhost, labels: {rack: r1}}]\n")
    assert plan.workers == (WorkerSpec(name="localhost", labels={"rack": "r1"}),)


# Endpoints that a file lists

DISCOVERY = """\
deployments:
- name: a
  model: m
  scheduling:
    config:
      plugins:
      - {type: file-discovery, parameters: {path: servers.yaml}}
      - {type: queue-scorer}
      dataLayer: {discovery: {endpoints: {pluginRef: file-discovery}}}
"""


@pytest.mark.parametrize("reference", ["{endpoints: {pluginRef: file-discovery}}", "{pluginRef: file-discovery}"])
def test_a_discovery_plugin_names_the_file_of_endpoints(tmp_path: Path, reference: str) -> None:
    (tmp_path / "servers.yaml").write_text("""\
endpoints:
- {name: one, address: 10.0.0.1, port: "8000", labels: {llm-d.ai/role: prefill}}
- {name: two, address: "::1", port: 8001, labels: {llm-d.ai/engine-type: sglang}}
""")
    file = tmp_path / "m.yaml"
    file.write_text(DISCOVERY.replace("{endpoints: {pluginRef: file-discovery}}", reference))
    plan = load(file)
    assert isinstance(plan, PointsmanPlan)
    assert plan.warnings == ()
    [one] = plan.deployments
    assert one.endpoints_file == tmp_path / "servers.yaml"
    assert load_endpoints(one.endpoints_file) == (
        DesiredEndpoint(
            name="one",
            url="http://10.0.0.1:8000",
            engine="vllm",
            labels={"llm-d.ai/role": "prefill"},
            messages_api="native",
        ),
        DesiredEndpoint(
            name="two",
            url="http://[::1]:8001",
            engine="sglang",
            labels={"llm-d.ai/engine-type": "sglang"},
            messages_api="translated",
        ),
    )


def test_one_file_lists_the_endpoints(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(DISCOVERY.replace("  model: m\n", "  model: m\n  endpointsFile: other.yaml\n"))
    with pytest.raises(ConfigError, match=r"endpointsFile: is given, and dataLayer\.discovery"):
        load(file)
    file.write_text(DISCOVERY.replace("{pluginRef: file-discovery}", "{pluginRef: queue-scorer}"))
    with pytest.raises(ConfigError, match='"queue-scorer" is not an endpoint discovery but a scorer'):
        load(file)


def test_users_classes_may_be_beside_the_document(tmp_path: Path) -> None:
    (tmp_path / "beside_the_manifest.py").write_text(
        "from pointsman.strategies import FIFOPolicy\n\n\nclass Mine(FIFOPolicy):\n    pass\n"
    )
    file = tmp_path / "manifest.yaml"
    file.write_text(
        "kind: Pointsman\ndeployments:\n- {name: a, model: a, engine: {type: simulated}, "
        "scheduling: {policy: 'beside_the_manifest:Mine'}}\n"
    )
    before = list(sys.path)
    [plan] = load_manifest(file).deployments
    assert type(plan.policy).__name__ == "Mine"
    assert sys.path == before
