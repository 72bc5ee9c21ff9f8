"""The handler that lets a request name its profile."""

from collections.abc import Sequence

from pointsman.errors import shown
from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import RequestCycle
from pointsman.selection import SchedulingFailure, SchedulingResult, SingleProfileHandler
from pointsman.selection.profile import ProfileResults


class HeaderProfileHandler:
    """Runs the profile that the header `header_name` names, else `default_profile`. A single profile always runs.

    An unknown name runs no profile, so the request fails.
    """

    def __init__(self, header_name: str = "EPP-Profile", default_profile: str = "decode") -> None:
        self.header = header_name.lower()
        self.default = default_profile
        self._single = SingleProfileHandler()

    def pick_profiles(
        self, cycle: RequestCycle, profiles: Sequence[str], results: ProfileResults[Endpoint]
    ) -> Sequence[str]:
        if results:
            return ()
        if len(profiles) == 1:
            return profiles
        wanted = cycle.request.headers.get(self.header, "").strip() or self.default
        if wanted in profiles:
            return (wanted,)
        if cycle.trace is not None:
            facts = {"profile": shown(wanted), "header": self.header, "profiles": tuple(profiles)}
            cycle.trace.note(Reason("unknown-profile", facts))
        return ()

    def process_results(
        self, cycle: RequestCycle, results: ProfileResults[Endpoint]
    ) -> SchedulingResult[Endpoint] | SchedulingFailure[Endpoint]:
        return self._single.process_results(cycle, results)
