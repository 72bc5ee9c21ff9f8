import pytest

from pointsman.routing.handlers import AlwaysDisaggMultimodalDecider, AlwaysDisaggPdDecider, PrefixBasedPdDecider
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, scene

CACHED_96 = Candidate(match=5.5, cached=6, total=10, block_size=16)


@both_lengths
@pytest.mark.parametrize(
    ("decider", "prompt", "decode", "expected"),
    [
        (PrefixBasedPdDecider(), 160, CACHED_96, False),
        (PrefixBasedPdDecider(64), 160, CACHED_96, True),
        (PrefixBasedPdDecider(65), 160, CACHED_96, False),  # 160 - 6 * 16 = 64
        (PrefixBasedPdDecider(64), 160, None, False),
        (PrefixBasedPdDecider(64), 160, Candidate(), False),
        (PrefixBasedPdDecider(64, prompt_tokens=161), 160, CACHED_96, False),
        (PrefixBasedPdDecider(64, prompt_tokens=160), 160, CACHED_96, True),
        (PrefixBasedPdDecider(160), 160, Candidate(match=0, total=10), True),
        (PrefixBasedPdDecider(161), 160, Candidate(match=0, total=10), False),
    ],
)
def test_prefix_based(
    decider: PrefixBasedPdDecider, prompt: int, decode: Candidate | None, expected: bool, long: bool
) -> None:
    request = RequestMetadata("r", prompt_tokens=prompt)
    cycle, roster = scene([Candidate(), decode or CACHED_96], long=long, request=request)
    assert decider.decides(cycle, roster, None if decode is None else roster[1]) is expected


@pytest.mark.parametrize(
    ("non_cached", "prompt", "message"),
    [(-1, 0, "nonCachedTokens is -1; it must be 0 or more"), (0, -1, "promptTokens is -1; it must be 0 or more")],
)
def test_negative_parameters(non_cached: int, prompt: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixBasedPdDecider(non_cached, prompt)


def test_always() -> None:
    cycle, roster = scene([Candidate()])
    assert AlwaysDisaggPdDecider().decides(cycle, roster, None)


@pytest.mark.parametrize("multimodal", [False, True])
def test_multimodal(multimodal: bool) -> None:
    cycle, roster = scene([Candidate()], request=RequestMetadata("r", multimodal=multimodal))
    assert AlwaysDisaggMultimodalDecider().decides(cycle, roster, roster[0]) is multimodal


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url", "input_image", "input_audio"])
def test_every_kind_of_media_is_recognised(kind: str) -> None:
    prompt = b'[{"role": "user", "content": [{"type": "%b", "%b": {"url": "http://x/y"}}]}]' % ((kind.encode(),) * 2)
    cycle, roster = scene([Candidate()], request=RequestMetadata("r", prompt))
    assert AlwaysDisaggMultimodalDecider().decides(cycle, roster, roster[0])
