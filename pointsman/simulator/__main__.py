"""`python -m pointsman.simulator --model NAME --port P`"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import uvloop

from pointsman.errors import system_reason
from pointsman.simulator.continuous_batching import ContinuousBatching, Limits
from pointsman.simulator.performance import FixedPace, Hardware, Pace, hardware
from pointsman.simulator.routes import ROUTES
from pointsman.simulator.server import Settings, SimulatedServer


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        measured = hardware(options.hardware)
        pace = pace_of(options, measured)
    except ValueError as error:
        fail(str(error))
    kv_tokens = options.kv_tokens or measured.kv_tokens
    settings = Settings(
        model=options.model,
        output_tokens=options.output_tokens,
        context_tokens=min(options.context_tokens, kv_tokens // options.block_size * options.block_size),
        block_size=options.block_size,
        kv_tokens=kv_tokens,
        hashes_prompts=isinstance(pace, ContinuousBatching),
    )
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    time.sleep(options.start_seconds)
    uvloop.run(serve(options, settings, pace))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="pointsman.simulator")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=0, help="default 0: a free one, which is printed")
    made.add_argument("--model", required=True, help="the name of the model")
    made.add_argument("--hardware", default="8B|h100_sxm|vllm|tp1", help="the hardware whose pace it simulates")
    made.add_argument("--time-scale", type=float, default=1.0, help="speed factor; 2 is twice as fast")
    made.add_argument("--tokens-per-second", type=float, help="fixed pace of every answer, whatever the load")
    made.add_argument("--first-token-ms", type=float, help="fixed time to the first token")
    made.add_argument("--max-num-seqs", type=int, default=256, help="maximum requests at once")
    made.add_argument("--max-num-batched-tokens", type=int, default=8192, help="maximum tokens per step")
    made.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    made.add_argument("--kv-tokens", type=int, help="tokens in the KV cache (default: that of the hardware)")
    made.add_argument("--context-tokens", type=int, default=32_768, help="maximum tokens of prompt and answer together")
    made.add_argument("--output-tokens", type=int, default=128, help="tokens of an answer without max_tokens")
    made.add_argument("--start-seconds", type=float, default=0.0, help="delay before it listens")
    made.add_argument("--seed", type=int, default=0, help="seed for faults with a probability")
    made.add_argument("--fault", action="append", default=[], metavar="JSON", help="see faults.py")
    return made


def pace_of(options: argparse.Namespace, measured: Hardware, *, every_token: bool = True) -> Pace:
    if options.tokens_per_second is None and options.first_token_ms is None:
        limits = Limits(
            options.max_num_seqs,
            options.max_num_batched_tokens,
            options.block_size,
            options.kv_tokens,
            options.time_scale,
        )
        return ContinuousBatching(measured, limits, every_token=every_token)
    token_s = 1.0 / options.tokens_per_second if options.tokens_per_second else 0.0
    first_token_s = (options.first_token_ms or 0.0) / 1000.0
    scale = options.time_scale
    kv_tokens = options.kv_tokens or measured.kv_tokens
    return FixedPace(first_token_s / scale, token_s / scale, options.max_num_seqs, kv_tokens)


async def serve(options: argparse.Namespace, settings: Settings, pace: Pace) -> None:
    server = SimulatedServer(settings, ROUTES, pace, f"{options.seed}:{options.port}")
    try:
        port = await server.listen(options.host, options.port)
    except OSError as error:
        fail(f"port {options.port} of {options.host} is not available: {system_reason(error)}", code=1)
    try:
        server.add_faults([json.loads(fault) for fault in options.fault])
    except ValueError as error:
        fail(f"--fault: {error}")
    print(f"{settings.model} is simulated at http://{options.host}:{port}", flush=True)
    await asyncio.get_running_loop().create_future()


def leave(*_: object) -> None:
    """Exit at once: there is nothing to save."""
    os._exit(0)


def fail(why: str, code: int = os.EX_CONFIG) -> NoReturn:
    """Print the reason, and exit. The default `code` says that no further try can succeed."""
    print(f"the simulated engine cannot start: {why}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
