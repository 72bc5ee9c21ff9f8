"""Everything that is rejected at load, with the line, the field and what to do about it."""

import pytest

from pointsman.config import load_picker
from pointsman.errors import ConfigError


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_picker(text)
    return [str(problem).removeprefix("<text>:") for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # plugins
        ("plugins:\n- name: a\n", '2: plugins[0]: field "type" is missing'),
        ("plugins:\n- type: ''\n", "2: plugins[0].type: must not be empty"),
        (
            "plugins:\n- type: queue-scorrer\n",
            '2: plugins[0].type: there is no plugin type "queue-scorrer"; did you mean "queue-scorer"?',
        ),
        (
            "plugins:\n- type: by-label\n",
            '2: plugins[0].type: there is no plugin type "by-label"; use "label-selector-filter"',
        ),
        (
            "plugins:\n- type: queue-scorer\n- type: queue-scorer\n",
            '3: plugins[1]: there is already a plugin "queue-scorer" on line 2; give each its own name',
        ),
        (
            "plugins:\n- type: queue-scorer\n- type: lora-affinity-scorer\n  name: queue-scorer\n",
            '4: plugins[1].name: there is already a plugin "queue-scorer" on line 2; give each its own name',
        ),
        (
            "plugins:\n- type: load-aware-scorer\n  parameters:\n    threshold: many\n",
            '4: plugins[0].parameters.threshold: expected a whole number, found "many"',
        ),
        (
            "plugins:\n- type: load-aware-scorer\n  parameters: {treshold: 5}\n",
            '3: plugins[0].parameters.treshold: unknown parameter; did you mean "threshold"?',
        ),
        (
            "plugins:\n- type: header-label-affinity-scorer\n  parameters: {headerName: x-zone}\n",
            '3: plugins[0].parameters: parameter "labelKey" is missing',
        ),
        (
            "plugins:\n\n- type: prefix-cache-scorer\n  parameters: {matchLengthWeight: 2}\n",
            "4: plugins[0].parameters.matchLengthWeight: matchLengthWeight is 2; it must be from 0 to 1",
        ),
        (
            "plugins:\n- type: soft-reflective-ceiling-policy\n  parameters: {a: 1}\n",
            "3: plugins[0].parameters.a: unknown parameter; none are known",
        ),
        ("plugins: queue-scorer\n", '1: plugins: expected a list, found "queue-scorer"'),
        ("plugins:\n- queue-scorer\n", '2: plugins[0]: expected a mapping (field: value), found "queue-scorer"'),
        # dependencies
        (
            "plugins:\n- type: disagg-profile-handler\n  parameters:\n    deciders: {prefill: nobody}\n",
            '4: plugins[0].parameters.deciders.prefill: no plugin is named "nobody"; known: disagg-profile-handler',
        ),
        (
            "plugins:\n- type: disagg-profile-handler\n  parameters:\n    deciders:\n      prefill: q\n"
            "- type: queue-scorer\n  name: q\n",
            '5: plugins[0].parameters.deciders.prefill: "q" is not a decider but a scorer',
        ),
        # profiles
        ("schedulingProfiles:\n- plugins: []\n", '2: schedulingProfiles[0]: field "name" is missing'),
        ("schedulingProfiles:\n- name: ''\n", "2: schedulingProfiles[0].name: must not be empty"),
        (
            "plugins:\n- type: header-profile-handler\nschedulingProfiles:\n- name: a\n- name: a\n",
            '5: schedulingProfiles[1].name: there is already a profile "a" on line 4',
        ),
        (
            "plugins:\n- type: queue-scorer\nschedulingProfiles:\n- name: a\n  plugins:\n  - weight: 2\n",
            '6: schedulingProfiles[0].plugins[0]: field "pluginRef" is missing',
        ),
        (
            "plugins:\n- type: queue-scorer\nschedulingProfiles:\n- name: a\n  plugins:\n  - pluginRef: queue-scorr\n",
            "6: schedulingProfiles[0].plugins[0].pluginRef: "
            'no plugin is named "queue-scorr"; did you mean "queue-scorer"?',
        ),
        (
            "plugins:\n- type: max-score-picker\n- type: random-picker\nschedulingProfiles:\n- name: a\n"
            "  plugins:\n  - pluginRef: max-score-picker\n  - pluginRef: random-picker\n",
            "6: schedulingProfiles[0].plugins: a profile has one picker; found 2: max-score-picker, random-picker",
        ),
        (
            "plugins:\n- type: queue-scorer\n  name: max-score-picker\nschedulingProfiles:\n- name: a\n",
            '5: schedulingProfiles[0]: "max-score-picker" is not a picker but a scorer',
        ),
        # handlers
        (
            "plugins:\n- type: single-profile-handler\n- type: header-profile-handler\n",
            "3: plugins[1]: there is more than one profile handler "
            "(single-profile-handler, header-profile-handler); keep one",
        ),
        (
            "schedulingProfiles:\n- name: a\n- name: b\n",
            "1: schedulingProfiles: 2 profiles need a profile handler among the plugins; found none",
        ),
        (
            "plugins:\n- type: single-profile-handler\nschedulingProfiles:\n- name: a\n- name: b\n",
            "2: plugins[0]: a single-profile-handler runs one profile; found 2",
        ),
        # gates
        (
            "featureGates: [flowcontrol]\n",
            '1: featureGates[0]: unknown feature gate "flowcontrol"; did you mean "flowControl"?',
        ),
        (
            "featureGates:\n- flowControl=maybe\n",
            "2: featureGates[0]: expected flowControl, flowControl=true or flowControl=false, "
            'found "flowControl=maybe"',
        ),
        ("featureGates: [true]\n", "1: featureGates[0]: expected text, found true; put it in quotes"),
        # unknown fields, at every level
        ("plugin: []\n", '1: plugin: unknown field; did you mean "plugins"?'),
        (
            "plugins:\n- {type: queue-scorer, xyz: 2}\n",
            "2: plugins[0].xyz: unknown field; known: name, parameters, type, weight",
        ),
        (
            "flowControl:\n  maxRequest: 5\n",
            '2: flowControl.maxRequest: unknown field; did you mean "maxRequests"?',
        ),
        # the detector, also with the gate off
        (
            "flowControl:\n  saturationDetector:\n    pluginRef: nobody\n",
            '3: flowControl.saturationDetector.pluginRef: no plugin is named "nobody"',
        ),
        (
            "plugins:\n- type: queue-scorer\nsaturationDetector:\n  pluginRef: queue-scorer\n",
            '4: saturationDetector.pluginRef: "queue-scorer" is not a saturation detector but a scorer',
        ),
        # flow control
        (
            "featureGates: [flowControl]\nflowControl:\n  priorityBands:\n  - maxRequests: 5\n",
            '4: flowControl.priorityBands[0]: field "priority" is missing',
        ),
        (
            "featureGates: [flowControl]\nflowControl:\n  priorityBands:\n  - priority: 1\n  - priority: 1\n",
            "5: flowControl.priorityBands[1].priority: there is already a band of priority 1",
        ),
        (
            "featureGates: [flowControl]\nflowControl:\n  defaultPriorityBand:\n    fairnessPolicyRef: round-robin\n",
            '4: flowControl.defaultPriorityBand.fairnessPolicyRef: no plugin is named "round-robin"',
        ),
        (
            "featureGates: [flowControl]\nplugins:\n- type: edf-ordering-policy\nflowControl:\n"
            "  usageLimitPolicyPluginRef: edf-ordering-policy\n",
            '5: flowControl.usageLimitPolicyPluginRef: "edf-ordering-policy" is not a usage limit policy '
            "but an ordering policy",
        ),
        (
            "featureGates: [flowControl]\nflowControl:\n  maxBytes: -1\n",
            "3: flowControl.maxBytes: must not be negative",
        ),
        ("flowControl:\n  defaultRequestTTL: soon\n", '2: flowControl.defaultRequestTTL: "soon" is not a duration'),
        ("flowControl:\n  maxBytes: lots\n", '2: flowControl.maxBytes: "lots" is not an amount'),
        # what does nothing here must still be spelled right
        ("parser:\n  pluginRef: opnai-parser\n", '2: parser.pluginRef: no plugin is named "opnai-parser"'),
        ("plugins:\n- type: token-producr\n", '2: plugins[0].type: there is no plugin type "token-producr"'),
        # the document
        (
            "kind: EndpointPickerConfg\n",
            '1: kind: unknown kind "EndpointPickerConfg"; did you mean "EndpointPickerConfig"?',
        ),
        ("apiVersion: llm-d.ai/v2\n", '1: apiVersion: expected "llm-d.ai/v1"'),
        ("- a\n", "1: expected a mapping (field: value), found a list"),
        ("plugins:\n- type: queue-scorer\n  type: lora-affinity-scorer\n", "3: plugins[0].type: is given twice"),
    ],
)
def test_one_mistake_is_one_problem_with_its_line_and_field(text: str, problem: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert found[0].startswith(problem)


def test_plugins_that_need_each_other_are_a_problem(own_module: str) -> None:
    text = (
        f"plugins:\n- type: {own_module}:Pair\n  name: a\n  parameters: {{other: b}}\n"
        f"- type: {own_module}:Pair\n  name: b\n  parameters: {{other: a}}\n"
    )
    assert problems(text) == ["7: plugins[1].parameters.other: these plugins need each other: a -> b -> a"]


BROKEN = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorrer
- type: load-aware-scorer
  parameters:
    threshold: ten
- type: max-score-picker
schedulingProfile:
- name: default
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: load-aware
featureGates: [flowControl=perhaps]
"""


def test_all_problems_of_a_file_come_at_once_in_the_order_of_lines() -> None:
    found = problems(BROKEN)
    assert [int(problem.partition(":")[0]) for problem in found] == [4, 7, 9, 14, 15]


def test_a_plugin_that_cannot_be_built_is_one_problem_however_many_refer_to_it() -> None:
    text = """\
plugins:
- type: disagg-profile-handler
  parameters: {deciders: {prefill: decider}}
- type: prefix-based-pd-decider
  name: decider
  parameters: {nonCachedTokens: -1}
schedulingProfiles:
- name: decode
- name: prefill
"""
    assert problems(text) == ["6: plugins[1].parameters.nonCachedTokens: nonCachedTokens is -1; it must be 0 or more"]


def test_the_problems_of_two_halves_are_those_of_the_whole() -> None:
    one = "plugins:\n- type: nonsense-of-some-kind\n- type: load-aware-scorer\n  parameters: {threshold: x}\n"
    two = "featureGates: [nothing]\nflowControl: {maxBytes: y}\n"
    assert len(problems(one)) + len(problems(two)) == len(problems(one + two)) == 4
