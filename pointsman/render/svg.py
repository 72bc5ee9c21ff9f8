"""Writes SVG, one element after the other."""

import re
from colorsys import hls_to_rgb
from html import escape

from pointsman.render.text import cut

PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6", "#5b5bd6",
)  # fmt: skip
GOLDEN = 0.618034
"""The golden ratio. Steps of this size around the colour wheel give colours that differ clearly."""

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def colour(index: int) -> str:
    if index < len(PALETTE):
        return PALETTE[index]
    red, green, blue = hls_to_rgb(index * GOLDEN % 1, 0.55, 0.45)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def ink(paper: str) -> str:
    """Black or white, whichever is easier to read on a background colour."""
    red, green, blue = (int(paper[start : start + 2], 16) for start in (1, 3, 5))
    return "#1f2430" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "#ffffff"


def xml(text: str) -> str:
    return escape(_NOT_IN_XML.sub("\ufffd", text), quote=True)


class Canvas:
    def __init__(self) -> None:
        self._elements: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, radius: float = 0, **more: str
    ) -> None:
        round_ = f' rx="{number(radius)}"' if radius else ""
        self._elements.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{round_} '
            f'fill="{fill}"{_attributes(more)}/>'
        )

    def line(self, points: list[tuple[float, float]], **more: str) -> None:
        way = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._elements.append(f'<polyline points="{way}" fill="none"{_attributes(more)}/>')

    def path(self, way: str, **more: str) -> None:
        self._elements.append(f'<path d="{way}"{_attributes({"fill": "none"} | more)}/>')

    def text(self, x: float, y: float, words: str, kind: str, **more: str) -> None:
        """Write words at a position. `kind` is a class of the style sheet."""
        start = f'<text x="{number(x)}" y="{number(y)}" class="{kind}"{_attributes(more)}>'
        self._elements.append(f"{start}{xml(words)}</text>")

    def open(self, tip: str = "", **more: str) -> None:
        """Begin a group of elements, with a tooltip if `tip` is given."""
        self._elements.append(f"<g{_attributes(more)}>" + (f"<title>{xml(tip)}</title>" if tip else ""))

    def close(self) -> None:
        self._elements.append("</g>")

    def document(self, width: float, height: float, title: str, head: str) -> str:
        size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{xml(title)}</title>\n{head}\n'
        return start + "\n".join(self._elements) + "\n</svg>\n"


def fitted(words: str, width: float, font_size: float) -> str:
    """The beginning of the text, as far as it fits. Empty if too little fits to be read."""
    return cut(words, int(width / (font_size * 0.6)))


def number(value: float) -> str:
    """The number with one decimal place, or with none if that digit is 0."""
    return f"{value:.1f}".removesuffix(".0")


def _attributes(more: dict[str, str]) -> str:
    return "".join(f' {name.replace("_", "-")}="{xml(value)}"' for name, value in more.items())
