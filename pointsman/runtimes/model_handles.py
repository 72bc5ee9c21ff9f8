"""Handles to models of the manifest: a request to one is scheduled like any client's."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from pointsman.pipeline.context import current
from pointsman.runtimes.handles import HandleLink, Response, Stream
from pointsman.runtimes.wire import CallFailed


class ModelMethod:
    """One kind of request to a model."""

    def __init__(self, link: HandleLink, model: str, path: str, asked: str, text: Callable[[Any], str]) -> None:
        self._link = link
        self._model = model
        self._path = path
        self._asked = asked
        self._text = text

    def __call__(self, asked: Any, **params: Any) -> Response:
        """The text of the first choice."""
        return Response(self._text_of(self._request(asked, params)), self._link.loop)

    remote = __call__

    def raw(self, asked: Any, **params: Any) -> Response:
        """The whole answer, as the model gave it."""
        return Response(self._answer(self._request(asked, params)), self._link.loop)

    def stream(self, asked: Any, **params: Any) -> Stream:
        """The text of the first choice, as it is written."""
        return Stream(self._texts(self._request(asked, params | {"stream": True})), self._link.loop)

    def _request(self, asked: Any, params: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
        context = current()
        headers = {"content-type": "application/json"}
        if context.request_id:
            caller = f"{context.request_id}.{context.step}"
            headers |= {"x-pointsman-caller": caller, "x-pointsman-priority": str(context.priority)}
        if context.tenant:
            headers["x-pointsman-tenant"] = context.tenant
        if (left_s := context.time_left_s) is not None:
            left_s = max(left_s, 0.001)
            headers |= {"x-pointsman-timeout-s": f"{left_s:.3f}", "x-pointsman-deadline-ms": f"{left_s * 1000:.0f}"}
        return msgspec.json.encode({"model": self._model, self._asked: asked, **params}), headers

    async def _answer(self, request: tuple[bytes, dict[str, str]]) -> Any:
        async with self._link.transport.ask(self._path, *request) as answer:
            said = await answer.read()
        if answer.status != 200:
            raise CallFailed.from_answer(answer.status, said, self._model)
        return msgspec.json.decode(said)

    async def _text_of(self, request: tuple[bytes, dict[str, str]]) -> str:
        return self._text((await self._answer(request))["choices"][0])

    async def _texts(self, request: tuple[bytes, dict[str, str]]) -> AsyncIterator[str]:
        async with self._link.transport.ask(self._path, *request) as answer:
            if answer.status != 200:
                raise CallFailed.from_answer(answer.status, await answer.read(), self._model)
            held = b""
            async for data in answer.pieces():
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    said = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if not said or said == b"[DONE]":
                        continue
                    event = msgspec.json.decode(said)
                    if "error" in event:
                        raise CallFailed.from_answer(500, said, self._model)
                    if event.get("choices") and (text := self._text(event["choices"][0])):
                        yield text


class ModelHandle:
    """A model that a deployment of the manifest serves."""

    def __init__(self, link: HandleLink, model: str) -> None:
        self._link = link
        self.model = model
        self.chat = ModelMethod(link, model, "/pipelines/v1/chat/completions", "messages", _chat_text)
        self.complete = ModelMethod(
            link, model, "/pipelines/v1/completions", "prompt", lambda choice: choice.get("text") or ""
        )
        self._embeddings = ModelMethod(link, model, "/pipelines/v1/embeddings", "input", str)

    def embed(self, texts: Any, **params: Any) -> Response:
        """A vector for each text."""
        return Response(self._vectors(self._embeddings._request(texts, params)), self._link.loop)

    async def _vectors(self, request: tuple[bytes, dict[str, str]]) -> list[list[float]]:
        found = (await self._embeddings._answer(request))["data"]
        return [one["embedding"] for one in sorted(found, key=lambda one: int(one.get("index", 0)))]

    def __repr__(self) -> str:
        return f"<model {self.model}>"


def _chat_text(choice: Any) -> str:
    said = choice.get("message") or choice.get("delta") or {}
    return said.get("content") or ""
