"""Numbers of the author's own, as a replica tells them to whoever asks."""

MOST = 100
"""Names that are kept; beyond that, the one that was recorded longest ago goes."""
KIND = "text/plain; version=0.0.4; charset=utf-8"


class CustomMetrics:
    """The last value of each. Any thread may record."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def record(self, name: str, value: float) -> None:
        """It is this from now on."""
        values = {other: known for other, known in self._values.items() if other != name}
        values[name] = value
        if len(values) > MOST:
            del values[next(iter(values))]
        self._values = values  # in one step: others may be reading

    def text(self) -> bytes:
        """As Prometheus reads it."""
        lines = ["# TYPE pointsman_custom_metric gauge"]
        lines += [f'pointsman_custom_metric{{name="{_escaped(name)}"}} {value}' for name, value in self._values.items()]
        return ("\n".join(lines) + "\n").encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
