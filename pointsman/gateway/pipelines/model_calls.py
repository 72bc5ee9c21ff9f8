"""Steps that are calls of models: requests of the OpenAI API made of a step's arguments, and what their answers say."""

from typing import Any

import msgspec

from pointsman.errors import PointsmanError
from pointsman.gateway.pipelines.prepared import PreparedStep
from pointsman.gateway.pipelines.response_sink import BLOB, VALUE
from pointsman.gateway.usage import READ_UP_TO_BYTES, Usage, usage_of, usage_of_stream
from pointsman.http.events import EventStream
from pointsman.pipeline.graph import filled
from pointsman.wire import BlobAt, UnreadableBlob, decode_plain, encode_plain, read_template


class NotPlain(PointsmanError):
    """What goes to a model or comes from it is not what the API has a form for."""


_TARGETS = {
    "chat": (b"/v1/chat/completions", "messages"),
    "complete": (b"/v1/completions", "prompt"),
    "embed": (b"/v1/embeddings", "input"),
}
"""Method of the node -> where it goes, and what its first argument is called there."""


class ModelCall:
    """One call of a model."""

    def __init__(self, step: PreparedStep, blobs: list[bytes], *, in_pieces: bool) -> None:
        """Raises `NotPlain`."""
        self._method = step.step.method
        self._events = EventStream()
        self.target, first = _TARGETS[self._method]

        def value(part: BlobAt) -> Any:
            try:
                return decode_plain(blobs[part.place])
            except UnreadableBlob as error:
                raise NotPlain(f"a model takes plain data (text, numbers, lists, mappings): {error}") from None

        fields = filled(read_template(step.kwargs), value)
        args = filled(read_template(step.args), value)
        if args:
            fields[first] = args[0]
        if self._method == "chat" and isinstance(fields.get("messages"), str):
            fields["messages"] = [{"role": "user", "content": fields["messages"]}]
        self._raw = bool(fields.pop("raw", False))
        self.streams = bool(fields.get("stream")) and in_pieces
        fields["stream"] = self.streams
        if self._method == "embed":
            fields.pop("stream")
        self.prompt = msgspec.json.encode(fields.get(first))
        limit = fields.get("max_tokens")
        self.max_tokens = limit if isinstance(limit, int) and limit > 0 else None
        self.body = msgspec.json.encode({"model": step.deployment, **fields})

    def result(self, body: bytes, form: str) -> bytes:
        """The result of the step in this form. Raises `NotPlain`."""
        try:
            value = self._value(msgspec.json.decode(body))
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise NotPlain(f"the answer of the model is not as the API says: {error}") from None
        return encode_plain(value) if form in (BLOB, VALUE) else msgspec.json.encode(value)

    def usage(self, body: bytes) -> Usage | None:
        """What the model says it took; `body`: the answer, if it came whole."""
        if self._events.events:
            return usage_of_stream(self._events)
        return usage_of(body) if len(body) <= READ_UP_TO_BYTES else None

    @property
    def output_events(self) -> int:
        """About as many tokens as a stream had, where the model does not say."""
        return max(self._events.events - 2, 0)

    def read_along(self, payload: bytes) -> bytes:
        """Whole events of a stream, as they may be passed on."""
        return self._events.feed(payload)

    def texts(self, events: bytes) -> bytes:
        """Events as pieces of a handle's: the text of each, as a blob with its length before it."""
        found = b""
        for line in events.splitlines():
            said = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not said or said == b"[DONE]":
                continue
            choices = msgspec.json.decode(said).get("choices") or [{}]
            text = (choices[0].get("delta") or {}).get("content") or choices[0].get("text")
            if text:
                blob = encode_plain(text)
                found += len(blob).to_bytes(4, "little") + blob
        return found

    def _value(self, answer: Any) -> Any:
        if self._raw:
            return answer
        if self._method == "chat":
            return answer["choices"][0]["message"]["content"]
        if self._method == "complete":
            return answer["choices"][0]["text"]
        return [one["embedding"] for one in answer["data"]]
