"""The changes between two manifests, in words."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pointsman.config import load_manifest
from pointsman.config.changes import Change, Changes, Outlook, changes_between, field_changes
from pointsman.control import ReconcileStep, What
from pointsman.parameters import is_secret, text_without_secrets, without_secrets, words_without_secrets
from pointsman.reasons import Reason

BEFORE = """
deployments:
  - {name: m, model: llama, endpoints: [{url: "http://127.0.0.1:1"}], scheduling: {policy: fifo}}
"""


def differences(after: str, before: str = BEFORE, steps: Sequence[ReconcileStep] = ()) -> list[tuple[str, str, str]]:
    found = changes_between(load_manifest(before), load_manifest(after), Outlook(steps))
    return [(change.what, change.subject, str(change.why)) for change in found.steps]


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("fifo", "slo-aware", ("policy", "m", "fifo -> slo-aware")),
        ("scheduling: {policy: fifo}", "scheduling: {}", ("policy", "m", "fifo -> slo-miss")),
        ("model: llama", "model: llama, price: {perMillionInputTokens: 2}", ("price", "m", None)),
        ("deployments", "workers: [{name: localhost, labels: {zone: a}}]\ndeployments",
         ("workers", "workers.localhost.labels", "none -> zone a")),
        ("deployments", "gateway: {limits: {maxConnections: 7}}\ndeployments",
         ("gateway", "gateway.limits.maxConnections", "none -> 7")),
        ("deployments", "gateway: {listen: 127.0.0.1:9}\ndeployments",
         ("gateway", "gateway.listen", "127.0.0.1:8080 -> 127.0.0.1:9; takes effect after a restart")),
        ("deployments", "gateway: {adminKeySha256: " + "a" * 64 + "}\ndeployments",
         ("gateway", "gateway.adminKeySha256", "added")),
        ("deployments", "gateway: {limits: {headerTimeout: 90s}}\ndeployments",
         ("gateway", "gateway.limits.headerTimeout", "10s -> 1m30s")),
    ],
)  # fmt: skip
def test_each_difference_is_told_with_its_why(old: str, new: str, change: tuple[str, str, str | None]) -> None:
    [(what, subject, why)] = differences(BEFORE.replace(old, new))
    assert (what, subject) == change[:2]
    assert why == change[2] or (change[2] is None and "none -> " in why)


TENANTS = """
gateway:
  tenants:
    - {name: alice, costBudget: 100, costPeriod: 1h}
    - {name: bob, requestsPerMinute: 60}
  keys: [{tenant: alice, sha256: DIGEST}]
""".replace("DIGEST", "a" * 64)
PICKER = """
deployments:
  - name: m
    model: m
    endpoints: [{url: "http://127.0.0.1:1"}]
    scheduling:
      config:
        plugins:
          - {type: queue-scorer}
          - {type: prefix-cache-scorer, name: prefix}
        schedulingProfiles:
          - {name: default, plugins: [{pluginRef: queue-scorer, weight: 1}, {pluginRef: prefix, weight: 3}]}
