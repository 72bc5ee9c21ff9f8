"""`pointsman key`: create an API key, and its line for the manifest."""

import argparse
import json
import re
from typing import Any

from pointsman.cli.options import add_command

EXAMPLE = """\
examples:
  pointsman key --tenant red --name laptop
  pointsman key --admin
"""

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "key",
        summary="create an API key",
        description="Print a new key, once, and the line for the manifest, which has only its hash. If you lose the "
        "key, create a new one.",
        example=EXAMPLE,
    )
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--tenant", type=_word, default="default", help="a tenant of gateway.tenants (default: default)")
    whose.add_argument("--admin", action="store_true", help="create a key for the admin API instead")
    parser.add_argument("--name", type=_word, help="a name for logs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _word(text: str) -> str:
    if not WORD.fullmatch(text):
        raise argparse.ArgumentTypeError(f'"{text}" must be letters, digits and any of . _ -')
    return text


def run(args: argparse.Namespace) -> int:
    import secrets
    from hashlib import sha256

    key = f"pm-{secrets.token_urlsafe(32)}"
    digest = sha256(key.encode()).hexdigest()
    named = f"name: {args.name}, " if args.name else ""
    line = f"adminKeySha256: {digest}" if args.admin else f"- {{{named}tenant: {args.tenant}, sha256: {digest}}}"
    if args.json:
        print(json.dumps({"key": key, "sha256": digest, "manifest": line}, indent=2))
    else:
        where = "gateway" if args.admin else "gateway.keys"
        print(f"the key, shown once:\n  {key}\nunder {where} of the manifest:\n  {line}")
    return 0
