"""Anthropic's API: `/v1/messages` for engines that serve only chat completions, and the form of its errors.

Enters: requests as clients send them, and answers of chat completions. Leaves: requests for chat completions, and
answers as clients of that API expect them. The one rule: if chat completions cannot express a part of a request, the
request is refused, so that nothing is lost silently. The exceptions are preferences that no engine could follow
(`thinking`, `cache_control`, `service_tier`, ...).
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pointsman.errors import shown_bytes
from pointsman.gateway.openai import BadRequest
from pointsman.http.heads import Bytes
from pointsman.http.responses import data_in
from pointsman.parameters import quoted

MESSAGES = b"/v1/messages"
COUNT_TOKENS = b"/v1/messages/count_tokens"
CHAT = b"/v1/chat/completions"
MAX_TOOLS = 1000
"""Maximum number of tools in a translated request. A tool takes 2 to 6 µs to translate, and can be as short as 3
bytes."""

_DROPPED = frozenset(
    b"system messages stop_sequences tools tool_choice metadata thinking service_tier container context_management "
    b"mcp_servers output_config output_format betas cache_control inference_geo speed pointsman".decode().split()
)
"""Fields that are translated, or that chat completions do not have. All other fields are passed on."""
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


# Requests


def chat_request(body: Bytes, *, counts: bool = False) -> bytes:
    """The request for chat completions that is equivalent to a valid body. `counts` is true if the engine is only to
    count the prompt.

    Raises `BadRequest`.
    """
    asked = msgspec.json.decode(body)
    chat = {name: value for name, value in asked.items() if name not in _DROPPED}
    chat["messages"] = [*_system(asked.get("system")), *_messages(asked.get("messages"))]
    if asked.get("tools"):
        tools = _listed(asked["tools"], "tools")
        if len(tools) > MAX_TOOLS:
            raise BadRequest(f"tools: expected at most {MAX_TOOLS:,}, found {len(tools):,}")
        chat["tools"] = [_tool(tool) for tool in tools]
        chat.update(_tool_choice(asked.get("tool_choice")))
    if asked.get("stop_sequences"):
        chat["stop"] = asked["stop_sequences"]
    user = _mapping(asked.get("metadata") or {}, "metadata").get("user_id")
    if isinstance(user, str):
        chat["user"] = user
    form = _mapping(asked.get("output_config") or {}, "output_config").get("format") or asked.get("output_format")
    if form:
        chat["response_format"] = _response_format(_mapping(form, "output_config.format"))
    if counts:
        chat |= {"max_tokens": 1, "stream": False}
    elif asked.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(chat)


def _system(system: Any) -> list[dict[str, Any]]:
    text = _text(system, "system") if system else ""
    return [{"role": "system", "content": text}] if text else []


def _messages(messages: Any) -> Iterator[dict[str, Any]]:
    for index, message in enumerate(_listed(messages, "messages")):
        where = f"messages[{index}]"
        role, content = _mapping(message, where).get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"{where}.role: expected user, assistant or system, found {quoted(role)}")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield _assistant(_blocks(content, f"{where}.content"))
        elif role == "system":
            yield {"role": role, "content": _text(content, f"{where}.content")}
        else:
            yield from _user(_blocks(content, f"{where}.content"))


def _user(blocks: list[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Tool results become separate messages, before the user's text."""
    parts: list[dict[str, Any]] = []
    for where, block in blocks:
        if block["type"] != "tool_result":
            parts.append(_part(where, block))
            continue
        content, said = block.get("content") or "", ""
        if isinstance(content, str):
            said = content
        else:
            inner = [_part(at, one) for at, one in _blocks(content, f"{where}.content")]
            said = "\n".join(part["text"] for part in inner if part["type"] == "text")
            parts += [part for part in inner if part["type"] != "text"]
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
    if parts and all(part["type"] == "text" for part in parts):
        yield {"role": "user", "content": "\n".join(part["text"] for part in parts)}
    elif parts:
        yield {"role": "user", "content": parts}


