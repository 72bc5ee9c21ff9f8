"""llama.cpp's own HTTP server on GGUF weights: `python -m pointsman.engines.llama_cpp_server --port P --model FILE`.

Everything that can be wrong is said in one line on stderr, as the last one, with exit code 1. SIGTERM and SIGINT end it
at once with exit code 0; whoever stops it has drained it before.
"""

import argparse
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

HTTP_THREADS = 128
"""Its server keeps a thread for every open connection, idle ones too. When they run out, even /health waits."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve until told to stop."""
    wanted = options().parse_args(arguments)
    weights = weights_file(wanted.model)
    check_port(wanted.host, wanted.port)
    try:
        xllamacpp = importlib.import_module("xllamacpp")
    except ImportError as error:
        fail(f"xllamacpp cannot be imported ({error}); install it with: pip install 'pointsman[llamacpp]'")
    parameters = xllamacpp.CommonParams()
    fill(parameters, wanted, weights)
    if wanted.embeddings:
        parameters.pooling_type = xllamacpp.llama_pooling_type[f"LLAMA_POOLING_TYPE_{pooling(wanted.pooling, weights)}"]
    for assignment in wanted.set:
        assign(parameters, assignment)
    try:
        # While weights are loaded no Python runs, so until then signals keep their deadly default.
        server = xllamacpp.Server(parameters)
    except RuntimeError:
        time.sleep(0.2)  # its log is written by a thread of its own; the last line is to be ours
        fail(f"llama.cpp cannot serve {weights}; it says why in the lines above")
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    print(f"llama.cpp serves {wanted.alias} at {server.listening_address}", flush=True)
    while True:
        signal.pause()


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="pointsman.engines.llama_cpp_server", description=__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file, or package:NAME/FILE inside an installed package")
    parser.add_argument("--alias", default="model", help="what clients call the model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed")
    parser.add_argument("--slots", type=int, default=4, help="requests at once")
    parser.add_argument("--context-tokens", type=int, default=2048, help="prompt and answer together, for each slot")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=256, help="prompt tokens per step")
    parser.add_argument(
        "--prompt-cache-mib", type=int, default=256, help="memory for prompts that have left their slot"
    )
    parser.add_argument("--embeddings", action="store_true", help="serve /v1/embeddings too")
    parser.add_argument("--pooling", choices=["model", "mean", "cls", "last"], default="model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="any xllamacpp.CommonParams field"
    )
    return parser


def fill(parameters: Any, wanted: argparse.Namespace, weights: Path) -> None:
    """Our options in llama.cpp's words."""
    parameters.model.path = str(weights)
    parameters.model_alias = {wanted.alias}
    parameters.hostnames = [wanted.host]
    parameters.port = wanted.port
    parameters.n_parallel = wanted.slots
    parameters.n_ctx = wanted.context_tokens * wanted.slots
    parameters.cpuparams.n_threads = wanted.threads
    parameters.cpuparams_batch.n_threads = wanted.threads
    # A prompt is worked off in steps of so many tokens, and while a step runs nobody else's answer goes on. An input to
    # be embedded must fit into one step.
    parameters.n_batch = parameters.n_ubatch = wanted.context_tokens if wanted.embeddings else wanted.batch_tokens
    parameters.embedding = wanted.embeddings
    parameters.cache_ram_mib = wanted.prompt_cache_mib
    parameters.n_threads_http = HTTP_THREADS + 2 * wanted.slots
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = True
    parameters.ui = False
    parameters.cors_origins = ""  # no page in somebody's browser may talk to it
    parameters.verbosity = 1  # errors; it has a warning for every other request


def weights_file(model: str) -> Path:
    """The file that a model is named by."""
    path: Path | None = Path(model)
    if model.startswith("package:"):
        from pointsman.parameters import packaged  # here, as most are started without

        path = packaged(model)
    if path is None:
        package = model.removeprefix("package:").partition("/")[0]
        fail(f'there is no Python package "{package}" for {model}; install it, for example: pip install {package}')
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        fail(f"there are no weights at {path}")
    except OSError as error:
        fail(f"the weights at {path} cannot be read: {error.strerror}")
    if magic != b"GGUF":
        fail(f"{path} holds no GGUF weights (it begins with {magic!r}); llama.cpp reads no other format")
    return path


def pooling(asked: str, weights: Path) -> str:
    """How the vectors of tokens become one. A model that does not say (one that writes text) gets their mean."""
    if asked != "model":
        return asked.upper()
    with weights.open("rb") as file:
        says = b".pooling_type" in file.read(1 << 20)
    return "UNSPECIFIED" if says else "MEAN"


def check_port(host: str, port: int) -> None:
    """llama.cpp would only say that its HTTP server failed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        fail(f"port {port} of {host} cannot be used: {error.strerror}")


def assign(parameters: Any, assignment: str) -> None:
    """Set one of llama.cpp's own parameters by its name."""
    name, equals, text = assignment.partition("=")
    known = [field for field in dir(parameters) if not field.startswith("_")]
    if name not in known:
        near = get_close_matches(name, known, n=1)
        fail(f'llama.cpp has no parameter "{name}"' + (f'; did you mean "{near[0]}"?' if near else ""))
    try:
        setattr(parameters, name, json.loads(text if equals else "true"))
    except (TypeError, ValueError) as error:
        fail(f"llama.cpp's parameter {name} cannot be {text}: {error}")


def leave(*_: object) -> None:
    """Gone at once: there is nothing to save."""
    os._exit(0)


def fail(why: str) -> NoReturn:
    """Say why, and give up, before anybody else can say more."""
    print(f"llama.cpp cannot start: {why}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