"""


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("costBudget: 100", "costBudget: 200", [("gateway.tenants.alice.costBudget", "100 -> 200")]),
        ("costPeriod: 1h", "costPeriod: 90m", [("gateway.tenants.alice.costPeriod", "1h -> 1h30m")]),
        (", costPeriod: 1h", ", maxPriority: 3", [("gateway.tenants.alice.costPeriod", "1h -> 24h"),
                                                  ("gateway.tenants.alice.maxPriority", "none -> 3")]),
        ("    - {name: bob, requestsPerMinute: 60}\n", "",
         [("gateway.tenants.bob", "requestsPerMinute 60, costPeriod 24h -> none")]),
        ("a" * 64, "b" * 64, [("gateway.keys", "1 key of alice added, 1 key of alice removed; 1 in force then")]),
        ("tenant: alice, sha", "tenant: bob, sha",
         [("gateway.keys", "a key of alice changed, now of bob; 1 in force then")]),
        ("keys: [", "keys: [{tenant: bob, sha256: " + "c" * 64 + "}, ",
         [("gateway.keys", "1 key of bob added; 2 in force then")]),
    ],
)  # fmt: skip
def test_changes_of_tenants_and_keys_are_listed_field_by_field(
    old: str, new: str, changes: list[tuple[str, str]]
) -> None:
    found = differences(BEFORE + TENANTS.replace(old, new), BEFORE + TENANTS)
    assert [(subject, why) for _, subject, why in found] == changes
    assert not any(digit * 64 in why for _, _, why in found for digit in "abc")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("prefix, weight: 3", "prefix, weight: 2",
         ["config.schedulingProfiles.default.plugins.prefix.weight 3 -> 2"]),
        ("- {type: queue-scorer}", "- {type: queue-scorer}\n          - {type: kv-cache-utilization-scorer, name: kv}",
         ["config.plugins.kv none -> type kv-cache-utilization-scorer, weight 1"]),
    ],
)  # fmt: skip
def test_changes_of_plugins_are_listed_field_by_field(old: str, new: str, why: list[str]) -> None:
    found = differences(PICKER.replace(old, new), PICKER)
    assert found == [("policy", "m", f"endpoint picker: {one}") for one in why]


@pytest.mark.parametrize("name", ["apiKey", "api_key", "HF_TOKEN", "adminKeySha256", "password", "client-secret"])
def test_values_of_settings_that_may_be_secret_are_not_shown(name: str) -> None:
    assert is_secret(name)
    before, after = ({"env": {name: value, "target": 3}} for value in ("hunter2", "hunter3"))
    found = [*field_changes(before, after), *field_changes({"env": None}, after), *field_changes({}, after)]
    texts = [str(why.as_dict()) for why in found]
    assert texts
    assert not any("hunter" in text for text in texts)


def test_other_values_are_shown() -> None:
    assert not any(is_secret(other) for other in ("tokensPerMinute", "key", "keys", "blockSizeTokens", "target"))


RUNNING = Outlook(running={"m": 8}, wanted={"m": 1})


@pytest.mark.parametrize(
    ("after", "outlook", "dangers"),
    [
        (BEFORE + TENANTS, Outlook(), []),
        (BEFORE, Outlook(), ["removes authentication"]),
        (BEFORE + TENANTS.replace("a" * 64, "b" * 64), Outlook(), []),
        (BEFORE.replace("name: m", "name: n") + TENANTS, Outlook(), ["removes the only deployment, m"]),
        ("deployments: []" + TENANTS, Outlook(), ["removes the only deployment, m"]),
        (BEFORE + TENANTS, RUNNING, ["takes away 7 of 8 instances that run"]),
        (BEFORE + TENANTS, Outlook(running={"m": 2}, wanted={"m": 1}), []),
        (BEFORE + TENANTS, Outlook(running={"m": 9}, wanted={"m": 8}), []),
        (BEFORE + TENANTS, Outlook(running={"m": 3, "n": 1}, wanted={"m": 2, "n": 3}), []),
        (BEFORE + TENANTS, Outlook(running={"m": 1}, wanted={"m": 0}), ["takes away 1 of 1 instance that run"]),
        ("deployments: []", RUNNING, ["removes authentication", "removes the only deployment", "takes away 7 of 8"]),
    ],
)
def test_destructive_changes(after: str, outlook: Outlook, dangers: list[str]) -> None:
    found = changes_between(load_manifest(BEFORE + TENANTS), load_manifest(after), outlook)
    assert len(found.dangers) == len(dangers)
    assert all(danger in str(told) for danger, told in zip(dangers, found.dangers, strict=True))


def test_equal_manifests_differ_in_nothing() -> None:
    assert differences(BEFORE + "\n# a comment\n") == []


def test_deployments_open_and_close() -> None:
    assert differences(BEFORE.replace("name: m", "name: n")) == [
        ("close", "m", 'it was removed from the manifest, and "llama" with it'),
        ("open", "n", 'new: it takes requests for "llama"; fifo decides where they go'),
    ]


APPLICATION = """
kind: Application
name: app
nodes: [{name: a, class: "m.py:A", userConfig: {x: 1}}, {name: b, function: "m.py:b"}]
calls: [{id: one, node: a}, {id: two, node: b, args: [{$step: one}]}]
output: {$step: two}
"""


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("", "", []),
        ("x: 1", "x: 2", [("configure", "app.a")]),
        (", userConfig: {x: 1}", "", [("configure", "app.a")]),
        ("args: [{$step: one}]", "args: [3]", [("calls", "app")]),
        ("class:", "idempotent: true, class:", [("calls", "app")]),
        ("class:", "scheduling: {policy: priority}, class:", [("policy", "app.a")]),
        ("class:", "replicas: 5, class:", []),
        ("name: app", "name: other", [
            ("close", "app"), ("open", "other"), ("close", "app.a"), ("close", "app.b"), ("open", "other.a"),
            ("open", "other.b"),
        ]),
    ],
)  # fmt: skip
def test_what_differs_between_applications(old: str, new: str, changes: list[tuple[str, str]]) -> None:
    assert [
        (what, subject) for what, subject, _ in differences(APPLICATION.replace(old, new, 1), APPLICATION)
    ] == changes


OWN = """
def together(view): return {}
def apart(view, most: int = 2): return {}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with policies for applications."""
    (tmp_path / "own_together.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_together"
    sys.modules.pop("own_together", None)


ASKED_ALONE = [("scaling", f"app.{node}", "its application's policy -> queue-depth") for node in "ab"]


@pytest.mark.parametrize(
    ("scaling", "changes"),
    [
        ("{policy: 'own_together:apart', max: 4}", []),
        ("{policy: 'own_together:together', max: 4}",
         [("scaling", "app", "own_together:apart -> own_together:together")]),
        ("{policy: 'own_together:apart', max: 4, parameters: {most: 5}}",
         [("scaling", "app", "own_together:apart: parameters.most none -> 5")]),
        ("{policy: 'own_together:apart', max: 4, timeLimit: 2s, interval: 90s}",
         [("scaling", name, "interval 1s -> 1m30s, timeLimit 500ms -> 2s") for name in ("app", "app.a", "app.b")]),
        ("{policy: 'own_together:apart', max: 6}",
         [("scaling", "app.a", "max 4 -> 6"), ("scaling", "app.b", "max 4 -> 6")]),
        ("{policy: queue-depth, max: 4}",
         [("scaling", "app", "own_together:apart -> a policy for each node"), *ASKED_ALONE]),
    ],
)  # fmt: skip
def test_another_policy_of_an_application_is_a_change(
    own: str, scaling: str, changes: list[tuple[str, str, str]]
) -> None:
    before = f"{APPLICATION}scaling: {{policy: '{own}:apart', max: 4}}\n"
    assert differences(f"{APPLICATION}scaling: {scaling}\n", before) == changes


ONE = "deployments: [{name: m, model: m, engine: {type: simulated}, scaling: {max: 8}}]"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("", "costPerReplicaHour: 2.5", "costPerReplicaHour none -> 2.5"),
        ("costPerReplicaHour: 1000000", "costPerReplicaHour: 3", "costPerReplicaHour 1000000 -> 3"),
        ("min: 0, idleTimeout: 1h", "min: 3", "min 0 -> 3, idleTimeout 1h -> 5m"),
        ("upDelay: 200ms", "upDelay: 90s", "upDelay 200ms -> 1m30s"),
        ("upDelay: 5s, maxStep: 2", "initial: 2", "initial none -> 2, upDelay 5s -> 0s, maxStep 2 -> none"),
        ("upFactor: 0.5", "turn: 1s", "upFactor 0.5 -> 1, turn 30s -> 1s"),
        ("", "policy: queue-depth", "target-ongoing -> queue-depth"),
        ("", "parameters: {target: 3}", "target-ongoing: parameters.target none -> 3"),
        (
            "",
            "metrics: [{name: a, url: 'http://p', query: up}]",
            "target-ongoing: metrics.a none -> query up, url http://p",
        ),
    ],
)
def test_settings_of_scaling_are_told_as_a_manifest_writes_them(before: str, after: str, why: str) -> None:
    old, new = (ONE.replace("max: 8", f"max: 8, {more}") for more in (before, after))
    assert differences(new, old) == [("scaling", "m", why)]
    without = ONE.replace(", scaling: {max: 8}", "")
    assert differences(ONE, without) == [("scaling", "m", "a fixed number -> target-ongoing")]


def test_at_the_start_everything_is_new_and_steps_are_told() -> None:
    step = ReconcileStep(What.START, "m-1", Reason("replica-count", {"wanted": 1, "present": 0}), "m")
    found = changes_between(None, load_manifest(BEFORE), Outlook([step]))
    assert [change.what for change in found.steps] == ["open", "start"]


def test_a_file_of_endpoints_is_named(tmp_path: Path) -> None:
    found = differences(BEFORE.replace("model: llama", f"model: llama, endpointsFile: {tmp_path}/x.yaml"))
    assert found == [("endpoints", "m", f"none -> {tmp_path}/x.yaml")]


def test_changes_are_a_table_and_false_if_there_are_none() -> None:
    assert not Changes()
    assert str(Changes()) == "no changes"
    shown = str(Changes((Change("start", "m-1", Reason("1 replica is wanted")),)))
    assert shown.splitlines()[-1] == "start  m-1      1 replica is wanted"


def test_there_is_a_column_for_places_if_somebody_has_one() -> None:
    two = Reason("replica-count", {"wanted": 2, "present": 0})
    steps = [
        ReconcileStep(What.START, "m-1", two, "m", where=Reason("place", {"text": "w1: gpu0"})),
        ReconcileStep(What.START, "m-2", two, "m", where=Reason("no-place", {"text": "no place: no room"})),
    ]
    changes = changes_between(None, load_manifest(BEFORE), Outlook(steps))
    head, _, opened, *started = str(changes).splitlines()
    assert head.split() == ["what", "subject", "why", "where"]
    assert opened == 'open   m        new: it takes requests for "llama"; fifo decides where they go'
    assert [line.partition(" there ")[2].strip() for line in started] == [str(step.where) for step in steps]
    [_, placed, refused] = changes.as_dict()["changes"]
    assert (placed["where"], placed["place"]["code"]) == ("w1: gpu0", "place")
    assert (refused["where"], refused["place"]["code"]) == ("no place: no room", "no-place")


# Values that may be secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("serve --api-key X --port 80", "serve --api-key *** --port 80"),
        ("serve --api-key=X", "serve --api-key=***"),
        ("serve --api-key 'X Y' -v", "serve --api-key *** -v"),
        ("HF_TOKEN=X exec serve", "HF_TOKEN=*** exec serve"),
        ("curl -H 'Authorization: Bearer X' host", "curl -H 'Authorization: ***' host"),
        ("curl -H 'x: bearer X'", "curl -H 'x: bearer ***'"),
        ('{"api_key": "X", "n": 1}', '{"api_key": ***, "n": 1}'),
        ("http://user:X@host:80/v1", "http://***@host:80/v1"),
        ("https://X@host/v1", "https://***@host/v1"),
        ("--max-num-batched-tokens 8192 --tokenizer mistral", "--max-num-batched-tokens 8192 --tokenizer mistral"),
        ("a secret of the token budget", "a secret of the token budget"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_secrets_in_a_text(text: str, shown: str) -> None:
    assert text_without_secrets(text) == shown


def test_secrets_among_words() -> None:
    words = ["serve", "--api-key", "X", "--token", "--port", "80", "--password=X", "-secret", "-X", "--max-tokens", "5"]
    shown = ["serve", "--api-key", "***", "--token", "--port", "80", "--password=***", "-secret", "***", "--max-tokens"]
    assert words_without_secrets(words) == [*shown, "5"]


def test_secrets_in_data() -> None:
    data = {
        "env": {"ANY": "X", "EMPTY": ""},
        "labels": {"env": "prod"},
        "extra": {"api_keys": ["X"], "n": 3, "headers": [{"authorization": "X"}]},
        "args": ["--api-key", "X"],
        "password": None,
        "credentials": {"user": "X"},
    }
    assert without_secrets(data) == {
        "env": {"ANY": "***", "EMPTY": ""},
        "labels": {"env": "prod"},
        "extra": {"api_keys": "***", "n": 3, "headers": [{"authorization": "***"}]},
        "args": ["--api-key", "***"],
        "password": None,
        "credentials": "***",
    }
