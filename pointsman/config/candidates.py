"""Candidates of `scheduling.shadow` (files, names of policies, or sections) as plans, and putting one in force.

Enters: the list as written. Leaves: a plan per candidate, and the text of a manifest in which a candidate has taken the
place of the policy in force. The one rule: the rest of a manifest stays as it was written, comments included.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pointsman.config.code import code_in
from pointsman.config.picker import picker_plan
from pointsman.config.plan import CandidatePlan
from pointsman.config.problems import FieldPath, Names, Problem, Problems
from pointsman.config.schema import CandidateSpec, InlinePicker
from pointsman.config.validation import INVALID, Validator, usable
from pointsman.config.yaml import PICKER_FIELDS, read_yaml, text_of
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.parameters import quoted
from pointsman.selection.plugins import kebab_case

FILES = (".yaml", ".yml", ".json")
"""Endings of file names; any other text is the name of a policy."""


def read_candidate(written: "CandidateSpec | str", problems: Problems, path: FieldPath, folder: Path) -> Any:
    """A candidate as a section; INVALID after reporting what is wrong. If the candidate is a file, that file holds an
    `EndpointPickerConfig` or the fields of a section."""
    if isinstance(written, CandidateSpec):
        return written
    if not written.endswith(FILES):
        return CandidateSpec(name=_name_of(written), policy=written)
    file = folder / written
    if problems.was_in_force and not file.is_file():
        problems.warn(path, f"file {file} no longer exists: this candidate does not run")
        return INVALID
    try:
        data, inner = read_yaml(text_of(file), str(file))
    except ConfigError as error:
        problems.take(problem for problem in error.problems if isinstance(problem, Problem))
        return INVALID
    kind = data.get("kind") if isinstance(data, dict) else None
    is_picker = isinstance(data, dict) and (kind == "EndpointPickerConfig" or bool(PICKER_FIELDS & data.keys()))
    name = Path(written).stem
    if is_picker:
        body = Validator(inner).value(data, InlinePicker, ())
        made = INVALID if body is INVALID else CandidateSpec(name=name, config=body)
    else:
        found = Validator(inner).value({} if data is None else data, CandidateSpec, ())
        made = found if found is INVALID or found.name else msgspec.structs.replace(found, name=name)
    if len(inner):
        problems.take(inner)
        return INVALID
    return made


def _name_of(policy: str) -> str:
    return kebab_case(policy.rpartition(":")[2]).removesuffix("-policy") if ":" in policy else policy


def candidate_plans(
    written: Sequence["CandidateSpec | str"],
    problems: Problems,
    path: FieldPath,
    folder: Path,
    make_policy: Any,
) -> tuple[CandidatePlan, ...]:
    """The plans of one deployment's candidates. `make_policy` builds a policy by its name, or reports what is wrong."""
    names, made = Names("candidate", problems), []
    for index, one in usable(written):
        where = (*path, index)
        spec = read_candidate(one, problems, where, folder)
        if spec is INVALID or INVALID in (spec.policy, spec.config, spec.parameters, spec.name):
            continue
        if bool(spec.policy) == (spec.config is not None):
            problems.add(where, "needs a policy or a config, and not both")
            continue
        name = spec.name or _name_of(spec.policy)
        if not name:
            problems.add(where, "needs a name: promote and shadow refer to it")
            continue
        names.take(name, where)
        policy = picker = None
        if spec.policy:
            policy = make_policy(spec.policy, spec.parameters, problems, where)
        else:
            if spec.parameters:
                problems.add((*where, "parameters"), "belong to a policy; name one, such as policy: slo-aware")
            picker = picker_plan(spec.config, problems, (*where, "config"), queues=True)
        section = msgspec.to_builtins(msgspec.structs.replace(spec, name=""))
        section = {field: value for field, value in section.items() if value not in ("", {}, None)}
        code = code_in(section)
        made.append(
            CandidatePlan(
                name=name,
                policy=policy,
                picker=picker,
                section=_bare(section),
                code=" ".join(sorted(set(code.values()))),
            )
        )
    return () if len(problems) else tuple(made)