def _assistant(blocks: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    text, thought, calls = "", "", []
    for where, block in blocks:
        match block["type"]:
            case "text":
                text += block.get("text") or ""
            case "thinking":
                thought += block.get("thinking") or ""
            case "redacted_thinking":
                pass  # only the service that wrote this block can read it
            case "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case kind:
                raise BadRequest(f"{where}: a block of type {quoted(kind)} cannot be served here")
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _part(where: str, block: dict[str, Any]) -> dict[str, Any]:
    kind, source = block["type"], block.get("source")
    if kind == "text":
        return {"type": "text", "text": block.get("text") or ""}
    if kind in ("image", "document") and isinstance(source, dict):
        match source.get("type"):
            case "text" if kind == "document":
                return {"type": "text", "text": source.get("data") or ""}
            case "url" if kind == "image":
                return {"type": "image_url", "image_url": {"url": source.get("url")}}
            case "base64":
                data = f"data:{source.get('media_type')};base64,{source.get('data')}"
                if kind == "image":
                    return {"type": "image_url", "image_url": {"url": data}}
                return {"type": "file", "file": {"filename": block.get("title") or "document", "file_data": data}}
    raise BadRequest(f"{where}: a block of type {quoted(kind)} with this source cannot be served here")


def _tool(tool: Any) -> dict[str, Any]:
    kind = _mapping(tool, "tools").get("type")
    if kind not in (None, "custom"):
        raise BadRequest(f"tools: a tool of type {quoted(kind)} runs on Anthropic's servers, and cannot be served here")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> dict[str, Any]:
    if not choice:
        return {}
    kind = _mapping(choice, "tool_choice").get("type")
    chosen: dict[Any, Any] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if kind not in chosen:
        raise BadRequest(f"tool_choice.type: expected auto, any, tool or none, found {quoted(kind)}")
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen[kind], **alone}


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        raise BadRequest(f"output_config.format.type: expected json_schema, found {quoted(form.get('type'))}")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema"), "strict": True}}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = [_part(at, block) for at, block in _blocks(content, where)]
    if any(part["type"] != "text" for part in parts):
        raise BadRequest(f"{where}: expected text")
    return "\n".join(part["text"] for part in parts)


