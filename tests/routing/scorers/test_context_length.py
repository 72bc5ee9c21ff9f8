import pytest

from pointsman.routing.scorers import ContextLengthAware
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, kept, reasons, scene, scores


def takes(text: str) -> Candidate:
    return Candidate(labels={"llm-d.ai/context-length-range": text})


def prompt(tokens: int) -> RequestMetadata:
    return RequestMetadata("r", prompt_tokens=tokens)


@both_lengths
@pytest.mark.parametrize(
    ("tokens", "candidate", "score", "passes"),
    [
        (500, Candidate(), 0.5, True),
        (500, takes("500-500"), 1.0, True),
        (0, takes("0-1000"), 0.3 + 0.7 * (0.7 / 1.1 + 0.3), True),
        (500, takes("0-1000"), 0.3 + 0.7 * (0.7 / 1.1 + 0.15), True),
        (1000, takes("0-1000"), 0.3 + 0.7 * 0.7 / 1.1, True),
        (500, takes("500-10500"), 0.3 + 0.7 * (0.35 + 0.3), True),
        (2000, takes("0-1000"), 0.15, False),
        (1001, takes("0-1000"), 0.3 / 1.001, False),
        (500, takes("3500-9000"), 0.075, False),
        (500, takes("1000-0"), 0.0, False),
        (500, takes("0-"), 0.0, False),
        (500, takes("0"), 0.0, False),
        (500, takes("-5-1000"), 0.0, False),
        (500, takes("low-high"), 0.0, False),
        (500, takes(""), 0.0, False),
    ],
)
def test_scores_and_rejections(tokens: int, candidate: Candidate, score: float, passes: bool, long: bool) -> None:
    candidates = [candidate, Candidate()]
    cycle, roster = scene(candidates, long=long, request=prompt(tokens))
    plugin = ContextLengthAware(enable_filtering=True)
    assert scores(plugin, cycle, roster) == pytest.approx([score, 0.5])
    assert kept(plugin, cycle, roster) == ([0, 1] if passes else [1])
    assert kept(ContextLengthAware(), cycle, roster) == [0, 1]


@both_lengths
def test_all_may_be_rejected(long: bool) -> None:
    cycle, roster = scene([takes("0-10"), takes("x")], long=long, request=prompt(11))
    plugin = ContextLengthAware(enable_filtering=True)
    assert kept(plugin, cycle, roster) == []
    assert reasons(plugin, cycle, roster) == [
        "prompt out of range: 11 tokens, llm-d.ai/context-length-range is 0-10",
        "prompt out of range: 11 tokens, llm-d.ai/context-length-range is x",
    ]


def test_another_label() -> None:
    cycle, roster = scene([Candidate(labels={"range": "7-7"})], request=prompt(7))
    assert scores(ContextLengthAware(label="range"), cycle, roster) == [1.0]


def test_the_label_must_have_a_name() -> None:
    with pytest.raises(ValueError, match="label is empty"):
        ContextLengthAware(label="")
