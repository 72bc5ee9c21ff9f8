"""Pictures of a graph: what is called with what, from the input to the output.

Enters: the name of an application and its graph. Leaves: a standalone SVG, or text for a terminal. The one rule: every
call and every node is in the picture once, and what flows goes one way: to the right, in text downwards.
"""

from pointsman.pipeline.drawing.svg import graph_svg
from pointsman.pipeline.drawing.text import graph_text

__all__ = ["graph_svg", "graph_text"]
