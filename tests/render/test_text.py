"""One line of untrusted text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.render.text import one_line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("as it is", "as it is"),
        ("", ""),
        ("  two\nlines\r\n\tand more ", "two lines and more"),
        ("a\x1b[31mred\x07 \x00one\u2028here", "a [31mred one here"),
        ("x" * 20, "x" * 20),
        ("x" * 21, "x" * 17 + "..."),
        ("ä中🙂", "ä中🙂"),
    ],
)
def test_one_line(words: str, line: str) -> None:
    assert one_line(words, 20) == line


@given(st.text(max_size=300), st.integers(4, 50))
def test_whatever_it_is_it_fits_and_says_it_again_the_same(words: str, longest: int) -> None:
    line = one_line(words, longest)
    assert len(line) <= longest
    assert line.isprintable()
    assert one_line(line, longest) == line
