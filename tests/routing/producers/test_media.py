"""Media go where their embeddings are: what an endpoint was sent before, it probably has."""

import json
from typing import Any

import pytest

from pointsman.routing.plugins import MEDIA_MATCH, RequestCycle
from pointsman.routing.producers import MmEmbeddingsCacheProducer
from pointsman.routing.producers.media import MAX_ITEMS, media_items
from pointsman.routing.scorers import MmEmbeddingsCacheScorer
from pointsman.selection import SchedulingResult
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, result_of, scene, scores


def image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {**more, "url": url}}


def request(*parts: Any) -> RequestMetadata:
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return RequestMetadata("r", json.dumps([{"role": "user", "content": content}]).encode())


@pytest.mark.parametrize(
    ("parts", "number"),
    [
        ([], 0),
        ([image("http://a/1")], 1),
        ([image("http://a/1"), image("http://a/1")], 1),
        ([image("http://a/1"), image("http://a/2", detail="low", more="x")], 2),
        ([{"type": "video_url", "video_url": {"url": "http://v"}}], 1),
        ([{"type": "audio_url", "audio_url": {"url": "http://s"}}], 1),
        ([{"type": "input_image", "image_url": "http://a/1"}], 1),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}], 1),
        ([{"type": "input_audio", "input_audio": {"format": "wav", "data": "AAAA"}}], 1),
        ([{"type": "text", "text": '"image_url": {"url": "http://quoted"}'}], 0),
        ([image(f"http://a/{number}") for number in range(MAX_ITEMS + 9)], MAX_ITEMS),
    ],
)
def test_the_media_of_a_request(parts: list[Any], number: int) -> None:
    assert len(media_items(request(*parts))) == number
    view = request(*parts)
    assert isinstance(view.prompt, bytes)
    assert media_items(RequestMetadata("r", memoryview(view.prompt))) == media_items(view)


def test_an_item_is_known_in_any_form_and_place() -> None:
    chat, response = request(image("http://a/1")), request({"type": "input_image", "image_url": "http://a/1"})
    assert media_items(chat) == media_items(response)
    assert media_items(RequestMetadata("r", "plain text")) == frozenset()


def sent(producer: MmEmbeddingsCacheProducer, cycle: RequestCycle, roster: Any, *where: int, **profiles: int) -> None:
    producer.produce(cycle, roster)
    results = {"decode": result_of("decode", roster, *where)}
    results |= {name: result_of(name, roster, place) for name, place in profiles.items()}
    producer.dispatched(cycle, SchedulingResult(results, "decode"))


@both_lengths
def test_the_share_that_an_endpoint_has(long: bool) -> None:
    producer, rows = MmEmbeddingsCacheProducer(), [Candidate()] * 3
    one, two = image("http://a/1"), image("http://a/2")
    sent(producer, *scene(rows, request=request(one), long=long), 1)
    sent(producer, *scene(rows, request=request(one, two), long=long), 2)
    cycle, roster = scene(rows, request=request(one, two), long=long)
    producer.produce(cycle, roster)
    assert scores(MmEmbeddingsCacheScorer(), cycle, roster) == [0.0, 0.5, 1.0]
    assert scores(MmEmbeddingsCacheScorer(), cycle, roster.without([0])) == [0.5, 1.0]


def test_a_request_without_media_scores_nothing() -> None:
    producer, (cycle, roster) = MmEmbeddingsCacheProducer(), scene([Candidate()] * 2, request=request())
    sent(producer, cycle, roster, 0)
    assert cycle.get(MEDIA_MATCH) is None
    assert scores(MmEmbeddingsCacheScorer(), cycle, roster) == [0.0, 0.0]


def test_an_endpoint_forgets_what_it_used_least_recently() -> None:
    producer, rows = MmEmbeddingsCacheProducer(cache_size_in_mb_per_server=4), [Candidate()]
    for number in (1, 2, 1, 3):  # room for two items
        sent(producer, *scene(rows, request=request(image(f"http://a/{number}"))), 0)
    found = []
    for number in (1, 2, 3):
        cycle, roster = scene(rows, request=request(image(f"http://a/{number}")))
        producer.produce(cycle, roster)
        found += scores(MmEmbeddingsCacheScorer(), cycle, roster)
    assert found == [1.0, 0.0, 1.0]


def test_media_are_where_they_are_encoded() -> None:
    producer, rows, one = MmEmbeddingsCacheProducer(), [Candidate()] * 3, request(image("http://a/1"))
    sent(producer, *scene(rows, request=one), 0, encode=2)
    cycle, roster = scene(rows, request=one)
    producer.produce(cycle, roster)
    assert scores(MmEmbeddingsCacheScorer(), cycle, roster) == [0.0, 0.0, 1.0]


def test_an_endpoint_that_has_left_is_forgotten() -> None:
    producer, rows, one = MmEmbeddingsCacheProducer(), [Candidate()] * 2, request(image("http://a/1"))
    cycle, roster = scene(rows, request=one)
    sent(producer, cycle, roster, 0)
    producer.departed(roster[0])
    cycle, roster = scene(rows, request=one)
    producer.produce(cycle, roster)
    assert scores(MmEmbeddingsCacheScorer(), cycle, roster) == [0.0, 0.0]


@pytest.mark.parametrize(("size", "items"), [(0, 2048), (-5, 2048), (1, 1), (4096, 2048)])
def test_the_size_of_a_cache(size: int, items: int) -> None:
    assert MmEmbeddingsCacheProducer(size)._capacity == items
