"""The smallest that still shows something: whatever can be left out is left out."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from pointsman.lab.check.situations import Situation, plain

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")


def shrunk(situation: Situation, shows: Callable[[Situation], bool]) -> Situation:
    """Leave out requests, instances and facts one by one, as long as it still shows."""
    return smallest(situation, _smaller, shows)


def smallest(thing: V, smaller: Callable[[V], Iterable[V]], shows: Callable[[V], bool]) -> V:
    """On from the first of the smaller ones that still shows, until none of them does."""
    while (found := next(filter(shows, smaller(thing)), None)) is not None:
        thing = found
    return thing


def _smaller(situation: Situation) -> Iterator[Situation]:
    """Situations with one thing less, the largest steps first."""
    requests, instances, metrics = situation.requests, situation.instances, situation.metrics
    for place in range(len(requests)):
        yield msgspec.structs.replace(situation, requests=_without(requests, place))
    for place in range(len(instances)):
        left = _without(instances, place)
        yield msgspec.structs.replace(situation, instances=left, metrics=_without(metrics, place))
    for place, request in enumerate(requests):
        for simpler in _simpler(request):
            yield msgspec.structs.replace(situation, requests=_with(requests, place, simpler))
    for place, instance in enumerate(instances):
        for plainer in _simpler(instance):
            yield msgspec.structs.replace(situation, instances=_with(instances, place, plainer))
        if metrics[place] is not None:
            yield msgspec.structs.replace(situation, metrics=_with(metrics, place, None))


def _simpler(thing: T) -> Iterator[T]:
    """The same with one fact less."""
    default = plain(thing)
    for name in thing.__struct_fields__:
        if getattr(thing, name) != getattr(default, name):
            yield msgspec.structs.replace(thing, **{name: getattr(default, name)})


def _without(items: list[V], place: int) -> list[V]:
    return items[:place] + items[place + 1 :]


def _with(items: list[V], place: int, item: V) -> list[V]:
    return [*items[:place], item, *items[place + 1 :]]
