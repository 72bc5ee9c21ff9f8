"""Clients for the admin API of a running plane, over the socket in its state directory or over TCP."""

import argparse
import asyncio
import json
import os
from errno import ENAMETOOLONG
from getpass import getuser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from pointsman.cli.options import KEY, SOCKET, WrongUsage, state_folder
from pointsman.errors import PointsmanError, command, shown, system_reason
from pointsman.http.client import NoResponse, fetch
from pointsman.http.pool import Target, UnixSocket

PREFIX = "/admin/v1"
TIMEOUT_S = 30.0
MAX_BYTES = 1 << 30


class NoPlane(PointsmanError):
    """No plane listens at the address."""

    def __init__(self, found: str, advice: str) -> None:
        self.found = found
        super().__init__(f"{found}; {advice}")


class PlaneSilent(PointsmanError):
    """The plane listens, but does not answer."""


class PlaneRefused(PointsmanError):
    """The plane answered with an error."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        self.status, self.error = status, error
        self.problems = tuple(error.get("problems") or ())
        super().__init__(str(error.get("message") or f"the plane answered with status {status}"))


def client_of(args: argparse.Namespace) -> "Client":
    return Remote(args.url, os.environ.get(KEY, "")) if args.url else Client(state_folder(args.state))


class TcpAddress(NamedTuple):
    host: str
    port: int
    tls: bool


class Client:
    """Sends requests to the plane that uses a state directory."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._target: Target = UnixSocket(state / SOCKET)
        self._headers = f"content-type: application/json\r\naccept: application/json\r\n{_author()}"

    def get(self, *path: str, **query: Any) -> Any:
        """Send a GET request. Query parameters that are None are left out."""
        parameters = urlencode({name: value for name, value in query.items() if value is not None})
        return self._request("GET", f"{_path(path)}?{parameters}" if parameters else _path(path))

    def post(self, *path: str, body: Any = None) -> Any:
        return self._request("POST", _path(path), b"" if body is None else json.dumps(body).encode())

    def delete(self, *path: str) -> Any:
        return self._request("DELETE", _path(path))

    def is_there(self) -> bool:
        try:
            self.get("status")
        except NoPlane:
            return False
        except PlaneSilent:  # the plane is about to end, or too busy to answer
            return True
        return True

    def _request(self, method: str, target: str, body: bytes = b"") -> Any:
        request = (self._target, method, target, body)
        try:
            status, content = asyncio.run(
                fetch(*request, timeout_s=TIMEOUT_S, headers=self._headers, max_bytes=MAX_BYTES)
            )
        except NoResponse as error:
            if error.error is not None:
                raise self._unreachable(error.error) from error
            raise PlaneSilent(f"the plane does not answer: {error}") from error
        return _decoded(status, content)

    def _unreachable(self, error: OSError) -> PointsmanError:
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return NoPlane(f"no plane is running in {self._state}", f"start one with: {command('up', 'FILE')}")
        if isinstance(error, NotADirectoryError) or error.errno == ENAMETOOLONG:
            found = f"no plane is running in {shown(str(self._state))}"
            return NoPlane(found, f"that is not a state directory ({system_reason(error)}); choose another --state")
        return PlaneSilent(f"cannot talk to the plane at {self._state / SOCKET}: {system_reason(error)}")


def _author() -> str:
    """The header with the operator's name, for the log of events. Empty if there is no name in printable ASCII."""
    try:
        name = getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        return ""
    return f"x-pointsman-author: {name}\r\n" if name.isprintable() and name.isascii() else ""


class Remote(Client):
    """Sends requests to a plane over TCP, with its admin key."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        try:
            port, right = parts.port, parts.scheme in ("http", "https") and parts.path in ("", "/")
        except ValueError:
            port, right = None, False
        if not right or not parts.hostname:
            raise WrongUsage(f"--url must be http://host:port or https://host:port, found {url}")
        if not key:
            raise PointsmanError(f"--url needs the admin key of the plane in the environment: {KEY}=... pointsman ...")
        super().__init__(Path())
        self._url = url
        tls = parts.scheme == "https"
        self._target = TcpAddress(parts.hostname, port or (443 if tls else 80), tls)
        self._headers += f"authorization: Bearer {key}\r\n"

    def _unreachable(self, error: OSError) -> PointsmanError:
        found = f"no plane answers at {self._url} ({system_reason(error)})"
        return NoPlane(found, "check the address of its gateway")


def _path(parts: tuple[str, ...]) -> str:
    return "/".join([PREFIX, *(quote(part, safe="") for part in parts)])


def _decoded(status: int, body: bytes) -> Any:
    try:
        answer = json.loads(body) if body else {}
    except ValueError:
        answer = None
    if status < 300 and answer is not None:
        return answer
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        raise PlaneRefused(status, error)
    shown = body[:200].decode("utf-8", "replace")
    raise PointsmanError(f"expected a plane's answer, found status {status}: {shown or 'nothing'}")
