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

from pointsman.simulator.continuous_batching import ContinuousBatching, Limits
from pointsman.simulator.fixed_pace import FixedPace
from pointsman.simulator.performance import Hardware, Pace, hardware
from pointsman.simulator.routes import ROUTES
from pointsman.simulator.server import Settings, SimulatedServer


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until told to stop."""
    wanted = options().parse_args(arguments)
    try:
        measured = hardware(wanted.hardware)
        pace = pace_of(wanted, measured)
    except ValueError as error:
        fail(str(error))
    kv_tokens = wanted.kv_tokens or measured.kv_tokens
    settings = Settings(
        model=wanted.model,
        output_tokens=wanted.output_tokens,
        context_tokens=min(wanted.context_tokens, kv_tokens // wanted.block_size * wanted.block_size),
        block_size=wanted.block_size,
        kv_tokens=kv_tokens,
        hashes_prompts=isinstance(pace, ContinuousBatching),
    )
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    time.sleep(wanted.start_seconds)
    uvloop.run(serve(wanted, settings, pace))


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="pointsman.simulator")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed")
    parser.add_argument("--model", required=True, help="what clients call the model")
    parser.add_argument("--hardware", default="8B|h100_sxm|vllm|tp1", help="whose pace it keeps")
    parser.add_argument("--time-scale", type=float, default=1.0, help="2: twice as fast")
    parser.add_argument("--tokens-per-second", type=float, help="a fixed pace for every answer, whatever else runs")
    parser.add_argument("--first-token-ms", type=float, help="a fixed time to the first token")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="requests at once")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="tokens in one step")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    parser.add_argument("--kv-tokens", type=int, help="tokens in the KV cache, if not what the hardware has")
    parser.add_argument("--context-tokens", type=int, default=32_768, help="prompt and answer together, at most")
    parser.add_argument("--output-tokens", type=int, default=128, help="how long an answer is by itself")
    parser.add_argument("--start-seconds", type=float, default=0.0, help="until it listens")
    parser.add_argument("--seed", type=int, default=0, help="for faults with a probability")
    parser.add_argument("--fault", action="append", default=[], metavar="JSON", help="see faults.py")
    return parser


def pace_of(wanted: argparse.Namespace, measured: Hardware) -> Pace:
    """Tokens as hardware would give them, or at a fixed pace."""
    if wanted.tokens_per_second is None and wanted.first_token_ms is None:
        limits = Limits(
            wanted.max_num_seqs, wanted.max_num_batched_tokens, wanted.block_size, wanted.kv_tokens, wanted.time_scale
        )
        return ContinuousBatching(measured, limits)
    token_s = 1.0 / wanted.tokens_per_second if wanted.tokens_per_second else 0.0
    first_token_s = (wanted.first_token_ms or 0.0) / 1000.0
    scale = wanted.time_scale
    kv_tokens = wanted.kv_tokens or measured.kv_tokens
    return FixedPace(first_token_s / scale, token_s / scale, wanted.max_num_seqs, kv_tokens)


async def serve(wanted: argparse.Namespace, settings: Settings, pace: Pace) -> None:
    """Listen, and do what comes."""
    server = SimulatedServer(settings, ROUTES, pace, f"{wanted.seed}:{wanted.port}")
    try:
        port = await server.listen(wanted.host, wanted.port)
    except OSError as error:
        fail(f"port {wanted.port} of {wanted.host} cannot be used: {os.strerror(error.errno or 0)}")
    try:
        server.add_faults([json.loads(fault) for fault in wanted.fault])
    except ValueError as error:
        fail(f"--fault: {error}")
    print(f"{settings.model} is simulated at http://{wanted.host}:{port}", flush=True)
    await asyncio.get_running_loop().create_future()


def leave(*_: object) -> None:
    """Gone at once: there is nothing to save."""
    os._exit(0)


def fail(why: str) -> NoReturn:
    """Say why, and give up."""
    sys.exit(f"the simulated engine cannot start: {why}")


if __name__ == "__main__":
    main()
