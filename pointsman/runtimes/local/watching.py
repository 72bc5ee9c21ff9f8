"""Files that list endpoints, watched for changes. A file that is broken or gone leaves what it last said in force."""

from pathlib import Path

import msgspec

from pointsman.config.deployments import load_endpoints
from pointsman.config.plan import DeploymentPlan, PointsmanPlan
from pointsman.control import Desired, DesiredEndpoint
from pointsman.errors import ConfigError


class Watched(msgspec.Struct):
    """One file, and what it last said."""

    path: Path
    seen: tuple[int, int, int] | None = None
    """(inode, time of change, size) when it was last read; None: it was not there."""
    endpoints: tuple[DesiredEndpoint, ...] = ()
    problem: str = ""


class EndpointsFiles:
    """The files of all deployments that have one."""

    def __init__(self) -> None:
        self._by_deployment: dict[str, Watched] = {}
        self._plan = PointsmanPlan()

    def configure(self, plan: PointsmanPlan) -> None:
        """Watch the files of these deployments from now on."""
        self._plan = plan
        before, self._by_deployment = self._by_deployment, {}
        for one in plan.deployments:
            if one.endpoints_file is not None:
                known = before.get(one.name)
                kept = known.endpoints if known is not None and known.path == one.endpoints_file else ()
                self._by_deployment[one.name] = Watched(one.endpoints_file, endpoints=kept)

    def look(self) -> bool:
        """Read what has changed. Whether other endpoints are listed now."""
        changed = False
        for plan in self._plan.deployments:
            watched = self._by_deployment.get(plan.name)
            if watched is not None and _read(watched, plan):
                changed = True
        return changed

    def desired(self) -> Desired:
        """What the manifest wants, and the endpoints of the files."""
        wanted = {}
        for name, deployment in self._plan.desired().deployments.items():
            watched = self._by_deployment.get(name)
            more = watched.endpoints if watched is not None else ()
            wanted[name] = msgspec.structs.replace(deployment, endpoints=(*deployment.endpoints, *more))
        return Desired(wanted)

    def problems(self) -> list[str]:
        """What is wrong with which file."""
        return [watched.problem for watched in self._by_deployment.values() if watched.problem]

    def copy(self) -> "EndpointsFiles":
        """To try a manifest out on."""
        twin = EndpointsFiles()
        twin._by_deployment = {name: msgspec.structs.replace(one) for name, one in self._by_deployment.items()}
        return twin


def _read(watched: Watched, plan: DeploymentPlan) -> bool:
    try:
        stat = watched.path.stat()
    except OSError as error:
        gone = f"{watched.path}: {error.strerror}"
        watched.problem = f"{gone}; the endpoints that it last listed are kept" if watched.endpoints else gone
        watched.seen = None
        return False
    seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if seen == watched.seen:
        return False
    watched.seen, watched.problem = seen, ""
    before = watched.endpoints
    try:
        watched.endpoints = load_endpoints(watched.path, [endpoint.name for endpoint in plan.desired.endpoints])
    except ConfigError as error:
        watched.problem = f"{error}; the endpoints that it last listed are kept"
    return watched.endpoints != before
