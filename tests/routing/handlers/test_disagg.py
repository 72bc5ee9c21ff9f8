from collections.abc import Sequence

import pytest

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.handlers import AlwaysDisaggPdDecider, DisaggProfileHandler
from pointsman.routing.handlers.disagg import Results, StageDeciders, StageProfiles
from pointsman.routing.plugins import NEAR, Endpoints, RequestCycle
from pointsman.selection import ProfileFailure, ProfileResult, SchedulingFailure, SchedulingResult
from tests.routing.fleets import Candidate, result_of, scene

THREE = [Candidate(host="10.0.0.1"), Candidate(host="10.0.0.2"), Candidate(host="fd00::3")]
ALL = ("decode", "prefill", "encode")


class Asked:
    """A decider that always decides the same and records its calls."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.about: list[Endpoint | None] = []

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        self.about.append(decode)
        return self.answer


YES = AlwaysDisaggPdDecider()
ROSTER = scene(THREE)[1]


def chose(*targets: int) -> ProfileResult[Endpoint]:
    return result_of("a stage", ROSTER, *targets)


def no_endpoint() -> ProfileFailure[Endpoint]:
    return ProfileFailure("a stage", 3, [])


def run(handler: DisaggProfileHandler, outcomes: Results, profiles: Sequence[str] = ALL) -> list[str]:
    """The profiles that run, in order, given the result of each."""
    cycle, _ = scene(THREE)
    results: dict[str, ProfileResult[Endpoint] | ProfileFailure[Endpoint]] = {}
    order: list[str] = []
    while picked := handler.pick_profiles(cycle, profiles, results):
        [name] = picked
        assert name not in order
        order.append(name)
        results[name] = outcomes.get(name) or chose(0)
    return order


def decode_first(prefill: object = None, encode: object = None) -> DisaggProfileHandler:
    return DisaggProfileHandler(deciders=StageDeciders(prefill, encode))  # type: ignore[arg-type]


def prefill_first(encode: object = None) -> DisaggProfileHandler:
    return DisaggProfileHandler("prefill-first", deciders=StageDeciders(None, encode))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("handler", "outcomes", "profiles", "expected"),
    [
        (decode_first(), {}, ALL, ["decode"]),
        (decode_first(YES, YES), {}, ALL, ["decode", "encode", "prefill"]),
        (decode_first(YES, Asked(False)), {}, ALL, ["decode", "prefill"]),
        (decode_first(Asked(False), YES), {}, ALL, ["decode", "encode"]),
        (decode_first(YES), {}, ALL, ["decode", "prefill"]),
        (decode_first(YES, YES), {}, ("decode", "prefill"), ["decode", "prefill"]),
        (
            decode_first(YES, YES),
            {"encode": no_endpoint(), "prefill": no_endpoint()},
            ALL,
            ["decode", "encode", "prefill"],
        ),
        (decode_first(YES, YES), {"decode": no_endpoint()}, ALL, ["decode"]),
        (decode_first(YES, YES), {"decode": chose()}, ALL, ["decode"]),
        (prefill_first(), {}, ALL, ["prefill", "decode"]),
        (prefill_first(YES), {}, ALL, ["prefill", "encode", "decode"]),
        (prefill_first(Asked(False)), {}, ALL, ["prefill", "decode"]),
        (prefill_first(YES), {"prefill": no_endpoint(), "encode": no_endpoint()}, ALL, ["prefill", "encode", "decode"]),
        (prefill_first(YES), {"decode": no_endpoint()}, ALL, ["prefill", "encode", "decode"]),
        (prefill_first(), {}, ("decode",), ["decode"]),
    ],
)
def test_the_order_of_stages(
    handler: DisaggProfileHandler, outcomes: Results, profiles: Sequence[str], expected: list[str]
) -> None:
    assert run(handler, outcomes, profiles) == expected


def test_a_decider_is_called_once_with_the_endpoint_that_decodes() -> None:
    prefill, encode = Asked(True), Asked(False)
    run(decode_first(prefill, encode), {"decode": chose(2)})
    assert prefill.about == encode.about == [ROSTER[2]]
    encode.about.clear()
    run(prefill_first(encode), {})
    assert encode.about == [None]


def test_profiles_may_have_other_names() -> None:
    handler = DisaggProfileHandler(profiles=StageProfiles("d", "p", "e"), deciders=StageDeciders(YES, YES))
    assert run(handler, {}, ("p", "d", "e", "decode")) == ["d", "e", "p"]


@pytest.mark.parametrize("order", ["prefill-first", "Prefill_First", "PREFILLFIRST"])
def test_spellings_of_the_order(order: str) -> None:
    assert DisaggProfileHandler(order).prefill_first


@pytest.mark.parametrize(("handler", "first"), [(decode_first(prefill=YES), "decode"), (prefill_first(), "prefill")])
def test_the_second_stage_knows_where_the_first_one_is(handler: DisaggProfileHandler, first: str) -> None:
    cycle, _ = scene(THREE)
    assert handler.pick_profiles(cycle, ("decode", "prefill"), {}) == (first,)
    assert cycle.get(NEAR) is None
    handler.pick_profiles(cycle, ("decode", "prefill"), {first: chose(2)})
    assert cycle[NEAR] is chose(2).targets[0]


def test_results() -> None:
    cycle, handler = scene(THREE)[0], DisaggProfileHandler()
    decode, prefill = chose(0), chose(1)
    result = handler.process_results(cycle, {"prefill": prefill, "encode": no_endpoint(), "decode": decode})
    assert isinstance(result, SchedulingResult)
    assert (result.primary, dict(result.results)) == ("decode", {"decode": decode, "prefill": prefill})
    empty = handler.process_results(cycle, {"decode": chose(), "prefill": prefill})
    assert isinstance(empty, SchedulingFailure)
    assert str(empty) == 'profile "decode" chose no endpoint'
    failure = handler.process_results(cycle, {"decode": no_endpoint(), "prefill": prefill})
    assert isinstance(failure, SchedulingFailure)
    assert list(failure.failures) == ["decode"]


@pytest.mark.parametrize(
    ("stages", "prefiller", "encoders"),
    [
        ({}, None, None),
        ({"prefill": chose(1, 0)}, "10.0.0.2:8001", None),
        ({"encode": chose(2, 0)}, None, "[fd00::3]:8002,10.0.0.1:8000"),
    ],
)
def test_headers(stages: dict[str, ProfileResult[Endpoint]], prefiller: str | None, encoders: str | None) -> None:
    result = SchedulingResult({"decode": chose(0), **stages}, "decode")
    assert DisaggProfileHandler().request_headers(scene(THREE)[0], result) == {
        "x-prefiller-host-port": prefiller,
        "x-encoder-hosts-ports": encoders,
    }


@pytest.mark.parametrize(
    ("order", "deciders", "message"),
    [
        ("encode-first", StageDeciders(), 'stageOrder is "encode-first"; it must be decode-first or prefill-first'),
        ("prefill-first", StageDeciders(prefill=YES), "deciders.prefill is set with stageOrder prefill-first"),
        ("decode-first", StageDeciders(encode=3), "deciders.encode is of type int; it must be a decider"),  # type: ignore[arg-type]
    ],
)
def test_bad_parameters(order: str, deciders: StageDeciders, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DisaggProfileHandler(order, deciders=deciders)
