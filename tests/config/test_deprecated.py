"""Older forms of published documents load as those of today, with a warning that names the new form."""

from typing import Any

import pytest

from pointsman.config import PickerPlan, load_picker
from pointsman.config.deprecated import RENAMED
from pointsman.config.registry import plugins
from pointsman.errors import ConfigError
from pointsman.routing.handlers import AlwaysDisaggPdDecider, DisaggProfileHandler, PrefixBasedPdDecider
from pointsman.routing.producers import ApproxPrefixCacheProducer
from pointsman.routing.scorers import PrefixCacheScorer
from pointsman.routing.sessions import SessionAffinity

STAGES = """\
- type: prefill-filter
- type: decode-filter
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}]}
"""


def messages(plan: PickerPlan) -> dict[str, str]:
    return {warning.field: warning.message for warning in plan.warnings}


@pytest.mark.parametrize(
    ("parameters", "geometry"),
    [
        ("{blockSize: 128}", {"block_size": 128}),
        ("{blockSizeTokens: 96}", {"block_size": 96}),
        ("{hashBlockSize: 300}", {"block_size": 75}),
        ("{hashBlockSize: 5}", {"block_size": 2}),
        ("{lruCapacityPerServer: 7}", {"capacity": 7}),
        ("{maxPrefixBlocksToMatch: 9}", {"max_blocks": 9}),
    ],
)
def test_what_the_prefix_scorer_said_about_blocks(parameters: str, geometry: dict[str, Any]) -> None:
    plan = load_picker(f"plugins:\n- type: prefix-cache-scorer\n  parameters: {parameters}\n")
    producer = plan.plugins["approx-prefix-cache-producer"]
    assert isinstance(producer, ApproxPrefixCacheProducer)
    assert {name: getattr(producer.geometry, name) for name in geometry} == geometry
    [(field, message)] = messages(plan).items()
    assert field.startswith("plugins[0].parameters.")
    assert message.startswith("is deprecated; declare approx-prefix-cache-producer with ")


def test_a_declared_producer_counts_more_than_the_scorer() -> None:
    producer = "- type: approx-prefix-cache-producer\n  parameters: {lruCapacityPerServer: 3}\n"
    plan = load_picker(
        f"plugins:\n- {{type: prefix-cache-scorer, parameters: {{lruCapacityPerServer: 7}}}}\n{producer}"
    )
    assert plan.plugins["approx-prefix-cache-producer"].geometry.capacity == 3
    [message] = messages(plan).values()
    assert message == "has no effect: set it on approx-prefix-cache-producer, which is declared too"


@pytest.mark.parametrize(
    ("parameters", "decider", "tokens"),
    [
        ("{}", AlwaysDisaggPdDecider, None),
        ("{threshold: 0}", AlwaysDisaggPdDecider, None),
        ("{threshold: 10, hashBlockSize: 5}", PrefixBasedPdDecider, 3),
    ],
)
def test_pd_profile_handler(parameters: str, decider: type, tokens: int | None) -> None:
    plan = load_picker(f"plugins:\n- type: pd-profile-handler\n  parameters: {parameters}\n{STAGES}")
    handler = plan.plugins["pd-profile-handler"]
    assert isinstance(handler, DisaggProfileHandler)
    assert type(handler.deciders.prefill) is decider
    assert getattr(handler.deciders.prefill, "non_cached", None) == tokens
    assert messages(plan)["plugins[0].type"] == '"pd-profile-handler" is deprecated; use "disagg-profile-handler"'


def test_pd_profile_handler_with_a_decider_of_the_document() -> None:
    decider = "- type: prefix-based-pd-decider\n  parameters: {nonCachedTokens: 16}\n"
    plan = load_picker(f"plugins:\n- type: pd-profile-handler\n{decider}{STAGES}")
    assert plan.plugins["pd-profile-handler"].deciders.prefill is plan.plugins["prefix-based-pd-decider"]


