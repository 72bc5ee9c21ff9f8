"""What numbers may be as parameters: as types, by which configuration names all that are wrong, each at its line; and
as a check, for policies that are made in Python."""

from typing import Annotated

from msgspec import Meta

from pointsman.parameters import Duration

Above0 = Annotated[float, Meta(gt=0)]
Above1 = Annotated[float, Meta(gt=1)]
AtLeast1 = Annotated[float, Meta(ge=1)]
Between0And1 = Annotated[float, Meta(gt=0, lt=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Time = Annotated[Duration, Meta(gt=0)]
Wait = Annotated[Duration, Meta(ge=0)]


def checked(name: str, value: float | None, above: float = 0.0) -> None:
    """A parameter that must be above this, if it is given."""
    if value is not None and not value > above:
        raise ValueError(f"{name} must be above {above:g}, found {value:g}")
