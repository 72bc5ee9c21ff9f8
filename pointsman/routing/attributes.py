"""One number per endpoint, by name: a column of the fleet, a metric of its engine, or an observed attribute."""

from collections.abc import Sequence
from math import nan
from typing import Any

from pointsman.routing.endpoints import COLUMNS, KV_USAGE, MEASURED_AT, RUNNING, WAITING, Attribute, Endpoint, Metrics
from pointsman.routing.plugins import Endpoints
from pointsman.selection import Column
from pointsman.selection.columns import column_of, filled, placed, take, where_finite

CORE_METRICS = "core-metrics-extractor"
MEASURED = (WAITING, RUNNING, KV_USAGE)
"""Columns that are 0, not nan, for an endpoint that was never measured."""


class AttributeColumn:
    """Reads one number of each endpoint. The value is nan where it is missing or not a number. The age of values is
    ignored.

    Columns and metrics belong to the producer "" or to the producer of the core metrics. Attributes may belong to any
    producer.
    """

    def __init__(self, parameter: str, key: str, producer: str = "") -> None:
        """`parameter` is the name of the parameter that holds the key, for error messages."""
        if not key:
            raise ValueError(f"{parameter} is empty; it must name a metric or an attribute")
        if "/" in key and not producer:
            raise ValueError(f'producer is missing; {parameter} "{key}" has a "/", so it must be named')
        self.key = key
        self.producer = producer
        core = producer in ("", CORE_METRICS)
        self._reported = core and key in Metrics.__struct_fields__
        self._column = key if core and key in COLUMNS and key not in MEASURED else ""
        self._measured = core and key in MEASURED
        self.steady = not self._column
        """Whether the number changes only with measurements."""
        self._attribute: Attribute[Any] = Attribute(key)
        self._stamp = -1
        self._whole: Sequence[Endpoint] = ()
        self._values: Column = []
        """The cached values for these members, as of this measurement."""

    @property
    def is_attribute(self) -> bool:
        """Whether a plugin other than the core metrics must observe the number."""
        return not (self._column or self._measured or self._reported)

    def of(self, candidates: Endpoints) -> Column:
        if self._column:
            return candidates.column(self._column)
        stamp = candidates.stamp
        if stamp is None or candidates.rows is not None:
            return self._read(candidates)
        if stamp[0] != self._stamp or candidates.whole is not self._whole:
            self._values = self._read(candidates)
            self._stamp, self._whole = stamp[0], candidates.whole
        return self._values

    def _read(self, candidates: Endpoints) -> Column:
        if self._measured:
            reported = candidates.column(self.key)
            measured = where_finite(candidates.column(MEASURED_AT))
            return placed(filled(nan, reported), measured, take(reported, measured))
        read = self._of_metrics if self._reported else self._observed
        return column_of([read(endpoint) for endpoint in candidates], candidates.arrays)

    def _of_metrics(self, endpoint: Endpoint) -> float:
        return nan if endpoint.metrics is None else _number(getattr(endpoint.metrics, self.key))

    def _observed(self, endpoint: Endpoint) -> float:
        seen = endpoint.observed(self._attribute)
        return nan if seen is None else _number(seen.value)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else nan
