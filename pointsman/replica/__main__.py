"""`python -m pointsman.replica --host H --port P`; POINTSMAN_REPLICA says what to run."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import uvloop

from pointsman.errors import PointsmanError, system_reason
from pointsman.pipeline.sources import unpack_sources
from pointsman.replica.calls import own_traceback
from pointsman.replica.server import ReplicaServer
from pointsman.replica.sources import install
from pointsman.replica.target import LoadFailed, Recipe, Surroundings, read_environment


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="pointsman.replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default 0: a free one, which is printed")
    options = parser.parse_args(arguments)
    try:
        recipe, surroundings = read_environment(os.environ)
        install(unpack_sources(os.environ.pop("POINTSMAN_SOURCES", "")))
    except (PointsmanError, ValueError) as error:
        fail(str(error), code=os.EX_CONFIG)
    uvloop.run(serve(options.host, options.port, recipe, surroundings))


async def serve(host: str, port: int, recipe: Recipe, surroundings: Surroundings) -> None:
    """Listen at once, so that health checks are answered while the code is loaded."""
    server = ReplicaServer(recipe, surroundings)
    loop = asyncio.get_running_loop()
    try:
        taken = await server.listen(host, port)
    except OSError as error:
        fail(f"port {port} of {host} is not available: {system_reason(error)}")
    loading = loop.create_task(server.load())

    def stop() -> None:
        if not loading.done():
            exit_now(0)
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    print(f"{recipe.app}.{recipe.node} is loading at http://{host}:{taken}", flush=True)
    try:
        await loading
    except Exception as error:
        why = str(error) if isinstance(error, PointsmanError) else f"{type(error).__name__}: {error}"
        fail(why, error.__cause__, os.EX_CONFIG if isinstance(error, LoadFailed) and error.final else 1)
    await server.done()


def fail(why: str, cause: BaseException | None = None, code: int = 1) -> NoReturn:
    """Print the reason and exit. The status of the plane shows the last line. `code`: EX_CONFIG if a further try can
    succeed only after a change of the code, a package or an argument."""
    if cause is not None:
        print(own_traceback(cause), file=sys.stderr)
    print(f"the replica cannot start: {why}", file=sys.stderr)
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Exit at once, even while the user's code is being loaded."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
