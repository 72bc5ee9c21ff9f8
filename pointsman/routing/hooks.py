"""Hooks of plugins around the choice: admission, headers, notifications. A plugin that raises is only counted."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pointsman.reasons import Reason, reason_of
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import (
    Admitter,
    DepartureListener,
    DispatchListener,
    Endpoints,
    HeaderWriter,
    RequestCycle,
    ResponseHeaderWriter,
)
from pointsman.routing.records import Journal
from pointsman.selection import Producer, SchedulingResult, plugin_name
from pointsman.types import RequestMetadata

T = TypeVar("T")

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class PluginHooks:
    """Admitters, listeners and header writers, by the roles of the plugins."""

    def __init__(self, plugins: Sequence[Any], shedding: Admitter | None, journal: Journal) -> None:
        admitters = [plugin for plugin in plugins if isinstance(plugin, Admitter)]
        self._producers = [plugin for plugin in plugins if admitters and isinstance(plugin, Producer)]
        """Run before the admitters, which may read their facts; `shedding` does not."""
        self._admitters = [*admitters, shedding] if shedding is not None else admitters
        self._listeners = [plugin for plugin in plugins if isinstance(plugin, DispatchListener)]
        self._departures = [plugin for plugin in plugins if isinstance(plugin, DepartureListener)]
        self._writers = [plugin for plugin in plugins if isinstance(plugin, HeaderWriter)]
        self._answer_writers = [plugin for plugin in plugins if isinstance(plugin, ResponseHeaderWriter)]
        self._journal = journal

    @property
    def admits_everybody(self) -> bool:
        """Whether there is no admitter."""
        return not self._admitters

    def denial(self, cycle: RequestCycle, endpoints: Endpoints) -> Reason | None:
        """The reason of the first admitter that denies the request; None if none does."""
        for producer in self._producers:
            self.ask(producer, producer.produce, cycle, endpoints)
        for admitter in self._admitters:
            why = self.ask(admitter, admitter.denial, cycle, endpoints)
            if why is not None:
                return reason_of(plugin_name(admitter), why)
        return None

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> dict[str, str | None]:
        """Notify listeners of a decision; the headers to set on the request."""
        for listener in self._listeners:
            try:
                listener.dispatched(cycle, result)
            except Exception as error:
                self._journal.error(error, type(listener).__name__)
        headers: dict[str, str | None] = {}
        for writer in self._writers:
            headers |= self.ask(writer, writer.request_headers, cycle, result) or {}
        return headers

    def answer_headers(self, request: RequestMetadata, served_by: Endpoint) -> Mapping[str, str]:
        """The headers to set on the answer to the client."""
        if not self._answer_writers:
            return _NO_HEADERS
        headers: dict[str, str] = {}
        for writer in self._answer_writers:
            headers |= self.ask(writer, writer.response_headers, request, served_by) or {}
        return headers

    def departed(self, endpoint: Endpoint) -> None:
        """Notify listeners that an instance has left."""
        for listener in self._departures:
            self.ask(listener, listener.departed, endpoint)

    def ask(self, plugin: object, call: Callable[..., T], *about: Any) -> T | None:
        """The result of a call to a plugin; None if it raises, which the journal counts."""
        try:
            return call(*about)
        except Exception as error:
            self._journal.error(error, type(plugin).__name__)
            return None
