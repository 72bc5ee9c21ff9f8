"""The schema of an input. Apart from the nodes, since pydantic takes long to load."""

from pydantic import BaseModel


class Order(BaseModel):
    name: str
    count: int = 1
