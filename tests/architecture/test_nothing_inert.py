"""Nothing is inert: every event has an emitter and a handler, and what plugins read of a cycle has a producer.

The tests read the source; nothing is imported.
"""

import ast
from collections.abc import Iterable, Iterator

from tests.architecture.house import SOURCES, nodes_of

BASES = {"DispatcherEvent", "ControllerEvent", "LinkMessage"}
"""Every direct subclass is an event, or a message between processes."""
SAYS = "say"
"""The field with the kind of a message of the supervisor, which is a program of its own and writes JSON."""


def name_of(node: ast.AST) -> str:
    """The last name of `Name`, `module.Name` or `Name[T]`; empty for other expressions."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return name_of(value)
    return ""


def said(node: ast.ClassDef) -> str:
    """The kind of a message of the supervisor; empty if it is none."""
    given = {one.arg: one.value.value for one in node.keywords if isinstance(one.value, ast.Constant)}
    return str(given["tag"]) if given.get("tag_field") == SAYS and "tag" in given else ""


def events(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Name of each event -> the name under which it is emitted."""
    return {
        node.name: said(node) or node.name
        for node in nodes
        if isinstance(node, ast.ClassDef) and (said(node) or any(name_of(base) in BASES for base in node.bases))
    }


def emitted(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that are called, or passed on to be called; and what the supervisor says."""
    for node in nodes:
        match node:
            case ast.Call(func=func, args=args):
                yield name_of(func)
                if name_of(func) not in ("isinstance", "Decoder"):
                    yield from map(name_of, args)
            case ast.Dict(keys=[ast.Constant(value=str(key)), *_], values=[ast.Constant(value=str(kind)), *_]):
                if key == SAYS:
                    yield kind


def handled(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names in `case Name()`, in `isinstance`, among the keys of tables of handlers, and of decoders for one kind."""
    for node in nodes:
        match node:
            case ast.MatchClass(cls=given):
                yield name_of(given)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, given]):
                yield from map(name_of, ast.walk(given))
            case ast.Call(func=ast.Attribute(attr="Decoder"), args=[given]):
                yield name_of(given)
            case ast.Dict(keys=keys):
                yield from (name_of(key) for key in keys if key is not None)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[given]):
                yield name_of(given)


def inert(nodes: list[ast.AST]) -> dict[str, set[str]]:
    """Events without an emitter, and those without a handler."""
    found, told, heard = events(nodes), set(emitted(nodes)), set(handled(nodes))
    return {
        "without an emitter": {name for name, kind in found.items() if kind not in told},
        "without a handler": found.keys() - heard,
    }


def everything() -> list[ast.AST]:
    return [node for source in SOURCES for node in nodes_of(source)]


def test_every_event_has_an_emitter_and_a_handler() -> None:
    nodes = everything()
    assert len(events(nodes)) > 60, "they are found"
    assert inert(nodes) == {"without an emitter": set(), "without a handler": set()}


def test_inert_events_are_found() -> None:
    planted = """
class Told(DispatcherEvent, frozen=True): ...
class Heard(ControllerEvent, frozen=True): ...
class Both(LinkMessage, frozen=True): ...
class Said(msgspec.Struct, frozen=True, tag_field="say", tag="said"): ...
send(Told("a"), Both())
match event:
    case Heard() | Both(): ...
"""
    assert inert(list(ast.walk(ast.parse(planted)))) == {
        "without an emitter": {"Heard", "Said"},
        "without a handler": {"Told", "Said"},
    }


# What plugins read of a cycle


def keys(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of keys of cycles: `NAME = Key(...)`, also as attributes of plugins."""
    found = set()
    for node in nodes:
        match node:
            case ast.Assign(targets=[target], value=ast.Call(func=func)) if name_of(func) == "Key":
                found.add(name_of(target))
            case ast.AnnAssign(target=target, value=ast.Call(func=func)) if name_of(func) == "Key":
                found.add(name_of(target))
    return found


def is_cycle(node: ast.AST) -> bool:
    return name_of(node) in ("cycle", "state")


def reads_and_writes(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Names under which values are read of cycles, and under which they are put there."""
    read, written = set(), set()
    for node in nodes:
        match node:
            case ast.Subscript(value=value, slice=key, ctx=ast.Store()) if is_cycle(value):
                written.add(name_of(key))
            case ast.Subscript(value=value, slice=key, ctx=ast.Load()) if is_cycle(value):
                read.add(name_of(key))
            case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[key, *_]) if is_cycle(value):
                read.add(name_of(key))
    return read, written


def without_producer(nodes: list[ast.AST]) -> set[str]:
    read, written = reads_and_writes(nodes)
    return (read & keys(nodes)) - written


def test_what_plugins_read_of_a_cycle_has_a_producer() -> None:
    nodes = everything()
    read, written = reads_and_writes(nodes)
    assert len(read & keys(nodes)) >= 8, "they are found"
    assert without_producer(nodes) == set()
    assert (written & keys(nodes)) - read == set(), "what is put there is read"


def test_a_read_without_a_producer_is_found() -> None:
    planted = """
MATCH = Key("match")
GUESS: Key[float] = Key("guess")
def scores(cycle):
    cycle[MATCH] = 1
    return cycle.get(MATCH), cycle.get(GUESS), cycle.state["other"]
"""
    assert without_producer(list(ast.walk(ast.parse(planted)))) == {"GUESS"}


# What plugins read of an endpoint. Attributes that a manifest names are checked when it is read: see config/effects.py.


def fields_of_metrics(nodes: Iterable[ast.AST]) -> list[str]:
    [found] = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "Metrics"]
    return [name_of(member.target) for member in found.body if isinstance(member, ast.AnnAssign)]


def reported(nodes: Iterable[ast.AST], fields: list[str]) -> set[str]:
    """The fields that adapters of engines fill in."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and name_of(node.func) == "Metrics":
            found.update(fields[: len(node.args)], (str(keyword.arg) for keyword in node.keywords))
    return found


def attributes_read(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def in_rooms(*rooms: str) -> list[ast.AST]:
    return [node for source in SOURCES if set(rooms) & set(source.parts) for node in nodes_of(source)]


def test_what_plugins_read_of_an_engine_is_reported_by_an_adapter() -> None:
    deciding = in_rooms("routing", "strategies")
    fields = fields_of_metrics(deciding)
    read = attributes_read(deciding) & set(fields)
    assert len(read) >= 5, "they are found"
    assert read - reported(in_rooms("engines"), fields) == set()


def test_a_field_that_no_adapter_reports_is_found() -> None:
    planted = list(
        ast.walk(
            ast.parse("""
class Metrics(Struct):
    waiting: float = 0.0
    temperature: float = 0.0
def adapter(): return Metrics(1.0)
def scores(metrics): return metrics.waiting + metrics.temperature
""")
        )
    )
    fields = fields_of_metrics(planted)
    assert attributes_read(planted) & set(fields) - reported(planted, fields) == {"temperature"}
