"""Commands for the user to paste into a shell, to try a plane that is ready."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from pointsman.errors import command

PROMPT = "Say hello in five words."
MAX_TOKENS = 64
"""Maximum number of tokens in the answer to a suggested request. Small models do not stop by themselves."""
KEY = "POINTSMAN_KEY"
"""The environment variable from which suggested commands take the key of a tenant."""
DEEPEST = 8
"""Maximum depth to which an example fills in a schema."""


def suggestions(status: Mapping[str, Any], inputs: Mapping[str, Mapping[str, Any]], *, needs_key: bool) -> str:
    """Commands to try a plane: requests to its first model and its first application, and how to see what was decided.

    `inputs`: for each application, by name, the JSON schema of its input.
    """
    lines, url, is_guess = [], status["url"], False
    model = next((one["model"] for one in status["deployments"] if not one.get("internal")), None)
    application = next(iter(status.get("applications") or ()), None)
    if model is not None:
        message = {"role": "user", "content": PROMPT}
        body = {"model": model, "stream": True, "max_tokens": MAX_TOKENS, "messages": [message]}
        lines += [_curl(f"{url}/v1/chat/completions", body, needs_key, "-iN")]
    if application is not None:
        body, is_guess = example(inputs.get(application["name"]) or {})
        lines += [_curl(f"{url}{application['path']}", body, needs_key, "-i")]
    if not lines:
        return ""
    said = [f"with the key of a tenant in ${KEY}"] if needs_key else []
    said += ["without a check of its certificate"] if url.startswith("https:") else []
    said += ["with values that its nodes take"] if is_guess else []
    head = f"try it{', ' + ', '.join(said) if said else ''}:"
    return "\n\n".join([head, *lines, "see what was decided about it:", command("explain")])


def _curl(url: str, body: Any, needs_key: bool, options: str) -> str:
    words = ["curl", f"{options}k" if url.startswith("https:") else options, shlex.quote(url)]
    if needs_key:
        words.append(f'-H "authorization: Bearer ${KEY}"')
    return " ".join([*words, "-H 'content-type: application/json'", "-d", shlex.quote(json.dumps(body))])


def example(schema: Mapping[str, Any]) -> tuple[Any, bool]:
    """A valid value for a JSON schema from pydantic, and whether the schema leaves part of this value open."""
    examples = _Examples(schema.get("$defs") or {})
    return examples.of(schema), examples.has_guessed


class _Examples:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self.has_guessed = False

    def of(self, schema: Mapping[str, Any], unknown: Any = PROMPT, depth: int = 0) -> Any:
        if "$ref" in schema:
            schema = {**self._definitions.get(schema["$ref"].rpartition("/")[2], {}), **schema}
        for word in ("const", "default"):
            if schema.get(word) is not None:
                return schema[word]
        for word in ("examples", "enum"):
            if schema.get(word):
                return schema[word][0]
        choices = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
        if choices and depth < DEEPEST:
            return self.of({**schema, "anyOf": None, "oneOf": None, "allOf": None, **choices[0]}, unknown, depth + 1)
        return self._of_type(schema, unknown, depth)

    def _of_type(self, schema: Mapping[str, Any], unknown: Any, depth: int) -> Any:
        kind = schema.get("type")
        match kind[0] if isinstance(kind, list) and kind else kind:
            case "object":
                fields = schema.get("properties") or {}
                needed = [name for name in schema.get("required") or () if name in fields and depth < DEEPEST]
                return {name: self.of(fields[name], PROMPT, depth + 1) for name in needed}
            case "array":
                items = list(schema.get("prefixItems") or ())
                items += [schema.get("items") or {}] * (max(schema.get("minItems") or 0, 1) - len(items))
                return [self.of(item, number, depth + 1) for number, item in enumerate(items, start=1)]
            case "integer" | "number":
                return _number(schema)
            case "boolean":
                return True
            case "null":
                return None
            case "string":
                return _text(schema)
        self.has_guessed = True
        return unknown


def _number(schema: Mapping[str, Any]) -> float:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below, step = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"), schema.get("multipleOf") or 1
    least = low if low is not None else above + step if above is not None else None
    most = high if high is not None else below - step if below is not None else None
    if least is not None and below is not None and least >= below:  # no whole number is valid, only fractions
        return float(above + below) / 2 if above is not None else float(least)
    found = max(1, least) if least is not None else 1
    found = min(found, most) if most is not None else found
    return -(-found // step) * step if step != 1 else found


_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT1M",
    "email": "ada@example.org",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}


def _text(schema: Mapping[str, Any]) -> str:
    text = _FORMATS.get(schema.get("format", ""), PROMPT)
    return text.ljust(schema.get("minLength") or 0, ".")[: schema.get("maxLength")]
