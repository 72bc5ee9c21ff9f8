"""Servers that somebody else started, listed in a document or in a file of their own."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pointsman.config.addresses import base_url
from pointsman.config.manifest import EndpointSpec
from pointsman.config.names import Names
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.registry import PluginType, engines
from pointsman.config.source import text_of
from pointsman.config.validation import INVALID, Validator, usable
from pointsman.config.yaml import read_yaml
from pointsman.control.desired import DesiredEndpoint
from pointsman.engines import Engine

ENDPOINT_NAME = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]{0,127}")
"""As instances are named; [::1]:8080 is one."""


def load_endpoints(file: Path, taken: Iterable[str] = ()) -> tuple[DesiredEndpoint, ...]:
    """The endpoints that a file lists. `taken`: names that others have. Raises `ConfigError` with all problems."""
    data, problems = read_yaml(text_of(file), str(file))
    specs = Validator(problems).value([] if data is None else data, list[EndpointSpec], ())
    endpoints = desired_endpoints(specs or (), problems, (), taken)
    problems.raise_if_any()
    return endpoints


def endpoint_engine(name: str) -> Engine:
    """The adapter of servers that somebody else started, by the name that `engine:` gives."""
    problems = Problems("")
    engine = _adapter(name, problems, ())
    problems.raise_if_any()
    assert engine is not None, "an engine without problems has been made"
    return engine


def desired_endpoints(
    specs: Sequence[EndpointSpec], problems: Problems, path: FieldPath, taken: Iterable[str] = ()
) -> tuple[DesiredEndpoint, ...]:
    """The endpoints of one list, as long as the document has no problem."""
    names = Names("endpoint", problems, taken)
    made = (_endpoint(spec, names, problems, (*path, place)) for place, spec in usable(specs))
    return tuple(endpoint for endpoint in made if endpoint is not None)


def _endpoint(spec: EndpointSpec, names: Names, problems: Problems, path: FieldPath) -> DesiredEndpoint | None:
    url = host_port = ""
    try:
        if spec.url is not INVALID:
            url, host_port = base_url(spec.url)
    except ValueError as error:
        problems.add((*path, "url"), str(error))
    name = spec.name or host_port
    if name:
        names.take(name, path)
        if not ENDPOINT_NAME.fullmatch(name):
            problems.add((*path, "name"), f"expected letters, digits and any of . _ : -, found {name!r}")
    if spec.engine is not INVALID:
        _adapter(spec.engine, problems, (*path, "engine"))
    if len(problems):
        return None
    return DesiredEndpoint(
        name=name, url=url, engine=spec.engine, max_concurrency=spec.max_concurrency, labels=spec.labels
    )


def reads_endpoints(kind: PluginType) -> bool:
    """Whether an engine can read servers that somebody else started."""
    try:
        kind.build.of_endpoint()  # type: ignore[attr-defined]
    except TypeError:  # it needs parameters
        return False
    return True


def _adapter(name: str, problems: Problems, path: FieldPath) -> Engine | None:
    kind = engines().find(name, problems, path)
    if kind is None:
        return None
    try:
        engine: Engine = kind.build.of_endpoint()  # type: ignore[attr-defined]
    except Exception as error:  # somebody's own class, or one that only makes sense with a command of its own
        why = "it cannot be made without parameters; give it an of_endpoint()" if ":" in name else "use openai"
        problems.add(path, f'engine "{name}" cannot read a server that somebody else started ({error}): {why}')
        return None
    return engine
