"""Older forms of the published picker's plugins -> today's forms, with a warning that names the new form.

Enters: entries of `plugins`. Leaves: entries with types that the registry has, and their paths. One old entry may
become several. The one rule: an entry keeps the name that references use.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from pointsman.config.problems import FieldPath, Problems
from pointsman.config.schema import PluginSpec
from pointsman.config.validation import INVALID, usable

Entry = tuple[PluginSpec, FieldPath]

RENAMED: dict[str, str] = {
    "by-label-selector": "label-selector-filter",
    "kv-cache-scorer": "kv-cache-utilization-scorer",
    "pd-profile-handler": "disagg-profile-handler",
    "data-parallel-profile-handler": "single-profile-handler",
    "precise-prefix-cache-scorer": "prefix-cache-scorer",
}
"""Old names of types, each with its present name."""

_STAGES = {
    "decodeProfile": "profiles.decode",
    "prefillProfile": "profiles.prefill",
    "encodeProfile": "profiles.encode",
    "deciderPluginName": "deciders.prefill",
    "pdDeciderPluginName": "deciders.prefill",
    "prefillDeciderPluginName": "deciders.prefill",
    "encodeDeciderPluginName": "deciders.encode",
}
_SESSION = {"headerName": "encodedEndpointHeaderConfig.header"}

MOVED: dict[str, dict[str, str]] = {
    "disagg-profile-handler": _STAGES,
    "session-affinity-filter": _SESSION,
    "session-affinity-scorer": _SESSION,
    "prefix-cache-scorer": {"prefixLengthWeight": "matchLengthWeight", "maxModelLen": "matchLengthScaleTokens"},
    "mm-embeddings-cache-producer": {"cacheSizeInMB": "cacheSizeInMBPerServer"},
}
"""Old names of parameters, by type, each with its present name."""

_NEVER_USED = "it never had one; matches come from the prefix cache producer"
_DIRECT = "requests go straight to the port of the chosen instance"
DROPPED: dict[str, dict[str, str]] = {
    "no-hit-lru-scorer": {"prefixPluginType": _NEVER_USED, "prefixPluginName": _NEVER_USED},
    "approx-prefix-cache-producer": {"prefixHashSource": "prompts are hashed here"},
    "active-request-scorer": {"requestTimeout": "requests in flight are counted by inflight-load-producer"},
    "disagg-profile-handler": {
        "prefixPluginType": _NEVER_USED,
        "prefixPluginName": _NEVER_USED,
        "hashBlockSize": "block sizes belong to approx-prefix-cache-producer",
        "primaryPort": _DIRECT,
    },
    "single-profile-handler": {"primaryPort": _DIRECT},
}
"""Old parameters that have no effect, by type, each with the reason."""

_PRODUCER = "approx-prefix-cache-producer"
_OF_PRODUCER = frozenset(
    {
        "autoTune", "blockSize", "blockSizeTokens", "hashBlockSize", "lruCapacityPerServer", "maxPrefixBlocksToMatch",
        "maxPrefixTokensToMatch",
    }
)  # fmt: skip
"""Parameters of the prefix cache producer that once belonged to the scorer."""
CHARACTERS_PER_TOKEN = 4
RETIRED_GATES = frozenset({"prepareDataPlugins", "dataLayer"})
"""Feature gates that no longer matter: their features are always on now."""


def modernized(specs: Iterable[PluginSpec], problems: Problems, path: FieldPath) -> list[Entry]:
    """The entries of a list of plugins in their present forms, each with its path."""
    entries = [(one, (*path, index)) for index, one in usable(list(specs))]
    modernizer = Modernizer(problems, [one for one, _ in entries])
    return [made for entry in entries for made in modernizer.of(*entry)]


class Modernizer:
    """Rewrites one entry at a time. `declared` holds all entries as they are written."""

    def __init__(self, problems: Problems, declared: list[PluginSpec]) -> None:
        self._problems = problems
        self._types = {one.type for one in declared}
        self._names = {one.name or one.type for one in declared}
        self._special: dict[str, Callable[[PluginSpec, FieldPath], Iterator[PluginSpec]]] = {
            "pd-profile-handler": self._pd_handler,
            "prefix-cache-scorer": self._prefix_scorer,
            "precise-prefix-cache-scorer": self._precise_scorer,
            "endpoint-attribute-scorer": self._attribute,
            "endpoint-attribute-filter": self._attribute,
        }

    def of(self, spec: PluginSpec, path: FieldPath) -> Iterator[Entry]:
        special = self._special.get(spec.type) if spec.parameters is not INVALID else None
        for one in special(spec, path) if special is not None else (spec,):
            yield self._plain(self._renamed(one, path), path), path

    def _renamed(self, spec: PluginSpec, path: FieldPath) -> PluginSpec:
        new = RENAMED.get(spec.type)
        if new is None:
            return spec
        self._problems.warn((*path, "type"), f'"{spec.type}" is deprecated; use "{new}"')
        return msgspec.structs.replace(spec, type=new, name=spec.name or spec.type)

    def _plain(self, spec: PluginSpec, path: FieldPath) -> PluginSpec:
        """The entry with the present names of its parameters. Parameters that have no effect are left out."""
        if spec.parameters is INVALID:
            return spec
        moved, dropped = MOVED.get(spec.type, {}), DROPPED.get(spec.type, {})
        parameters: dict[str, Any] = {}
        for name, value in spec.parameters.items():
            field = (*path, "parameters", name)
            if name in moved:
                self._problems.warn(field, f"is deprecated; write {moved[name]}")
                if not _put(parameters, moved[name].split("."), value, spec.parameters):
                    self._problems.add(field, f"is the old name of {moved[name]}, which is given too; keep that one")
            elif name in dropped:
                self._problems.warn(field, f"has no effect: {dropped[name]}")
            elif name not in parameters:
                parameters[name] = value
        return msgspec.structs.replace(spec, parameters=parameters)

    def _pd_handler(self, spec: PluginSpec, path: FieldPath) -> Iterator[PluginSpec]:
        """The old prefill/decode handler. Its threshold was in characters, and 0 meant "always prefill elsewhere"."""
        parameters = dict(spec.parameters)
        threshold = parameters.pop("threshold", 0)
        if "deciderPluginName" not in parameters:
            wanted = "prefix-based-pd-decider" if threshold else "always-disagg-pd-decider"
            decider = "prefix-based-pd-decider" if "prefix-based-pd-decider" in self._names else wanted
            parameters["deciderPluginName"] = decider
            if decider not in self._names:
                tokens = -(-threshold // CHARACTERS_PER_TOKEN) if isinstance(threshold, int) else threshold
                yield PluginSpec(type=wanted, parameters={"nonCachedTokens": tokens} if threshold else {})
        if "threshold" in spec.parameters:
            message = (
                "is deprecated; declare a prefix-based-pd-decider with nonCachedTokens, or always-disagg-pd-decider"
            )
            self._problems.warn((*path, "parameters", "threshold"), message)
        yield msgspec.structs.replace(spec, parameters=parameters)

    def _prefix_scorer(self, spec: PluginSpec, path: FieldPath) -> Iterator[PluginSpec]:
        """The prefix scorer. Its old parameters for blocks move to the producer of prefix matches."""
        old = {name: value for name, value in spec.parameters.items() if name in _OF_PRODUCER}
        for name in old:
            field = (*path, "parameters", name)
            if _PRODUCER in self._types:
                self._problems.warn(field, f"has no effect: set it on {_PRODUCER}, which is declared too")
            else:
                new = "blockSizeTokens (a quarter of it)" if name == "hashBlockSize" else name
                self._problems.warn(field, f"is deprecated; declare {_PRODUCER} with {new}")
        if old and _PRODUCER not in self._types:
            self._types.add(_PRODUCER)
            yield PluginSpec(type=_PRODUCER, parameters=_of_producer(old))
        rest = {name: value for name, value in spec.parameters.items() if name not in old}
        yield msgspec.structs.replace(spec, parameters=rest)

    def _attribute(self, spec: PluginSpec, path: FieldPath) -> Iterator[PluginSpec]:
        """An attribute plugin. Its key once had the form NAME/PRODUCER."""
        field = "attributeKey" if spec.type == "endpoint-attribute-scorer" else "attribute"
        key = spec.parameters.get(field)
        name, slash, producer = key.rpartition("/") if isinstance(key, str) else ("", "", "")
        if not slash or "producer" in spec.parameters or producer not in self._names:
            yield spec
            return
        self._problems.warn((*path, "parameters", field), f"is deprecated; write {name}, and producer: {producer}")
        yield msgspec.structs.replace(spec, parameters={**spec.parameters, field: name, "producer": producer})

    def _precise_scorer(self, spec: PluginSpec, path: FieldPath) -> Iterator[PluginSpec]:
        if spec.parameters:
            message = f"these have no effect: no events of engines are read, and matches come from {_PRODUCER}"
            self._problems.warn((*path, "parameters"), message)
        yield msgspec.structs.replace(spec, parameters={})


def _put(parameters: dict[str, Any], steps: list[str], value: Any, written: Mapping[str, Any]) -> bool:
    """Set a nested parameter. Returns False if the document already has this parameter in its new form."""
    *outer, last = steps
    for step in outer:
        given = parameters.get(step, written.get(step))
        parameters[step] = dict(given) if isinstance(given, dict) else {}
        parameters = parameters[step]
        written = {}
    if last in parameters or last in written:
        return False
    parameters[last] = value
    return True


def _of_producer(old: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(old)
    characters = parameters.pop("hashBlockSize", None)
    if isinstance(characters, int):
        parameters.setdefault("blockSizeTokens", max(1, -(-characters // CHARACTERS_PER_TOKEN)))
    return parameters