def test_flat_parameters_of_disagg_profile_handler() -> None:
    flat = "{decodeProfile: d, prefillProfile: p, encodeProfile: e, deciderPluginName: always-disagg-pd-decider}"
    plan = load_picker(f"""\
plugins:
- {{type: disagg-profile-handler, parameters: {flat}}}
- type: always-disagg-pd-decider
schedulingProfiles: [{{name: p}}, {{name: d}}]
""")
    handler = plan.plugins["disagg-profile-handler"]
    assert (handler.profiles.decode, handler.profiles.prefill, handler.profiles.encode) == ("d", "p", "e")
    assert handler.deciders.prefill is plan.plugins["always-disagg-pd-decider"]
    assert messages(plan)["plugins[0].parameters.deciderPluginName"] == "is deprecated; write deciders.prefill"


def test_the_old_and_the_new_form_together_are_a_problem() -> None:
    both = "{decodeProfile: d, profiles: {decode: e}}"
    with pytest.raises(ConfigError, match=r"is the old name of profiles\.decode, which is given too"):
        load_picker(f"plugins:\n- {{type: disagg-profile-handler, parameters: {both}}}\n")


@pytest.mark.parametrize(
    ("plugin", "field"),
    [
        ("{type: no-hit-lru-scorer, parameters: {prefixPluginType: prefix-cache-scorer}}", "prefixPluginType"),
        ("{type: no-hit-lru-scorer, parameters: {prefixPluginName: prefix-cache-scorer}}", "prefixPluginName"),
        ("{type: active-request-scorer, parameters: {requestTimeout: 20m}}", "requestTimeout"),
    ],
)
def test_parameters_that_have_no_effect_any_more(plugin: str, field: str) -> None:
    found = messages(load_picker(f"plugins:\n- {plugin}\n"))
    assert found[f"plugins[0].parameters.{field}"].startswith("has no effect: ")


def test_the_header_of_a_session_and_the_weight_of_a_length() -> None:
    plan = load_picker("""\
plugins:
- {type: session-affinity-filter, parameters: {headerName: X-Mine}}
- {type: prefix-cache-scorer, parameters: {prefixLengthWeight: 0.5, maxModelLen: 100}}
""")
    session, scorer = plan.plugins["session-affinity-filter"], plan.plugins["prefix-cache-scorer"]
    assert isinstance(session, SessionAffinity)
    assert session.header == "x-mine"
    assert isinstance(scorer, PrefixCacheScorer)
    assert (scorer.weight, scorer.scale) == (0.5, 100)


@pytest.mark.parametrize("old", [name for name in RENAMED if name != "pd-profile-handler"])
def test_renamed_types_keep_the_name_that_references_use(old: str) -> None:
    profile = f"schedulingProfiles:\n- {{name: p, plugins: [{{pluginRef: {old}}}]}}\n"
    plan = load_picker(f"plugins:\n- type: {old}\n{profile}")
    [kind] = [kind for kind in plugins() if kind.name == RENAMED[old]]
    assert type(plan.plugins[old]) is kind.build
    assert messages(plan)["plugins[0].type"] == f'"{old}" is deprecated; use "{RENAMED[old]}"'


def test_retired_gates() -> None:
    found = messages(load_picker("featureGates: [prepareDataPlugins]\n"))
    assert found == {"featureGates[0]": "has no effect: what it gates is always on"}


def test_the_producer_of_an_attribute_was_once_part_of_its_key() -> None:
    algorithm = "algorithm: {type: range, range: {min: 0, max: 1}}"
    document = f"""\
plugins:
- type: endpoint-attribute-filter
  parameters: {{attribute: heat/sensor, {algorithm}}}
- {{type: dcgm-extractor, name: sensor}}
"""
    plan = load_picker(document)
    read = plan.plugins["endpoint-attribute-filter"].attribute
    assert (read.key, read.producer) == ("heat", "sensor")
    written = "plugins[0].parameters.attribute"
    assert messages(plan)[written] == "is deprecated; write heat, and producer: sensor"
    with pytest.raises(ConfigError, match='producer is missing; attribute "heat/nowhere"'):
        load_picker(document.replace("heat/sensor", "heat/nowhere"))


def test_the_size_of_a_cache_of_embeddings() -> None:
    plan = load_picker("plugins:\n- {type: mm-embeddings-cache-producer, parameters: {cacheSizeInMB: 8}}\n")
    assert plan.plugins["mm-embeddings-cache-producer"]._capacity == 4
    assert "cacheSizeInMBPerServer" in messages(plan)["plugins[0].parameters.cacheSizeInMB"]
