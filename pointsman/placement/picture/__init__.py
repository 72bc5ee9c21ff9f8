"""Pictures of a fleet: who has how much of which GPU, and what is free.

Enters: a fleet, and a place to point out. Leaves: text for a terminal, or a standalone SVG. The one rule: every byte of
a bar is somebody's, or free; what does not fit into the picture is summed up and said.
"""

from pointsman.placement.picture.svg import fleet_svg
from pointsman.placement.picture.text import fleet_text

__all__ = ["fleet_text", "fleet_svg"]
