"""What engines get: the name that they serve, the key that they ask for, and all other bytes as clients sent them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.gateway import upstream
from pointsman.gateway.openai import with_fields, with_model
from tests.gateway.backends import answers
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.wire import chat, post, wait_for

SERVED: dict[str, Any] = {"engine_names": {"m": "org/Served-7B", "other-name": "org/Served-7B", "": "org/Served-7B"}}
PATHS = [b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses"]


class TestNames:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("name", ["m", "other-name"])
    def test_an_engine_gets_the_name_that_it_serves(self, bed: Bed, path: bytes, name: str) -> None:
        backend = bed.backend(**SERVED)
        body = {"prompt": ["a", "b"], "metadata": {"model": name}, "model": name, "n": 2}
        assert bed.fetch(post(body, path)).status == 200
        assert json.loads(backend.received[0].body) == body | {"model": "org/Served-7B"}
        assert bed.newest().model == name

    def test_a_request_without_a_model_gets_it_if_the_engine_has_a_name_of_its_own(self, bed: Bed) -> None:
        backend = bed.backend(**SERVED)
        assert bed.fetch(post({"messages": []})).status == 200
        assert json.loads(backend.received[0].body) == {"messages": [], "model": "org/Served-7B"}

    def test_an_alias_is_the_model_to_an_engine_without_a_name_of_its_own(self, bed: Bed) -> None:
        backend = bed.backend()
        for name in ("m", "other-name"):
            assert bed.fetch(chat(model=name)).status == 200
        assert [json.loads(one.body)["model"] for one in backend.received] == ["m", "m"]

    def test_an_adapter_keeps_its_name(self, make_bed: MakeBed) -> None:
        endpoint = {"url": "http://127.0.0.1:1"}
        bed = make_bed({}, {"name": "chat", "model": "m", "adapters": ["sql-lora"], "endpoints": [endpoint]})
        backend = bed.backend(adapters=frozenset({"sql-lora"}), **SERVED)
        assert bed.fetch(chat(model="sql-lora")).status == 200
        assert json.loads(backend.received[0].body)["model"] == "sql-lora"

    def test_a_retry_gets_the_name_of_the_other_engine(self, bed: Bed) -> None:
        first = bed.backend(answers(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n"), engine_names={"m": "one"})
        second = bed.backend(engine_names={"m": "two"})
        for _ in range(4):
            assert bed.fetch(chat()).status == 200
        assert {json.loads(one.body)["model"] for one in first.received} == {"one"}
        assert {json.loads(one.body)["model"] for one in second.received} == {"two"}

    def test_bytes_stay_as_they_are(self, bed: Bed) -> None:
        backend = bed.backend(**SERVED)
        body = b'{ "messages" : [{"role":"user","content":"caf\\u00e9 \\"model\\": 1.50"}],"seed":1.50, "model" :"m" }'
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        assert bed.fetch(request).status == 200
        assert backend.received[0].body == body.replace(b':"m"', b':"org/Served-7B"')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["model", '"model":"m"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "a", '"model"']), inner),
    max_leaves=12,
)


@given(
    before=st.dictionaries(st.text(max_size=5), JSON), after=st.dictionaries(st.text(max_size=5), JSON), name=st.text()
)
def test_only_the_model_changes_whatever_is_around_it(before: Any, after: Any, name: str) -> None:
    fields = {**before, "model": name, **{key: value for key, value in after.items() if key != "model"}}
    for text in (json.dumps(fields), json.dumps(fields, ensure_ascii=False, indent=1)):
        try:
            body = text.encode()
        except UnicodeEncodeError:
            continue
        assert json.loads(with_model(body, 'served "x"')) == fields | {"model": 'served "x"'}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"m"}',
        b'{"mod\\u0065l":"m"}',
        b'{"x":{"model":"m"},"\\u006dodel":"m"}',
        b'{"model":"m","mod\\u0065l":"m"}',
        b'{"\\"model":"m","model":"m"}',
        b'{"x":["model"],"model"\n:\t"m"}',
        b'{"model":"\\"m\\\\"}',
        b"{}",
    ],
)
def test_spellings_of_the_model(body: bytes) -> None:
    assert json.loads(with_model(memoryview(body), "served")) == json.loads(body) | {"model": "served"}
    assert json.loads(with_fields(body, model="served", n=1)) == json.loads(body) | {"model": "served", "n": 1}


class TestKeys:
    def test_an_engine_gets_its_own_key_and_never_that_of_the_client(
        self, bed: Bed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ENGINE_KEY", "sk-engine")
        backend = bed.backend(key="env:ENGINE_KEY")
        for header in ("authorization: Bearer sk-client", "x-api-key: sk-client"):
            assert bed.fetch(chat(header)).status == 200
        for one in backend.received:
            assert one.all("authorization") == ["Bearer sk-engine"]
            assert "sk-client" not in str(one.headers)

    def test_a_key_in_a_file_is_read_again(self, bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upstream, "KEYS_S", 0.0)
        file = tmp_path / "key"
        file.write_text("sk-first\n")
        backend = bed.backend(key=f"file:{file}")

        def sends(key: str) -> bool:
            assert bed.fetch(chat()).status == 200
            return backend.received[-1].header("authorization") == f"Bearer {key}"

        assert sends("sk-first")
        file.write_text("sk-second\n")
        wait_for(lambda: sends("sk-second"))
        file.unlink()  # the last one stays: probes tell
        assert sends("sk-second")

    def test_an_engine_that_needs_none_gets_none(self, bed: Bed) -> None:
        backend = bed.backend()
        assert bed.fetch(chat("authorization: Bearer sk-client")).status == 200
        assert backend.received[0].header("authorization") is None
