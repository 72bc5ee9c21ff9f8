import pytest

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.handlers import HeaderProfileHandler
from pointsman.selection import ProfileFailure, SchedulingFailure, SchedulingResult, Trace
from tests.routing.fleets import Candidate, result_of, scene

TWO = ("decode", "batch")


@pytest.mark.parametrize(
    ("handler", "headers", "profiles", "expected"),
    [
        (HeaderProfileHandler(), {"epp-profile": "batch"}, TWO, ["batch"]),
        (HeaderProfileHandler(), {"epp-profile": "  batch "}, TWO, ["batch"]),
        (HeaderProfileHandler(), {}, TWO, ["decode"]),
        (HeaderProfileHandler(), {"epp-profile": "  "}, TWO, ["decode"]),
        (HeaderProfileHandler(), {"epp-profile": "Batch"}, TWO, []),
        (HeaderProfileHandler(), {}, ("one", "two"), []),
        (HeaderProfileHandler(default_profile="two"), {}, ("one", "two"), ["two"]),
        (HeaderProfileHandler("X-Lane"), {"x-lane": "batch", "epp-profile": "decode"}, TWO, ["batch"]),
        (HeaderProfileHandler(), {"epp-profile": "batch"}, ("only",), ["only"]),
    ],
)
def test_picks(
    handler: HeaderProfileHandler, headers: dict[str, str], profiles: tuple[str, ...], expected: list[str]
) -> None:
    cycle, roster = scene([Candidate()], headers=headers)
    assert list(handler.pick_profiles(cycle, profiles, {})) == expected
    assert list(handler.pick_profiles(cycle, profiles, {"decode": result_of("decode", roster, 0)})) == []


def test_an_unknown_name_is_noted() -> None:
    cycle, _ = scene([Candidate()], headers={"epp-profile": "bach"}, trace=Trace())
    assert HeaderProfileHandler().pick_profiles(cycle, TWO, {}) == ()
    assert cycle.trace is not None
    assert tuple(map(str, cycle.trace.notes)) == (
        'no profile is named "bach"; header epp-profile may say decode, batch',
    )


def test_results() -> None:
    cycle, roster = scene([Candidate()])
    handler, chosen = HeaderProfileHandler(), result_of("batch", roster, 0)
    result = handler.process_results(cycle, {"batch": chosen})
    assert isinstance(result, SchedulingResult)
    assert (result.primary, result.target) == ("batch", roster[0])
    failure: ProfileFailure[Endpoint] = ProfileFailure("batch", 1, [])
    assert isinstance(handler.process_results(cycle, {"batch": failure}), SchedulingFailure)
    assert isinstance(handler.process_results(cycle, {"batch": chosen, "decode": chosen}), SchedulingFailure)
