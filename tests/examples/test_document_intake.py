"""examples/document_intake with its real models: they must read and classify the letter that the example draws."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pointsman as pm
from examples.document_intake import app

PACKAGES = ("rapidocr_onnxruntime", "cv2", "PIL", "py3langid", "profanity_check")
missing = [package for package in PACKAGES if find_spec(package) is None]
installed = pytest.mark.skipif(bool(missing), reason=f"requirements/examples.txt is not installed: no {missing}")

EXPECTED_LINES = [*app.LETTER, app.STAMP]


class Stages(NamedTuple):
    """The letter after each stage."""

    lines: list[app.Image]
    upright: list[app.Image]
    texts: list[str]


@pytest.fixture(scope="module")
def recognise() -> app.Recognise:
    return app.Recognise()


@pytest.fixture(scope="module")
def letter(recognise: app.Recognise) -> Stages:
    lines = app.Detect().detect(app.decoded(app.drawn()))
    upright = app.Classify().classify(lines)
    return Stages(lines, upright, recognise.recognise(upright))


def normalized(text: str) -> str:
    """The text without spaces and punctuation: the OCR model, trained mostly on Chinese, drops some spaces."""
    return "".join(character for character in text.lower() if character.isalnum())


def matches(found: Sequence[str], expected: Sequence[str]) -> list[bool]:
    return [
        SequenceMatcher(None, normalized(one), normalized(other)).ratio() > 0.95
        for one, other in zip(found, expected, strict=True)
    ]


@installed
def test_lines_are_detected_from_top_to_bottom(letter: Stages) -> None:
    assert len(letter.lines) == len(EXPECTED_LINES)
    widths = [line.shape[1] for line in letter.lines]
    assert widths[1] == max(widths), "the second line is the longest"
    assert widths[0] == min(widths), "the first line is the shortest"


@installed
def test_only_the_upside_down_stamp_is_rotated(letter: Stages) -> None:
    rotated = [not np.array_equal(one, other) for one, other in zip(letter.lines, letter.upright, strict=True)]
    assert rotated == [False] * len(app.LETTER) + [True]


@installed
def test_every_line_is_recognised(letter: Stages) -> None:
    assert all(matches(letter.texts, EXPECTED_LINES)), letter.texts


@installed
def test_the_stamp_is_not_recognised_upside_down(letter: Stages, recognise: app.Recognise) -> None:
    assert not any(matches([text], [app.STAMP]) == [True] for text in recognise.recognise(letter.lines[-1:]))


@installed
def test_the_language_of_each_line_is_identified() -> None:
    languages = app.Language(app.LANGUAGES).identify([*EXPECTED_LINES, "12345"])
    assert languages == ["en", "en", "fr", "en", "en", "en", "und"]


@installed
def test_one_line_is_classified_as_profane() -> None:
    probabilities = app.Profanity().check(EXPECTED_LINES)
    assert [probability >= app.SURE for probability in probabilities] == [False, False, False, True, False, False]
    assert all(0 <= probability <= 1 for probability in probabilities)


@installed
def test_an_empty_page_has_no_lines(recognise: app.Recognise) -> None:
    lines = app.Detect().detect(app.decoded(app.drawn([], "")))
    texts = recognise.recognise(app.Classify().classify(lines))
    assert not texts
    assert not app.Profanity().check(texts)
    assert not app.Language(app.LANGUAGES).identify(texts)


@installed
def test_a_wide_and_low_image_is_recognised(recognise: app.Recognise) -> None:
    strip = app.decoded(app.drawn(["A single line on a strip of paper"]))[20:90]
    assert all(matches(recognise.recognise(app.Detect().detect(strip)), ["A single line on a strip of paper"]))


@installed
def test_large_images_are_scaled_down_by_the_preprocessor() -> None:
    class Request:
        async def body(self) -> bytes:
            return app.drawn(["line"] * 50)

    image = asyncio.run(app.image_of(Request()))
    assert image.shape == (app.LARGEST_SIDE, 508, 3)
    assert image.dtype == np.uint8
    assert image.flags["C_CONTIGUOUS"]


def test_join_combines_text_language_and_profanity() -> None:
    assert app.join(["Guten Tag", "?"], ["de", "und"], [0.1, 0.2]) == {
        "lines": [
            {"text": "Guten Tag", "language": "de", "profanity": 0.1},
            {"text": "?", "language": "und", "profanity": 0.2},
        ],
        "languages": ["de"],
        "profane": False,
    }


def test_language_and_profanity_run_in_parallel_after_recognition() -> None:
    built = pm.build(app.dag)
    assert built.name == "document_intake"
    calls = {call.node: call for call in built.graph.calls}
    assert list(calls) == ["detect", "classify", "recognise", "language", "profanity", "join"]
    assert calls["language"].args == calls["profanity"].args
    assert built.graph.preprocessor.endswith("document_intake/app.py:image_of")


@installed
@pytest.mark.parametrize("options", [[], ["--deploy"]], ids=["in this process", "deployed"])
def test_the_command_prints_the_expected_answer(options: list[str]) -> None:
    command = [sys.executable, app.__file__, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert is_expected(json.loads(result.stdout))


def test_the_readme_shows_the_expected_answer() -> None:
    readme = Path(app.__file__).with_name("README.md").read_text(encoding="utf-8")
    shown = readme.partition("app.py\n")[2].partition("```")[0]
    assert is_expected(json.loads(shown))


def is_expected(answer: dict[str, Any]) -> bool:
    lines = answer["lines"]
    assert all(matches([line["text"] for line in lines], EXPECTED_LINES))
    assert [line["language"] for line in lines] == ["en", "en", "fr", "en", "en", "en"]
    assert [line["profanity"] >= app.SURE for line in lines] == [False, False, False, True, False, False]
    return bool(answer["languages"] == ["en", "fr"] and answer["profane"])
