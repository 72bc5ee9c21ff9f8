import pytest

from pointsman.routing.filters import DecodeFilter, EncodeFilter, PrefillFilter
from tests.routing.fleets import Candidate, both_lengths, kept, reasons, scene

ROLES = ["decode", "prefill-decode", "both", "encode-prefill-decode", "prefill", "encode-prefill", "encode", "cook"]
CANDIDATES = [*(Candidate(labels={"llm-d.ai/role": role}) for role in ROLES), Candidate()]


@both_lengths
@pytest.mark.parametrize(
    ("demands", "expected"),
    [
        (DecodeFilter(), ["decode", "prefill-decode", "both", "encode-prefill-decode", None]),
        (PrefillFilter(), ["prefill-decode", "both", "encode-prefill-decode", "prefill", "encode-prefill"]),
        (EncodeFilter(), ["encode-prefill-decode", "encode-prefill", "encode"]),
    ],
)
def test_keeps_endpoints_with_the_role(
    demands: DecodeFilter | PrefillFilter | EncodeFilter, expected: list[str | None], long: bool
) -> None:
    places = kept(demands, *scene(CANDIDATES, long=long))
    assert [CANDIDATES[place].labels.get("llm-d.ai/role") for place in places] == expected


def test_says_why() -> None:
    cycle, roster = scene([Candidate(), Candidate(labels={"llm-d.ai/role": "decode"})])
    assert reasons(EncodeFilter(), cycle, roster) == [
        "not for encode: llm-d.ai/role is absent",
        "not for encode: llm-d.ai/role is decode",
    ]
