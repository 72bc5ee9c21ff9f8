"""`grpcListen` in a manifest."""

import subprocess
import sys

import pytest

from pointsman.config import load_manifest
from pointsman.errors import ConfigError


def manifest(listen: str) -> str:
    return f"kind: Pointsman\ngateway:\n  grpcListen: '{listen}'\n"


def test_grpc_is_opened_only_if_configured() -> None:
    assert load_manifest("kind: Pointsman\n").gateway.grpc_listen == ""
    assert load_manifest(manifest("127.0.0.1:0")).gateway.grpc_listen == "127.0.0.1:0"


@pytest.mark.parametrize("listen", ["127.0.0.1", ":8080", "127.0.0.1:99999", "http://localhost:80"])
def test_an_invalid_address(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"3: gateway.grpcListen: expected host:port"):
        load_manifest(manifest(listen))


def test_an_address_open_to_all_gives_a_warning() -> None:
    [warning] = load_manifest(manifest("0.0.0.0:9000")).warnings
    assert warning.field == "gateway.grpcListen"
    assert warning.message.startswith("the gateway listens on 0.0.0.0:9000 and has no keys")


def test_grpc_packages_are_loaded_only_when_needed() -> None:
    looked = "import sys, pointsman.gateway.grpc; print([one for one in sys.modules if one in ('grpc', 'google')])"
    done = subprocess.run([sys.executable, "-c", looked], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
