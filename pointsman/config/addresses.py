"""Where servers are, as people write it: http://host:port and host:port."""

import re
from ipaddress import ip_address

from pointsman.config.wording import found

_HOST = r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_LISTEN = re.compile(rf"{_HOST}:(?P<port>\d{{1,5}})")
_URL = re.compile(rf"(?P<scheme>https?)://{_HOST}:(?P<port>\d{{1,5}})/?", re.IGNORECASE)

_ANY_URL = re.compile(rf"https?://{_HOST}(?::(?P<port>\d{{1,5}}))?(?:/.*)?", re.IGNORECASE)


def host_and_port(text: str) -> tuple[str, int]:
    """127.0.0.1:8080 or [::1]:8080, as sockets want it. Raises ValueError, with an example, for anything else."""
    match = _LISTEN.fullmatch(text)
    if match is None or int(match["port"]) > 65535 or not _is_host(match["host"]):
        raise ValueError(f"expected host:port, such as 127.0.0.1:8080 or [::1]:8080, found {found(text)}")
    return match["host"].strip("[]"), int(match["port"])


def base_url(text: str) -> tuple[str, str]:
    """http://host:port without a path, and its host:port. Raises ValueError, with an example, for anything else."""
    match = _URL.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535 or not _is_host(match["host"]):
        raise ValueError(f"expected http://host:port or https://host:port, without a path, found {found(text)}")
    place = f"{match['host'].lower()}:{int(match['port'])}"
    return f"{match['scheme'].lower()}://{place}", place


def is_url(text: str) -> bool:
    """Whether it is http://host, with or without a port and a path."""
    match = _ANY_URL.fullmatch(text)
    return match is not None and 1 <= int(match["port"] or 80) <= 65535 and _is_host(match["host"])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_host(host: str) -> bool:
    """A number in brackets, or that looks like one, must be one."""
    if host[0] != "[" and re.search(r"[^0-9.]", host):
        return True
    try:
        return ip_address(host.strip("[]")).version == (6 if host[0] == "[" else 4)
    except ValueError:
        return False
