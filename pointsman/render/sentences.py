"""Sentences for operators: one per code of a `Reason`.

A sentence is a format string over the facts, or a function of them where grammar needs more. A code that is not listed
belongs to a plugin of the user, whose own text is the fact `text`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Sentence: TypeAlias = str | Callable[[Mapping[str, Any]], str]

SENTENCES: Mapping[str, Sentence] = {
    "text": "{text}",
    # routing
    # placement
    # control and scaling
}


def sentence(code: str, facts: Mapping[str, Any]) -> str:
    """The sentence of a reason."""
    template = SENTENCES.get(code)
    if template is None:
        return str(facts.get("text", code))
    return template.format(**facts) if isinstance(template, str) else template(facts)
