"""Files -> plans.

Enters: a file (`Path`) or text (`str`). Leaves: a plan with everything built, or `ConfigError` with all problems. The
one rule: all or nothing, and no side effects.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config.application import application_plan, load_application, missing_models
from pointsman.config.building import built
from pointsman.config.deployments import Deployments, policy
from pointsman.config.machines import runtime, workers
from pointsman.config.picker import picker_plan
from pointsman.config.plan import ApplicationPlan, DeploymentPlan, PickerPlan, PointsmanPlan
from pointsman.config.problems import FieldPath, Names, Problem, Problems
from pointsman.config.registry import plugins, policies, scaling_policies, unrecognised
from pointsman.config.scaling import policy as scaling_policy
from pointsman.config.schema import (
    EACH_NODE,
    KINDS,
    ApplicationDocument,
    EndpointPickerConfig,
    GatewaySpec,
    KeySpec,
    Pointsman,
    TenantSpec,
)
from pointsman.config.validation import INVALID, Validator, usable
from pointsman.config.yaml import document_of, folder_of, importable
from pointsman.errors import ConfigError, UnknownName, command, did_you_mean
from pointsman.parameters import host_and_port, is_loopback
from pointsman.strategies import SchedulingPolicy

GATEWAY: FieldPath = ("gateway",)
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")


def load(source: Path | str, folder: Path | str | None = None, file: str = "") -> PickerPlan | PointsmanPlan:
    """Load a document of any kind.

    Paths in the document are relative to `folder`. The default is the folder of the file or, for text, the current
    folder. `file` is the name that problems use for text.
    """
    folder = folder_of(source, folder)
    document, problems = document_of(source, KINDS, folder, file)
    plan: PickerPlan | PointsmanPlan | None
    if isinstance(document, EndpointPickerConfig):
        plan = picker_plan(document, problems, ())
    else:
        plan = _plan(document, problems, folder)
    problems.raise_if_any()
    assert plan is not None, "a document without problems has a plan"
    return msgspec.structs.replace(plan, warnings=problems.warnings) if isinstance(plan, PickerPlan) else plan


def load_picker(source: Path | str = "") -> PickerPlan:
    """Load an `EndpointPickerConfig`. An empty document gives the default configuration."""
    document, problems = document_of(source, {"EndpointPickerConfig": EndpointPickerConfig})
    plan = picker_plan(document, problems, ()) if isinstance(document, EndpointPickerConfig) else None
    problems.raise_if_any()
    assert plan is not None, "a document without problems has a plan"
    return msgspec.structs.replace(plan, warnings=problems.warnings)


def load_manifest(
    source: Path | str, folder: Path | str | None = None, file: str = "", *, was_in_force: bool = False
) -> PointsmanPlan:
    """Load a `Pointsman` document, or an `Application` by itself. `folder` and `file` mean the same as in `load`.
    `was_in_force` says that the document was applied before: problems that are not essential are then tolerated."""
    folder = folder_of(source, folder)
    kinds = {name: kind for name, kind in KINDS.items() if kind is not EndpointPickerConfig}
    document, problems = document_of(source, kinds, folder, file, was_in_force=was_in_force, empty=_empty())
    plan = _plan(document, problems, folder)
    problems.raise_if_any()
    return plan


def _empty() -> str:
    what = "the manifest is empty; list what should run under deployments or applications (see examples/)"
    return f"{what}, or stop everything that runs with: {command('down')}"


def build_policy(name: str, parameters: Mapping[str, Any] | None = None) -> SchedulingPolicy:
    """The scheduling policy with this name (fifo, slo-aware, mymodule:MyPolicy). Parameters are as in YAML."""
    problems = Problems("")
    made = policy(name, parameters or {}, problems, ())
    problems.raise_if_any()
    assert made is not None, "a policy without problems has been built"
    return made


def build_named(name: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """The scheduling policy, scaling policy or plugin with this name. Parameters are as in YAML."""
    problems = Problems("")
    if scaling_policies().find(name, problems.apart(), ()) is not None:
        scaling = scaling_policy(name, parameters or {}, problems, ())
        problems.raise_if_any()
        return scaling
    homes = (policies(), plugins())
    registry = next((home for home in homes if home.find(name, problems.apart(), ()) is not None), unrecognised())
    if registry is unrecognised() and ":" not in name:
        raise UnknownName(
            "policy or plugin", name, [kind.name for home in (*homes, scaling_policies()) for kind in home]
        )
    kind = registry.find(name, problems, ())
    made = built(kind, parameters or {}, (), Validator(problems)) if kind is not None else INVALID
    problems.raise_if_any()
    return made


def _plan(document: Any, problems: Problems, folder: Path) -> PointsmanPlan:
    """The plan for a document of one of our own kinds."""
    if isinstance(document, Pointsman):
        with importable(folder):
            return _pointsman_plan(document, problems, folder)
    made = application_plan(document, problems, folder) if isinstance(document, ApplicationDocument) else None
    if made is None:
        return PointsmanPlan()
    return PointsmanPlan(application_alone=True).with_applications([made])


def _pointsman_plan(document: Pointsman, problems: Problems, folder: Path) -> PointsmanPlan:
    deployments = Deployments(problems, folder)
    plans = deployments.plans(document.deployments)
    front = gateway(document.gateway, problems)
    machinery = runtime(document.runtime, problems)
    machines = workers(document.workers, machinery, problems)
    _check_budgets(front, plans, problems)
    own = PointsmanPlan(
        deployments=tuple(plans),
        gateway=front,
        workers=machines,
        runtime=machinery,
        warnings=problems.warnings,
    )
    return _with_applications(own, document.applications, problems)


def _with_applications(plan: PointsmanPlan, files: Sequence[str], problems: Problems) -> PointsmanPlan:
    found: dict[str, ApplicationPlan] = {}
    for index, file in usable(files):
        path = ("applications", index)
        try:
            made = load_application(Path(file))
        except ConfigError as error:
            problems.take(problem for problem in error.problems if isinstance(problem, Problem))
            continue
        if made.name in found:
            problems.add(path, f'there is already an application "{made.name}"')
        if not len(problems):
            for missing in missing_models(made.graph, plan.models()):
                problems.add(path, missing)
        found[made.name] = made
    return plan.with_applications(found.values())


def gateway(spec: GatewaySpec, problems: Problems) -> GatewaySpec:
    """The `gateway` section with its hashes in lower case."""
    if spec is INVALID:
        return GatewaySpec()
    tenants = _check_tenants(spec.tenants, problems)
    _check_keys(spec.keys, tenants, problems)
    if spec.admin_key_sha256:
        _check_hash(spec.admin_key_sha256, problems, (*GATEWAY, "adminKeySha256"))
    _check_listen(spec, "listen", spec.listen, problems)
    if spec.grpc_listen:
        _check_listen(spec, "grpcListen", spec.grpc_listen, problems)
    for index, node in usable(spec.nodes):
        if not node or node in spec.nodes[:index]:
            why = "is there already" if node else "must not be empty"
            problems.add((*GATEWAY, "nodes", index), why)
    if len(problems):
        return spec
    keys = [msgspec.structs.replace(key, sha256=key.sha256.lower()) for key in spec.keys]
    return msgspec.structs.replace(spec, keys=keys, admin_key_sha256=spec.admin_key_sha256.lower())


def _check_listen(spec: GatewaySpec, field: str, listen: str, problems: Problems) -> None:
    if listen is INVALID:
        return
    try:
        host, port = host_and_port(listen)
    except ValueError as error:
        problems.add((*GATEWAY, field), str(error))
        return
    if host == EACH_NODE and not spec.nodes:
        message = f'"{EACH_NODE}" is the address of each node that has a gateway; name them in gateway.nodes'
        problems.add((*GATEWAY, field), message)
        return
    if not port and spec.nodes and spec.processes is not INVALID and spec.processes > 1:
        problems.add((*GATEWAY, field), "the processes of a node share a port, so it must be given")
    if not spec.keys and spec.keys is not INVALID and not is_loopback(host):
        who = "everyone on the network may send requests"
        how = f"make one with: {command('key', '--tenant', 'NAME')}"
        message = f"the gateway listens on {listen} and has no keys: {who}; {how}"
        problems.warn((*GATEWAY, field), message)


def _check_tenants(specs: Sequence[TenantSpec], problems: Problems) -> list[str]:
    names = Names("tenant", problems)
    for index, tenant in usable(specs):
        names.take(tenant.name, (*GATEWAY, "tenants", index))
    return [tenant.name for _, tenant in usable(specs) if tenant.name]


def _check_budgets(spec: GatewaySpec, plans: Sequence[DeploymentPlan], problems: Problems) -> None:
    """Warn about budgets that never run out."""
    prices = [plan.price for plan in plans if plan.price is not None]
    if any(one.per_million_input_tokens or one.per_million_output_tokens for one in prices):
        return
    for index, tenant in usable(spec.tenants):
        if tenant.cost_budget is not None:
            wanted = "set price.perMillionInputTokens or price.perMillionOutputTokens of deployments"
            message = f"never runs out, as no deployment has a price of tokens; {wanted}"
            problems.warn((*GATEWAY, "tenants", index, "costBudget"), message)


def _check_keys(specs: Sequence[KeySpec], tenants: Sequence[str], problems: Problems) -> None:
    lines: dict[str, int] = {}
    for index, key in usable(specs):
        path = (*GATEWAY, "keys", index)
        if key.tenant is not INVALID and key.tenant not in tenants:
            hint = did_you_mean(key.tenant, tenants) if tenants else "; list it under gateway.tenants"
            problems.add((*path, "tenant"), f'there is no tenant "{key.tenant}"{hint}')
        if key.sha256 is INVALID or not _check_hash(key.sha256, problems, (*path, "sha256")):
            continue
        if key.sha256.lower() in lines:
            problems.add((*path, "sha256"), f"this key is on line {lines[key.sha256.lower()]} already")
        lines.setdefault(key.sha256.lower(), problems.line_of((*path, "sha256")))


def _check_hash(text: str, problems: Problems, path: FieldPath) -> bool:
    right = _SHA256.fullmatch(text) is not None
    if not right:
        found = f"{len(text)} characters" if len(text) != 64 else "other characters"
        how = f"make a key and its hash with: {command('key', *(['--admin'] if path[-1] == 'adminKeySha256' else []))}"
        problems.add(path, f"expected the SHA-256 of a key, 64 hex digits, found {found}; {how}")
    return right
