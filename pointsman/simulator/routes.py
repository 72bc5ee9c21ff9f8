"""The pages of the server: the OpenAI API, health and metrics in vLLM's form, and faults."""

import json
import time
from types import MappingProxyType

from pointsman.http.responses import CONTENT_TYPE
from pointsman.http.server import ResponseStream
from pointsman.simulator import answers
from pointsman.simulator.answers import BadCompletionRequest, CompletionRequest, Wording
from pointsman.simulator.server import Answering, Routes, SimulatedRoute


def chat(answering: Answering) -> None:
    data = answers.read_body(bytes(answering.request.body))
    _write(answering, answers.read_request(data, answers.chat_prompt(data)), is_chat=True)


def completions(answering: Answering) -> None:
    data = answers.read_body(bytes(answering.request.body))
    _write(answering, answers.read_request(data, answers.completion_prompt(data)), is_chat=False)


def embeddings(answering: Answering) -> None:
    data = answers.read_body(bytes(answering.request.body))
    _check_model(answering, str(data.get("model") or ""))
    texts = answers.embedding_inputs(data)
    tokens = sum(map(answers.tokens_of, texts))
    _check_room(answering, tokens, 1)
    answering.start(_Embedding(answering, texts, data.get("encoding_format") == "base64"), "", tokens, 1)


def models(answering: Answering) -> None:
    settings = answering.server.settings
    model = {"id": settings.model, "object": "model", "created": 0, "owned_by": "pointsman"}
    model |= {"max_model_len": settings.context_tokens}
    answering.connection.answer(200, json.dumps({"object": "list", "data": [model]}).encode())


def health(answering: Answering) -> None:
    answering.connection.answer(200, b"")


def metrics(answering: Answering) -> None:
    answering.connection.answer(200, answering.server.metrics().encode(), b"text/plain; version=0.0.4")


def stats(answering: Answering) -> None:
    """Numbers that tests need and that the metrics do not have."""
    server, counters = answering.server, answering.server.counters
    numbers = {
        "requests": counters.requests,
        "running": server.pace.running,
        "waiting": server.pace.waiting,
        "finished": counters.ended["stop"] + counters.ended["length"],
        "cancelled": counters.ended["abort"],
        "promptTokens": counters.prompt_tokens,
        "writtenTokens": counters.written_tokens,
        "faults": counters.faults,
    }
    answering.connection.answer(200, json.dumps(numbers).encode())


def show_faults(answering: Answering) -> None:
    server = answering.server
    answering.connection.answer(200, json.dumps(server.faults.active(server.clock.now())).encode())


def add_faults(answering: Answering) -> None:
    """Add the faults in the body: one fault, or a list of faults."""
    try:
        answering.server.add_faults(json.loads(bytes(answering.request.body)))
    except ValueError as error:
        raise BadCompletionRequest(400, str(error)) from None
    show_faults(answering)


def clear_faults(answering: Answering) -> None:
    answering.server.faults.clear()
    answering.server.listen_again()
    show_faults(answering)


ROUTES: Routes = MappingProxyType(
    {
        (b"POST", b"/v1/chat/completions"): SimulatedRoute("work", chat),
        (b"POST", b"/v1/completions"): SimulatedRoute("work", completions),
        (b"POST", b"/v1/embeddings"): SimulatedRoute("work", embeddings),
        (b"GET", b"/v1/models"): SimulatedRoute("models", models),
        (b"GET", b"/health"): SimulatedRoute("health", health),
        (b"GET", b"/metrics"): SimulatedRoute("metrics", metrics),
        (b"GET", b"/stats"): SimulatedRoute("", stats),
        (b"GET", b"/faults"): SimulatedRoute("", show_faults),
        (b"POST", b"/faults"): SimulatedRoute("", add_faults),
        (b"DELETE", b"/faults"): SimulatedRoute("", clear_faults),
    }
)


def _check_model(answering: Answering, model: str) -> None:
    """Check the model as vLLM does: a request that names no model is for the served model."""
    if model not in ("", answering.server.settings.model):
        raise BadCompletionRequest(404, f"The model `{model}` does not exist.", "model")


def _check_room(answering: Answering, prompt_tokens: int, output_tokens: int) -> None:
    limit = answering.server.settings.context_tokens
    if prompt_tokens + output_tokens > limit:
        requested = f"{prompt_tokens} of the prompt and {output_tokens} of the answer"
        raise BadCompletionRequest(
            400, f"This model's maximum context length is {limit} tokens, and you requested {requested}."
        )


