"""Why something was decided, as data. Sentences are rendered from it at the edge and never read back."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.render.sentences import sentence


class Reason(msgspec.Struct, frozen=True):
    """A stable code, and the facts that the decision rested on. `str()` renders the sentence for operators."""

    code: str
    facts: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return sentence(self.code, self.facts)

    def as_dict(self) -> dict[str, Any]:
        """As JSON carries it: code and facts for programs, text for people."""
        return {"code": self.code, "facts": dict(self.facts), "text": str(self)}
