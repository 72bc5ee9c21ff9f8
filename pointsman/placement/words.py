"""Sizes as people read them."""

GIB = 1 << 30


def gib(size: float) -> str:
    """41.2 GiB; small ones in MiB."""
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB / 2 else f"{size / (1 << 20):.0f} MiB"
