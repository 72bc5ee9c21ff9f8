"""The admin API of a running plane, as commands ask it: over the socket of its state directory, or over TCP."""

import argparse
import json
import os
import socket
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from pointsman.cli.options import KEY, SOCKET, state_folder
from pointsman.errors import PointsmanError

PREFIX = "/admin/v1"
TIMEOUT_S = 30.0
LONGEST_PATH = 100
"""Bytes of a unix socket's path; systems take 104 to 108."""


class NoPlane(PointsmanError):
    """Nobody answers where the plane should be."""

    def __init__(self, found: str, advice: str) -> None:
        self.found = found
        super().__init__(f"{found}; {advice}")


class PlaneSilent(PointsmanError):
    """The plane is there, and does not answer."""


class PlaneRefused(PointsmanError):
    """The plane answered with an error."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        self.status, self.error = status, error
        self.problems = tuple(error.get("problems") or ())
        super().__init__(str(error.get("message") or f"the plane answered with status {status}"))


def client_of(args: argparse.Namespace) -> "Client":
    """The plane that the command line names."""
    return Remote(args.url, os.environ.get(KEY, "")) if args.url else Client(state_folder(args.state))


class Client:
    """Asks the plane of a state directory."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def get(self, *path: str, **query: Any) -> Any:
        """What is there. `query`: what is None is left out."""
        asked = urlencode({name: value for name, value in query.items() if value is not None})
        return self._ask("GET", f"{_path(path)}?{asked}" if asked else _path(path))

    def post(self, *path: str, body: Any = None) -> Any:
        """Have something done."""
        return self._ask("POST", _path(path), b"" if body is None else json.dumps(body).encode())

    def delete(self, *path: str) -> Any:
        """Have something removed."""
        return self._ask("DELETE", _path(path))

    def is_there(self) -> bool:
        """Whether a plane runs."""
        try:
            self.get("status")
        except NoPlane:
            return False
        except PlaneSilent:  # it is about to end, or too busy to answer
            return True
        return True

    def _ask(self, method: str, target: str, body: bytes | None = None) -> Any:
        connection = self._connection()
        try:
            try:
                connection.connect()
            except OSError as error:
                raise self._nobody(error) from error
            connection.request(method, target, body, self._headers())
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, HTTPException) as error:
            raise PlaneSilent(f"the plane does not answer: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        return _understood(answer.status, said)

    def _connection(self) -> HTTPConnection:
        return _LocalConnection(self.state / SOCKET)

    def _headers(self) -> dict[str, str]:
        return {"content-type": "application/json", "accept": "application/json"}

    def _nobody(self, error: OSError) -> PointsmanError:
        if isinstance(error, FileNotFoundError | NotADirectoryError | ConnectionRefusedError):
            return NoPlane(f"no plane is running in {self.state}", "start one with: pointsman up FILE")
        return PlaneSilent(f"cannot talk to the plane at {self.state / SOCKET}: {error.strerror or error}")


class Remote(Client):
    """Asks a plane over TCP, with its admin key."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        try:
            port, right = parts.port, parts.scheme in ("http", "https") and parts.path in ("", "/")
        except ValueError:
            port, right = None, False
        if not right or not parts.hostname:
            raise PointsmanError(f"--url must be http://host:port or https://host:port, found {url}")
        if not key:
            raise PointsmanError(f"--url needs the admin key of the plane in the environment: {KEY}=... pointsman ...")
        self._url, self._key = url, key
        self._host, self._port, self._tls = parts.hostname, port, parts.scheme == "https"

    def _connection(self) -> HTTPConnection:
        make = HTTPSConnection if self._tls else HTTPConnection
        return make(self._host, self._port, timeout=TIMEOUT_S)

    def _headers(self) -> dict[str, str]:
        return {**super()._headers(), "authorization": f"Bearer {self._key}"}

    def _nobody(self, error: OSError) -> PointsmanError:
        found = f"no plane answers at {self._url} ({error.strerror or error})"
        return NoPlane(found, "check the address of its gateway")


class _LocalConnection(HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        if len(os.fsencode(self._path)) <= LONGEST_PATH:
            self.sock.connect(str(self._path))
            return
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")  # the same place by a shorter name
        finally:
            os.close(folder)


def _path(parts: tuple[str, ...]) -> str:
    return "/".join([PREFIX, *(quote(part, safe="") for part in parts)])


def _understood(status: int, said: bytes) -> Any:
    try:
        answer = json.loads(said) if said else {}
    except ValueError:
        answer = None
    if status < 300 and answer is not None:
        return answer
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        raise PlaneRefused(status, error)
    shown = said[:200].decode("utf-8", "replace")
    raise PointsmanError(f"expected a plane's answer, found status {status}: {shown or 'nothing'}")