def _write(answering: Answering, request: CompletionRequest, *, is_chat: bool) -> None:
    """Decide the length of the answer, and start it."""
    settings = answering.server.settings
    _check_model(answering, request.model)
    prompt_tokens = answers.tokens_of(request.prompt)
    _check_room(answering, prompt_tokens, request.max_tokens or 1)
    natural = min(settings.output_tokens, settings.context_tokens - prompt_tokens)
    tokens, reason = natural, "stop"
    if request.max_tokens is not None and (request.ignore_eos or request.max_tokens < natural):
        tokens, reason = request.max_tokens, "length"
    request = request._replace(model=settings.model)
    wording = Wording(request, is_chat, next(answering.server.answer_numbers), int(time.time()))
    _Writing(answering, request, wording, tokens, reason).begin(prompt_tokens)


class _Writing:
    def __init__(
        self, answering: Answering, request: CompletionRequest, wording: Wording, tokens: int, reason: str
    ) -> None:
        self._answering = answering
        self._request = request
        self._wording = wording
        self._tokens = tokens
        self._reason = reason
        self._written = 0
        self._last_at = 0.0
        self._held = 0
        """Tokens that a fault holds back."""
        fault = answering.fault
        self._strikes_at = None if fault is None or fault.after_tokens is None else min(fault.after_tokens, tokens)

    def begin(self, prompt_tokens: int) -> None:
        answering = self._answering
        if self._request.stream:
            # Real engines send the head at once, long before the first token.
            lines = b"content-type: %b\r\n" % CONTENT_TYPE
            answering.stream = ResponseStream(answering.connection, lines)
            if self._strikes_at == 0:
                self._strike()
                return
        text = self._request.prompt + answers.answer_text(self._request.prompt, self._tokens)
        answering.start(self, text, prompt_tokens, self._tokens)

    def token(self, at: float) -> None:
        self._observe(at)
        if not self._answering.token_delay_s:
            self._write_next()
            return
        self._held += 1
        if self._held == 1:
            self._answering.later(self._answering.token_delay_s, self._write_held)

    def so_far(self) -> bytes:
        """Half of the answer, if the answer has begun and is not a stream."""
        if self._request.stream or self._written == 0:
            return b""
        body = self._wording.whole(self._tokens, self._reason, self._usage())
        return answers.head_for(len(body)) + body[: len(body) // 2]

    def _write_held(self) -> None:
        self._write_next()
        self._held -= 1
        if self._held:
            self._answering.later(self._answering.token_delay_s, self._write_held)

    def _write_next(self) -> None:
        """Write the next word. After the last word, also write the end."""
        stream = self._answering.stream
        if self._strikes_at is not None and self._written >= self._strikes_at:
            self._strike()
            return
        if stream is not None:
            if self._written == 0:
                stream.hold(self._wording.first())
            stream.hold(self._wording.token(self._written))
        self._written += 1
        self._answering.server.counters.written_tokens += 1
        if self._written == self._tokens:
            if self._strikes_at == self._tokens:
                self._strike()
            else:
                self._end()

    def _end(self) -> None:
        used = self._usage()
        stream, connection = self._answering.stream, self._answering.connection
        self._answering.finish(self._reason)
        if stream is not None:
            stream.end(self._wording.last(self._reason, used if self._request.with_usage else None))
        else:
            connection.answer(200, self._wording.whole(self._tokens, self._reason, used))

    def _strike(self) -> None:
        fault = self._answering.fault
        assert fault is not None
        self._answering.server.strike(self._answering, fault)

    def _observe(self, at: float) -> None:
        counters, job = self._answering.server.counters, self._answering.job
        if job is None:
            return
        if self._last_at:
            counters.between_tokens.observe(at - self._last_at)
        else:
            counters.first_token.observe(at - job.arrived)
        if self._written + 1 == self._tokens:
            counters.whole.observe(at - job.arrived)
        self._last_at = at

    def _usage(self) -> dict[str, object]:
        job = self._answering.job
        cached = job.cached_tokens if job is not None else 0
        return answers.usage(answers.tokens_of(self._request.prompt), cached, self._tokens)


class _Embedding:
    """An answer of vectors, which is complete as soon as the input is read."""

    def __init__(self, answering: Answering, texts: list[str], as_base64: bool) -> None:
        self._answering = answering
        self._texts = texts
        self._as_base64 = as_base64

    def token(self, at: float) -> None:
        answering = self._answering
        tokens = sum(map(answers.tokens_of, self._texts))
        vectors = [
            {"object": "embedding", "index": index, "embedding": answers.embedding(text, self._as_base64)}
            for index, text in enumerate(self._texts)
        ]
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = {"object": "list", "data": vectors, "model": answering.server.settings.model, "usage": used}
        if answering.fault is not None:
            answering.server.strike(answering, answering.fault)
            return
        answering.finish("stop")
        answering.connection.answer(200, json.dumps(body).encode())

    def so_far(self) -> bytes:
        return b""
