"""Reads samples by name from the text format of Prometheus.

Enters: the text of /metrics. Leaves: the values of the few names that an adapter looks up. The one rule: only those
names are parsed, and lines that cannot be read are skipped.
"""

import re
from collections.abc import Iterator
from math import isfinite

_REST = re.compile(r'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})?[ \t]+(\S+)')
"""The part of a line after the name of a sample: labels and value."""
_LABEL = re.compile(r'([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
MAX_DIGITS = 18
_ESCAPED = re.compile(r"\\(.)")


class Samples:
    """The text of one scrape; samples are looked up by name."""

    def __init__(self, text: str | bytes) -> None:
        readable = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        self._text = "\n" + readable.replace("\r", "")

    @property
    def text(self) -> str:
        return self._text

    def value(self, name: str, **labels: str) -> float | None:
        """The sum over all label sets that have these labels; None if no such label set has a finite value."""
        found = [value for has, value in self._of(name) if not labels or labels.items() <= _labels(has).items()]
        return sum(found) if found else None

    def mean(self, name: str) -> float | None:
        """The average over all label sets; for shares, if one address serves several engines."""
        found = [value for _, value in self._of(name)]
        return sum(found) / len(found) if found else None

    def labels(self, name: str) -> list[dict[str, str]]:
        """The label sets of the samples with this name, in order."""
        return [_labels(has) for has, _ in self._of(name)]

    def labelled(self, name: str, label: str) -> list[tuple[str, float]]:
        """For each sample of this name with the label: (value of the label, value of the sample)."""
        found = [(_labels(has).get(label), value) for has, value in self._of(name)]
        return [(text, value) for text, value in found if text is not None]

    def newest_labels(self, name: str) -> dict[str, str]:
        """The label set with the greatest value, for samples whose value is a time; empty if there are no samples."""
        latest = max(self._of(name), key=lambda sample: sample[1], default=("", 0.0))
        return _labels(latest[0])

    def _of(self, name: str) -> Iterator[tuple[str, float]]:
        """(labels as written, value) of each sample of this name."""
        start = f"\n{name}"
        position = self._text.find(start)
        while position >= 0:
            end = position + len(start)
            sample = _REST.match(self._text, end)
            if sample is not None:
                try:
                    value = float(sample[2])
                except ValueError:
                    pass
                else:
                    if isfinite(value):
                        yield sample[1] or "", value
            position = self._text.find(start, end)


def _labels(written: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(_unescaped, value) for name, value in _LABEL.findall(written)}


def _unescaped(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]


def share(value: float | None) -> float:
    """A gauge, limited to the range from 0 to 1; 0 for None."""
    return min(max(value or 0.0, 0.0), 1.0)


def whole(text: str | None) -> int:
    """The number in a label; 0 for text such as "None", and for a number that is not a valid count."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= MAX_DIGITS else 0