def _blocks(content: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """The blocks of a content, each with its position."""
    found = [(f"{where}[{index}]", block) for index, block in enumerate(_listed(content, where))]
    for at, block in found:
        if not isinstance(_mapping(block, at).get("type"), str):
            raise BadRequest(f"{at}: a block needs a type")
    return found


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{where}: expected a list")
    return value


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: expected an object")
    return value


# Answers


def message_of(body: bytes, model: str) -> bytes:
    """The message for an answer from chat completions. Raises `msgspec.DecodeError` if the body is not such an
    answer."""
    answer = msgspec.json.decode(body)
    try:
        choice = answer["choices"][0]
        said, finish = choice["message"], choice.get("finish_reason")
        content = [*_said(said.get("reasoning_content") or said.get("reasoning") or "", said.get("content") or "")]
        content += [_tool_use(call) for call in said.get("tool_calls") or ()]
    except (LookupError, TypeError, AttributeError):
        raise msgspec.DecodeError(f"it is not a chat completion: {shown_bytes(body)}") from None
    called = any(block["type"] == "tool_use" for block in content)
    message = _message(model, content) | _stopped(finish, choice.get("stop_reason"), called=called)
    return msgspec.json.encode(message | {"usage": usage_fields(answer.get("usage"))})


def counted(body: bytes) -> bytes:
    """The answer of `count_tokens`. Raises `msgspec.DecodeError` if the engine did not count."""
    usage = msgspec.json.decode(body).get("usage") or {}
    if not isinstance(usage.get("prompt_tokens"), int):
        raise msgspec.DecodeError("it does not say how long the prompt is")
    return msgspec.json.encode({"input_tokens": usage["prompt_tokens"]})


def _message(model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    known = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
    return {**known, "content": content}


def _said(thought: str, text: str) -> Iterator[dict[str, Any]]:
    if thought:
        yield {"type": "thinking", "thinking": thought, "signature": ""}
    if text:
        yield {"type": "text", "text": text}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function, arguments = call["function"], call["function"].get("arguments") or "{}"
    try:
        given = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except msgspec.DecodeError:  # the answer reached its length limit
        given = {}
    return {"type": "tool_use", "id": call.get("id") or _tool_id(), "name": function.get("name"), "input": given}


def _tool_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _stopped(finish: Any, word: Any, *, called: bool) -> dict[str, Any]:
    """Why the answer stopped. `word` is the stop sequence that ended the answer, if the engine reports one."""
    if isinstance(word, str) and finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": word}
    why = "tool_use" if called and finish == "stop" else _STOP_REASONS.get(finish or "stop", "end_turn")
    return {"stop_reason": why, "stop_sequence": None}


def usage_fields(usage: Any) -> dict[str, Any]:
    """Usage as this API reports it: the input does not include cached tokens."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = (details.get("cached_tokens") if isinstance(details, dict) else 0) or 0
    return {
        "input_tokens": max((usage.get("prompt_tokens") or 0) - cached, 0),
        "output_tokens": usage.get("completion_tokens") or 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


# Streams


class MessageStream:
    """Translates events from chat completions into events of this API."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._index = -1
        """Index of the open block; if no block is open, index of the last block."""
        self._kind: object = None
        """Kind of the open block: thinking, text, or the index of a call. None if no block is open."""
        self._begun = False
        self._called = False
        self._finish: Any = None
        self._word: Any = None
        self._usage: Any = None

    def feed(self, events: bytes) -> bytes:
        """Translate complete events; malformed events are left out."""
        told: list[bytes] = []
        for data in data_in(events):
            try:
                chunk = msgspec.json.decode(data)
            except msgspec.DecodeError:
                continue
            if isinstance(chunk, dict):
                self._chunk(chunk, told)
        return b"".join(told)

    def end(self) -> bytes:
        """The end of the message."""
        told: list[bytes] = []
        self._begin(told)
        self._close(told)
        stopped = _stopped(self._finish, self._word, called=self._called)
        _tell(told, "message_delta", delta=stopped, usage=usage_fields(self._usage))
        _tell(told, "message_stop")
        return b"".join(told)

    def _chunk(self, chunk: dict[str, Any], told: list[bytes]) -> None:
        if "error" in chunk:
            error = chunk["error"]
            why = error.get("message") if isinstance(error, dict) else error
            told.append(error_event(500, str(why)))
            return
        self._usage = chunk.get("usage") or self._usage
        for choice in (chunk.get("choices") or ())[:1]:
            self._begin(told)
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if thought:
                self._open("thinking", told, {"type": "thinking", "thinking": "", "signature": ""})
                self._delta(told, {"type": "thinking_delta", "thinking": thought})
            if delta.get("content"):
                self._open("text", told, {"type": "text", "text": ""})
                self._delta(told, {"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls") or ():
                self._call(call, told)
            self._finish = choice.get("finish_reason") or self._finish
            self._word = choice.get("stop_reason") or self._word

    def _call(self, call: dict[str, Any], told: list[bytes]) -> None:
        self._called = True
        function, index = call.get("function") or {}, call.get("index") or 0
        name, known = function.get("name") or "", call.get("id") or _tool_id()
        self._open(index, told, {"type": "tool_use", "id": known, "name": name, "input": {}})
        if function.get("arguments"):
            self._delta(told, {"type": "input_json_delta", "partial_json": function["arguments"]})

    def _begin(self, told: list[bytes]) -> None:
        if not self._begun:
            self._begun = True
            unknown = {"stop_reason": None, "stop_sequence": None, "usage": usage_fields(None)}
            _tell(told, "message_start", message=_message(self._model, []) | unknown)

    def _open(self, kind: object, told: list[bytes], block: dict[str, Any]) -> None:
        if kind != self._kind or type(kind) is not type(self._kind):
            self._close(told)
            self._index, self._kind = self._index + 1, kind
            _tell(told, "content_block_start", index=self._index, content_block=block)

    def _close(self, told: list[bytes]) -> None:
        if self._kind is not None:
            self._kind = None
            _tell(told, "content_block_stop", index=self._index)

    def _delta(self, told: list[bytes], delta: dict[str, Any]) -> None:
        _tell(told, "content_block_delta", index=self._index, delta=delta)


def _tell(told: list[bytes], kind: str, **fields: Any) -> None:
    told.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields})))


# Errors

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def error_form(status: int, message: str, **extra: Any) -> bytes:
    """An error in the form of this API."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message, **extra}})


def error_event(status: int, message: str) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_form(status, message)


def as_error(status: int, body: bytes) -> bytes:
    """An engine's error in the form of this API."""
    try:
        read = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        read = None
    if isinstance(read, dict):
        if read.get("type") == "error" and isinstance(read.get("error"), dict):
            return body
        found: Any = read.get("error") or read.get("detail") or read.get("message")
        found = found.get("message") if isinstance(found, dict) else found
        if isinstance(found, str):
            return error_form(status, found)
    return error_form(status, body[:1000].decode("utf-8", "replace").strip() or f"the engine answered {status}")
