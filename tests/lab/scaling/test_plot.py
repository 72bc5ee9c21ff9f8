from xml.etree import ElementTree

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


def test_a_long_replay_is_a_small_picture() -> None:
    series, setting = daily(14), Setting(capacity=5.0)
    found = Replay(series, setting).run(Reactive(5.0))
    assert len(plot(series, setting, "reactive", found)) < 60_000
