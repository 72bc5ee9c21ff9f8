from xml.etree import ElementTree

import pytest

from pointsman.lab.scaling import Reactive, Replay, Series, Setting, plot
from tests.lab.scaling.made_up import daily, steps

SVG = "{http://www.w3.org/2000/svg}"


def drawn(series: Series, setting: Setting) -> ElementTree.Element:
    found = Replay(series, setting).run(Reactive(setting.capacity, 1.2))
    return ElementTree.fromstring(plot(series, setting, "reactive 1.2", found))


def test_a_picture_has_a_title_and_all_lines() -> None:
    picture = drawn(steps(10, 30, 10), Setting(capacity=10.0, start_up_s=600.0))
    title = picture.findtext(f"{SVG}title")
    assert title == "steps: reactive 1.2, start-up 600 s: 1.60 of the least, 20.00% unserved, 3 changes"
    need, bound, policy, short = picture.findall(f"{SVG}path")
    assert need.get("fill") == "#c9d7e8"
    # A third of the width each; 2, 4 and 2 replicas, of at most 4.
    assert policy.get("d") == "M46 137V137H347.3V40H648.7V137H950"
    assert bound.get("d") == "M46 88.5V88.5H648.7V185.5H950"
    assert short.get("d") == "M347 234v-7"


@pytest.mark.parametrize(
    ("series", "labels"),
    [
        (steps(10, 30, 10), ["min 0", *map(str, range(2, 31, 2))]),
        (steps(*[10.0] * 12), ["min 0", *map(str, range(9, 120, 9))]),
        (steps(*[10.0] * 60), ["h 0", *map(str, range(1, 11))]),
        (daily(2), ["h 0", *map(str, range(3, 49, 3))]),
        (daily(14), ["day 0", *map(str, range(1, 15))]),
    ],
)
def test_axes_are_in_units_that_read_well(series: Series, labels: list[str]) -> None:
    texts = drawn(series, Setting(capacity=10.0)).findall(f"{SVG}text")
    assert [text.text for text in texts if text.get("class") == "x"] == labels


def test_the_legend_names_every_colour_and_the_scale_goes_up_to_the_most() -> None:
    picture = drawn(steps(10, 30, 10), Setting(capacity=10.0))
    texts = picture.findall(f"{SVG}text")
    assert [text.text for text in texts if text.get("class") == "y"] == ["0", "1", "2", "3", "4"]
    words = ["needed", "policy", "clairvoyant with start-up", "too few were ready"]
    legend = [text for text in texts if text.get("class") == "legend"]
    assert [text.text for text in legend] == words
    colours = [box for box in picture.findall(f"{SVG}rect") if box.get("height") == "9"]
    places = [float(box.get("x", "0")) for box in colours]
    assert places == [float(text.get("x", "0")) - 13 for text in legend]
    assert places == sorted(places)


def test_a_long_replay_is_a_small_picture() -> None:
    series, setting = daily(14), Setting(capacity=5.0)
    found = Replay(series, setting).run(Reactive(5.0))
    assert len(plot(series, setting, "reactive", found)) < 60_000
