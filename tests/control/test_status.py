"""Why no instance takes requests, for clients that waited for one."""

import pytest

from pointsman.control import InstanceStatus, Phase
from pointsman.control.status import unavailability
from pointsman.reasons import Reason
from tests.scaling.test_deployment import instance

STARTING = instance("m-1", Phase.STARTING, since=90.0)
FAILED = instance(
    "m-2",
    Phase.BACKING_OFF,
    since=90.0,
    until=105.0,
    restarts=2,
    reason=Reason("exited", {"why": "exit code 7: no weights at /x"}),
)
ONCE = instance("m-2", Phase.BACKING_OFF, until=105.0)
UNPLACED = instance("m-3", Phase.BACKING_OFF, since=90.0, until=105.0, unplaced=True)


@pytest.mark.parametrize(
    ("instances", "start_up_s", "expected"),
    [
        ([], 30.0, ("no instance is wanted now; an operator may start one", None)),
        ([STARTING], 30.0, ("m-1 has been starting for 10 s", 20.0)),
        ([STARTING], 5.0, ("m-1 has been starting for 10 s", 0.0)),  # any moment
        ([STARTING], None, ("m-1 has been starting for 10 s", None)),
        ([FAILED], 30.0, ("m-2 has failed 3 times, and restarts in 5 s", 35.0)),
        ([ONCE], None, ("m-2 has failed once, and restarts in 5 s", 5.0)),
        ([UNPLACED], 30.0, ("there is no place for m-3 yet", None)),
        ([UNPLACED, FAILED, STARTING], 30.0, ("m-1 has been starting for 10 s", 20.0)),
        ([instance("m-4", Phase.STOPPING)], 30.0, ("m-4 is stopping", None)),
    ],
)  # fmt: skip
def test_the_instance_that_will_be_ready_first_is_the_reason(
    instances: list[InstanceStatus], start_up_s: float | None, expected: tuple[str, float | None]
) -> None:
    found = unavailability(instances, start_up_s, 100.0)
    assert (str(found.why), found.retry_s) == expected
