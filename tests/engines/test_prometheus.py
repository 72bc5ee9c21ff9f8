import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.engines import Samples

TEXT = r"""# HELP jobs A number.
# TYPE jobs gauge
jobs{engine="0",model="a"} 3
jobs{engine="1",model="a"} 4.5 1700000000
jobs_total 7e1
jobs_total_created 1
  jobs 99
jobs{broken
jobs{engine="2"} many
jobs{engine="3"} NaN
odd{text="say \"hi\", {you}\\\n",empty=""} 1
seen{who="old"} 100
seen{who="new"} 200
"""


def test_values_are_summed_over_label_sets() -> None:
    samples = Samples(TEXT)
    assert samples.value("jobs") == 7.5
    assert samples.value("jobs", engine="1") == 4.5
    assert samples.value("jobs", engine="1", model="b") is None
    assert samples.mean("jobs") == 3.75


def test_a_name_is_a_whole_name() -> None:
    assert Samples(TEXT).value("jobs_total") == 70.0
    assert Samples(TEXT).value("job") is None
    assert Samples(TEXT).mean("job") is None


def test_labels_are_read_as_they_were_meant() -> None:
    assert Samples(TEXT).labels("odd") == [{"text": 'say "hi", {you}\\\n', "empty": ""}]
    assert Samples(TEXT).labels("nothing") == []
    assert Samples(TEXT).newest_labels("seen") == {"who": "new"}
    assert Samples(TEXT).newest_labels("nothing") == {}


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_lines_end_in_either_way_and_bytes_need_not_be_text(ending: str) -> None:
    assert Samples(TEXT.replace("\n", ending).encode() + b"\xff\xfe").value("jobs") == 7.5


@given(st.text(alphabet='jobs{}"\\=,e01 \n#.', max_size=80))
def test_nothing_raises(text: str) -> None:
    samples = Samples(text)
    samples.value("jobs")
    samples.labels("jobs")
    samples.newest_labels("jobs")


def test_a_line_without_end_is_read_in_no_time() -> None:
    """No backtracking over what was sent to us."""
    assert Samples('jobs{a="' + "\\" * 100_000).value("jobs") is None
    assert Samples("jobs{" + 'a="b",' * 50_000).value("jobs") is None