def shadow_recipe(candidates: Sequence[CandidatePlan], *settings: float) -> str:
    """The recipe of a deployment's candidates; empty if the deployment has no candidates."""
    each = [one.recipe for one in candidates]
    return msgspec.json.encode([*settings, *each]).decode() if each else ""


def _bare(value: Any) -> Any:
    """A section without absent or empty fields."""
    if isinstance(value, dict):
        return {name: _bare(one) for name, one in value.items() if one is not None and one != [] and one != {}}
    return [_bare(one) for one in value] if isinstance(value, list) else value


# A candidate in force


def with_candidate(text: str, deployment: str, candidate: CandidatePlan, others: Sequence[str]) -> str:
    """The manifest after a candidate has replaced the policy of a deployment. `others` are the remaining candidates."""
    section = _node(text, deployment)
    if section is None:
        raise PointsmanError(
            f'the scheduling of "{deployment}" is written with an anchor or a merge, and cannot be changed from here; '
            "change the manifest by hand and apply it"
        )
    start, end, before = section
    wanted: dict[str, Any] = {**candidate.section}
    for field in ("timeLimit", "shadowBudget"):
        if field in before:
            wanted[field] = before[field]
    left = [one for one in before.get("shadow") or () if _written_name(one) in others]
    if left:
        wanted["shadow"] = left
    inside = text[start:end]
    kept = inside[len(inside.rstrip()) :]  # a block ends where the next one begins
    return text[:start] + msgspec.json.encode(wanted).decode() + kept + text[end:]


def _written_name(one: Any) -> str:
    if isinstance(one, Mapping):
        return str(one.get("name") or _name_of(str(one.get("policy", ""))))
    return Path(one).stem if one.endswith(FILES) else _name_of(one)


def _node(text: str, deployment: str) -> tuple[int, int, dict[str, Any]] | None:
    """Start and end of the value of a deployment's `scheduling` in the text of a manifest, and the value itself."""
    data, _ = read_yaml(text, "the manifest")
    root = yaml.compose(text, yaml.SafeLoader)
    listed = _field(root, "deployments")
    found = [
        (number, one)
        for number, one in enumerate(listed.value if isinstance(listed, yaml.SequenceNode) else ())
        if getattr(_field(one, "name"), "value", None) == deployment
    ]
    if not found:
        raise UnknownName("deployment", deployment, [])
    number, one = found[0]
    value = _field(one, "scheduling")
    section = data["deployments"][number].get("scheduling")
    if not isinstance(value, yaml.MappingNode) or not isinstance(section, dict):
        return None
    start, end = value.start_mark.index, value.end_mark.index
    inside = text[start:end]
    if start < one.start_mark.index or "&" in inside or "<<" in inside or text[:start].rstrip().endswith("*"):
        return None
    comments = [line for line in inside.rstrip().split("\n") if line.lstrip().startswith("#")]
    if comments and inside.rstrip().endswith(comments[-1]):  # comments before the next block belong to that block
        end = start + inside.rstrip().rindex(comments[-1])
        while (lines := text[start:end].rstrip().split("\n")) and lines[-1].lstrip().startswith("#"):
            end = start + text[start:end].rstrip().rindex(lines[-1])
    return start, end, section


def _field(node: Any, name: str) -> Any:
    """The YAML node of a field; None if the field is absent."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for key, value in node.value if getattr(key, "value", None) == name), None)


def wrong_candidate(name: str, known: Sequence[str], deployment: str) -> PointsmanError:
    if known:
        return UnknownName("candidate", name, known)
    return PointsmanError(
        f"{quoted(deployment)} has no candidates; list some under its scheduling.shadow, such as shadow: [{name}]"
    )
