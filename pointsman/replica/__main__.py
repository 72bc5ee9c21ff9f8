"""`python -m pointsman.replica --host H --port P`, with what to run in POINTSMAN_REPLICA."""

import argparse
import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import uvloop

from pointsman.errors import PointsmanError
from pointsman.replica.server import ReplicaServer
from pointsman.replica.target import Recipe, Surroundings, read_environment


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="pointsman.replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed")
    wanted = parser.parse_args(arguments)
    try:
        recipe, surroundings = read_environment(os.environ)
    except PointsmanError as error:
        fail(str(error))
    uvloop.run(serve(wanted.host, wanted.port, recipe, surroundings))


async def serve(host: str, port: int, recipe: Recipe, surroundings: Surroundings) -> None:
    """Listen at once, so that health can be asked while the code is loaded."""
    server = ReplicaServer(recipe, surroundings)
    loop = asyncio.get_running_loop()
    try:
        taken = await server.listen(host, port)
    except OSError as error:
        fail(f"port {port} of {host} cannot be used: {os.strerror(error.errno or 0)}")
    loading = loop.create_task(server.load())

    def stop() -> None:
        if not loading.done():
            leave(0)
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    print(f"{recipe.app}.{recipe.node} is loading at http://{host}:{taken}", flush=True)
    try:
        await loading
    except Exception as error:
        fail(str(error) if isinstance(error, PointsmanError) else f"{type(error).__name__}: {error}", error.__cause__)
    await server.done()


def fail(why: str, because: BaseException | None = None) -> NoReturn:
    """Say why, and give up; the last line is the one that others show."""
    if because is not None:
        traceback.print_exception(because)
    print(f"the replica cannot start: {why}", file=sys.stderr)
    leave(1)


def leave(code: int) -> NoReturn:
    """Gone at once, whatever the code that was being loaded is doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
