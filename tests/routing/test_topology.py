"""How near two instances are, and the tree of all locations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.topology import Nearness, nearness, tree
from pointsman.types import ExecutionInstance

NVLINK, NUMA, RACK = "pointsman/nvlink-domain", "pointsman/numa-node", "pointsman/rack"


def at(name: str, host: str = "", **labels: str) -> ExecutionInstance:
    keys = {"nvlink": NVLINK, "numa": NUMA, "rack": RACK}
    return ExecutionInstance(instance_id=name, host=host, labels={keys[key]: place for key, place in labels.items()})


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (at("a", "h"), at("a", "elsewhere"), Nearness.SAME_INSTANCE),
        (at("a", "h", nvlink="0", numa="0"), at("b", "h", nvlink="0", numa="1"), Nearness.SAME_NVLINK),
        (at("a", "h", nvlink="0", numa="0"), at("b", "h", nvlink="1", numa="0"), Nearness.SAME_NUMA),
        (at("a", "h", numa="0"), at("b", "h", numa="0"), Nearness.SAME_NUMA),
        (at("a", "h", numa="0", rack="r"), at("b", "h", rack="q"), Nearness.SAME_HOST),
        (at("a", "h"), at("b", "h"), Nearness.SAME_HOST),
        # A domain counts only within one host.
        (at("a", "h", nvlink="0", numa="0"), at("b", "g", nvlink="0", numa="0"), Nearness.FAR),
        (at("a", "h", rack="r"), at("b", "g", rack="r"), Nearness.SAME_RACK),
        (at("a", "h", rack="r"), at("b", "g", rack="q"), Nearness.FAR),
        # An unknown location is far, also from another unknown one.
        (at("a"), at("b"), Nearness.FAR),
        (at("a", nvlink="0"), at("b", nvlink="0"), Nearness.FAR),
        (at("a", rack="r"), at("b", rack="r"), Nearness.SAME_RACK),
        (at("a", "h", rack="r"), at("b", "g"), Nearness.FAR),
    ],
)
def test_nearness_is_the_closest_location_that_two_instances_share(
    one: ExecutionInstance, other: ExecutionInstance, expected: Nearness
) -> None:
    assert nearness(one, other) is expected
    assert nearness(other, one) is expected


def test_the_tree_is_sorted() -> None:
    found = tree(
        [
            at("e", "h2", rack="r2"),
            at("a", "h2", rack="r1", nvlink="1"),
            at("d", "h1", rack="r1", numa="0"),
            at("c", "h2", rack="r1", nvlink="0"),
            at("b", "h2", rack="r1", nvlink="1"),
            at("f"),
        ]
    )
    assert found == {
        "(unknown)": {"(unknown)": {"(unknown)": ["f"]}},
        "r1": {"h1": {"numa 0": ["d"]}, "h2": {"nvlink 0": ["c"], "nvlink 1": ["a", "b"]}},
        "r2": {"h2": {"(unknown)": ["e"]}},
    }
    assert list(found) == ["(unknown)", "r1", "r2"]
    assert list(found["r1"]) == ["h1", "h2"]
    assert list(found["r1"]["h2"]) == ["nvlink 0", "nvlink 1"]
    assert tree([]) == {}


places = st.builds(
    lambda host, labels: ExecutionInstance(instance_id="?", host=host, labels=labels),
    st.sampled_from(["", "h", "g"]),
    st.dictionaries(st.sampled_from([NVLINK, NUMA, RACK]), st.sampled_from("01")),
)


@given(st.lists(places, max_size=8))
def test_every_instance_is_in_the_tree_once(given_: list[ExecutionInstance]) -> None:
    instances = [
        ExecutionInstance(instance_id=f"i{n}", host=place.host, labels=place.labels) for n, place in enumerate(given_)
    ]
    found = [
        name
        for hosts in tree(instances).values()
        for domains in hosts.values()
        for names in domains.values()
        for name in names
    ]
    assert sorted(found) == sorted(instance.instance_id for instance in instances)
