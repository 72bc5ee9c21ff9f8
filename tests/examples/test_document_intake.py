"""examples/document_intake with its real models: what is drawn must be read again, and judged rightly."""

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

WRITTEN = [*app.LETTER, app.STAMP]


class Read(NamedTuple):
    """The letter, after each stage."""

    lines: list[app.Image]
    upright: list[app.Image]
    texts: list[str]


@pytest.fixture(scope="module")
def recognise() -> app.Recognise:
    return app.Recognise()


@pytest.fixture(scope="module")
def letter(recognise: app.Recognise) -> Read:
    lines = app.Detect().detect(app.decoded(app.drawn()))
    upright = app.Classify().classify(lines)
    return Read(lines, upright, recognise.recognise(upright))


def letters(text: str) -> str:
    """Without spaces and punctuation: the OCR model was trained on Chinese, and drops a space here and there."""
    return "".join(character for character in text.lower() if character.isalnum())


def alike(found: Sequence[str], written: Sequence[str]) -> list[bool]:
    return [
        SequenceMatcher(None, letters(one), letters(other)).ratio() > 0.95
        for one, other in zip(found, written, strict=True)
    ]


@installed
def test_lines_are_found_from_top_to_bottom(letter: Read) -> None:
    assert len(letter.lines) == len(WRITTEN)
    widths = [line.shape[1] for line in letter.lines]
    assert widths[1] == max(widths), "the second line is the longest"
    assert widths[0] == min(widths), "the first one is the shortest"


@installed
def test_only_the_stamp_is_turned(letter: Read) -> None:
    turned = [not np.array_equal(one, other) for one, other in zip(letter.lines, letter.upright, strict=True)]
    assert turned == [False] * len(app.LETTER) + [True]


@installed
def test_what_was_written_is_read(letter: Read) -> None:
    assert all(alike(letter.texts, WRITTEN)), letter.texts


@installed
def test_nobody_can_read_the_stamp_upside_down(letter: Read, recognise: app.Recognise) -> None:
    assert not any(alike(text, app.STAMP) == [True] for text in recognise.recognise(letter.lines[-1:]))


@installed
def test_the_language_of_each_line_is_known() -> None:
    assert app.Language(app.LANGUAGES).identify([*WRITTEN, "12345"]) == ["en", "en", "fr", "en", "en", "en", "und"]


@installed
def test_one_line_is_rude() -> None:
    rude = app.Profanity().check(WRITTEN)
    assert [probability >= app.SURE for probability in rude] == [False, False, False, True, False, False]
    assert all(0 <= probability <= 1 for probability in rude)


@installed
def test_an_empty_page_has_no_lines(recognise: app.Recognise) -> None:
    lines = app.Detect().detect(app.decoded(app.drawn([], "")))
    texts = recognise.recognise(app.Classify().classify(lines))
    assert not texts
    assert not app.Profanity().check(texts)
    assert not app.Language(app.LANGUAGES).identify(texts)


@installed
def test_a_strip_of_paper_is_read_as_well(recognise: app.Recognise) -> None:
    strip = app.decoded(app.drawn(["A single line on a strip of paper"]))[20:90]
    assert all(alike(recognise.recognise(app.Detect().detect(strip)), ["A single line on a strip of paper"]))


@installed
def test_large_images_are_made_smaller_as_they_come_in() -> None:
    class Request:
        async def body(self) -> bytes:
            return app.drawn(["line"] * 50)

    image = asyncio.run(app.image_of(Request()))
    assert image.shape == (app.LARGEST_SIDE, 508, 3)
    assert image.dtype == np.uint8
    assert image.flags["C_CONTIGUOUS"]


def test_everything_is_joined() -> None:
    assert app.join(["Guten Tag", "?"], ["de", "und"], [0.1, 0.2]) == {
        "lines": [
            {"text": "Guten Tag", "language": "de", "profanity": 0.1},
            {"text": "?", "language": "und", "profanity": 0.2},
        ],
        "languages": ["de"],
        "profane": False,
    }


def test_language_and_tone_wait_for_the_text_only() -> None:
    built = pm.build(app.dag)
    assert built.name == "document_intake"
    flow = {call.node: call for call in built.graph.calls}
    assert list(flow) == ["detect", "classify", "recognise", "language", "profanity", "join"]
    assert flow["language"].args == flow["profanity"].args
    assert built.graph.preprocessor.endswith("document_intake/app.py:image_of")


@installed
@pytest.mark.parametrize("options", [[], ["--deploy"]], ids=["in this process", "deployed"])
def test_one_command_runs_it(options: list[str]) -> None:
    command = [sys.executable, app.__file__, *options]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    assert as_expected(json.loads(told.stdout))


def test_the_readme_shows_what_it_answers() -> None:
    readme = Path(app.__file__).with_name("README.md").read_text(encoding="utf-8")
    shown = readme.partition("app.py\n")[2].partition("```")[0]
    assert as_expected(json.loads(shown))


def as_expected(answer: dict[str, Any]) -> bool:
    lines = answer["lines"]
    assert all(alike([line["text"] for line in lines], WRITTEN))
    assert [line["language"] for line in lines] == ["en", "en", "fr", "en", "en", "en"]
    assert [line["profanity"] >= app.SURE for line in lines] == [False, False, False, True, False, False]
    return bool(answer["languages"] == ["en", "fr"] and answer["profane"])
