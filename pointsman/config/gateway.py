"""The `gateway` of a document, checked and in one form."""

import re
from collections.abc import Sequence

import msgspec

from pointsman.config.addresses import host_and_port, is_loopback
from pointsman.config.manifest import GatewaySpec, KeySpec, TenantSpec
from pointsman.config.names import Names
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.validation import INVALID, usable
from pointsman.errors import did_you_mean

PATH: FieldPath = ("gateway",)
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")


def gateway(spec: GatewaySpec, problems: Problems) -> tuple[GatewaySpec, list[str]]:
    """The section with its hashes in lower case, and what the author should know. What is wrong has been noted."""
    if spec is INVALID:
        return GatewaySpec(), []
    tenants = _check_tenants(spec.tenants, problems)
    _check_keys(spec.keys, tenants, problems)
    if spec.admin_key_sha256:
        _check_hash(spec.admin_key_sha256, problems, (*PATH, "adminKeySha256"))
    notes = _check_listen(spec, "listen", spec.listen, problems)
    if spec.grpc_listen:
        notes += _check_listen(spec, "grpcListen", spec.grpc_listen, problems)
    if len(problems):
        return spec, notes
    keys = [msgspec.structs.replace(key, sha256=key.sha256.lower()) for key in spec.keys]
    return msgspec.structs.replace(spec, keys=keys, admin_key_sha256=spec.admin_key_sha256.lower()), notes


def _check_listen(spec: GatewaySpec, field: str, listen: str, problems: Problems) -> list[str]:
    if listen is INVALID:
        return []
    try:
        host, _ = host_and_port(listen)
    except ValueError as error:
        problems.add((*PATH, field), str(error))
        return []
    if spec.keys or spec.keys is INVALID or is_loopback(host):
        return []
    who = "everybody on the network may send requests"
    return [f"gateway: it listens on {listen} and has no keys: {who}; pointsman key makes one"]


def _check_tenants(specs: Sequence[TenantSpec], problems: Problems) -> list[str]:
    names = Names("tenant", problems)
    for place, tenant in usable(specs):
        names.take(tenant.name, (*PATH, "tenants", place))
    return [tenant.name for _, tenant in usable(specs) if tenant.name]


def _check_keys(specs: Sequence[KeySpec], tenants: Sequence[str], problems: Problems) -> None:
    lines: dict[str, int] = {}
    for place, key in usable(specs):
        path = (*PATH, "keys", place)
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
        problems.add(path, f"expected the SHA-256 of a key, 64 hex digits, found {found}; pointsman key makes both")
    return right
