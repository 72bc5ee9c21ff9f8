"""`pointsman estimate PATH`: estimate the memory of a model from its files, and which GPUs it fits on."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from pointsman.cli.options import add_command, at_least_one

if TYPE_CHECKING:
    from pointsman.placement.estimate import Estimate, Fit

EXAMPLE = """\
examples:
  pointsman estimate models/Qwen3-32B --context 32768 --concurrency 16 --tp 2
  pointsman estimate model-q4_k_m.gguf --context 8192 --gpu "RTX 4090"
  pointsman estimate models/Llama-3.1-8B --context 8192 --lora adapters/sql --draft models/Llama-3.2-1B --json
"""

SHOWN = (
    "T4", "L4", "RTX 3090", "RTX 4090", "RTX 5090", "A100 40GB", "L40S", "A100 80GB", "H100", "H200", "B200", "MI300X",
)  # fmt: skip
"""GPUs in the table if the command names none."""
MIB, GIB = 1 << 20, 1 << 30


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "estimate",
        summary="estimate the memory of a model, and which GPUs it fits on",
        description="Read the headers of a model's files (GGUF, or a folder with config.json and safetensors), not "
        "the weights, and estimate what one instance needs: weights, KV cache, activations, the engine itself, also "
        "per GPU of a split; on which GPUs it fits, and how far context and concurrency can grow there.",
        example=EXAMPLE,
    )
    parser.add_argument(
        "path",
        help="a GGUF file, or a folder with config.json and safetensors; package:NAME/FILE: in a Python package",
    )
    parser.add_argument(
        "--context", type=at_least_one, default=8192, metavar="TOKENS", help="per request (default 8192)"
    )
    parser.add_argument("--concurrency", type=at_least_one, default=1, metavar="N", help="requests at once (default 1)")
    parser.add_argument("--tp", type=at_least_one, default=1, metavar="N", help="tensor-parallel size (default 1)")
    parser.add_argument("--pp", type=at_least_one, default=1, metavar="N", help="pipeline stages (default 1)")
    parser.add_argument(
        "--kv-dtype", default="auto", metavar="TYPE", help="type of the KV cache: fp8, f16, q8_0, ... (default auto)"
    )
    parser.add_argument(
        "--engine", choices=["auto", "vllm", "llama.cpp"], default="auto", help="auto: llama.cpp for GGUF, else vllm"
    )
    parser.add_argument("--lora", action="append", default=[], metavar="PATH", help="a LoRA adapter; may be repeated")
    parser.add_argument("--draft", metavar="PATH", help="a draft model for speculative decoding")
    parser.add_argument("--gpu", action="append", default=[], metavar="NAME", help='a GPU, such as "H100 80GB"')
    parser.add_argument(
        "--gpu-memory", action="append", default=[], type=_size, metavar="SIZE", help="memory of a GPU, such as 80GiB"
    )
    parser.add_argument(
        "--batch-tokens", type=at_least_one, metavar="N", help="tokens in one step (default: the engine's)"
    )
    parser.add_argument(
        "--max-sequences",
        type=at_least_one,
        metavar="N",
        help="requests that vLLM prepares for (default 256, or --concurrency)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    from pointsman.parameters import quantity

    try:
        found = quantity(text.replace(" ", "").removesuffix("B"))
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a size; write for example 80GiB or 24G') from None
    if found <= 0:
        raise argparse.ArgumentTypeError(f'"{text}" is not above 0')
    return found


def run(args: argparse.Namespace) -> int:
    """Print the tables. Returns 1 if the command names GPUs and the model fits on none of them."""
    from pointsman.placement.estimate import estimate, fit

    gpus = _gpus(args)
    found = estimate(
        _model(args.path),
        context=args.context,
        concurrency=args.concurrency,
        kv_dtype=args.kv_dtype,
        engine=args.engine,
        adapters=[_model(path) for path in args.lora],
        draft=args.draft and _model(args.draft),
        batch_tokens=args.batch_tokens,
        max_sequences=args.max_sequences,
    )
    fits = [fit(found, size, args.tp, args.pp, name) for name, size in gpus]
    if args.json:
        print(json.dumps(_as_dict(found, fits, args.tp, args.pp), indent=2, ensure_ascii=False))
    else:
        print(_text(found, fits, args.tp, args.pp))
    return 1 if (args.gpu or args.gpu_memory) and not any(one.fits for one in fits) else 0


def _model(path: str) -> str:
    """The path of a model's files. Raises if the files are in a package that is not installed."""
    from pointsman.errors import PointsmanError
    from pointsman.parameters import packaged

    if not path.startswith("package:"):
        return path
    found = packaged(path)
    if found is None:
        package = path.removeprefix("package:").partition("/")[0]
        raise PointsmanError(f"the Python package {package} is not installed; run: pip install {package}")
    return str(found)


def _gpus(args: argparse.Namespace) -> list[tuple[str, int]]:
    """The name and the memory of each GPU to try."""
    from pointsman.errors import UnknownName
    from pointsman.placement.gpu_models import KNOWN_GPUS, known_gpu

    found = [(f"{size / GIB:.4g} GiB", size) for size in args.gpu_memory]
    for name in args.gpu or ([] if found else SHOWN):
        known = known_gpu(name)
        if known is None:
            raise UnknownName("GPU", name, [one.full_name for one in KNOWN_GPUS])
        found.append((known.full_name, known.memory_bytes))
    return found


def _as_dict(found: "Estimate", fits: "list[Fit]", tp: int, pp: int) -> dict[str, Any]:
    """The estimate as plain data. Sizes are in bytes."""
    import msgspec

    return {
        "model": msgspec.to_builtins(found.model),
        "engine": found.engine.name,
        "serving": msgspec.to_builtins(found.serving),
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "stage_layers": list(found.stages(tp, pp)),
        "need": msgspec.to_builtins(found.need),
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "parts": msgspec.to_builtins(found.parts(tp, pp)),
        "gpu_bytes": found.gpu_bytes(tp, pp),
        "cpu_bytes": found.need.cpu_bytes,
        "gpus": msgspec.to_builtins(fits),
        "notes": list(found.notes),
    }


def _text(found: "Estimate", fits: "list[Fit]", tp: int, pp: int) -> str:
    from pointsman.render.text import text_table

    model, shape, need = found.model, found.architecture, found.need
    experts = f", {shape.experts_used} of {shape.experts} experts" if shape.experts else ""
    beside = f", with {' and '.join(shape.parts)}" if shape.parts else ""
    kind = "embedding model" if shape.embeds else shape.name
    stages = " + ".join(map(str, found.stages(tp, pp)))
    split = f", tensor parallel {tp}" * (tp > 1) + f", {pp} pipeline stages of {stages} layers" * (pp > 1)
    partly = not found.engine.tensor_parallel
    alone = f"; on the CPU alone: {_amount(need.cpu_bytes)}" if partly else ""
    lines = [
        f"{model.name}: {kind}, {shape.layers} layers{experts}{beside}, {_count(model.parameters)} parameters, "
        f"mostly {model.largest_dtype} ({model.format})",
        f"{found.engine.name}, context {found.serving.context:,}, {found.serving.concurrency:,} at once{split}; "
        f"a token takes {found.kv_bytes_per_token / 1024:,.4g} KiB of KV cache",
        "",
        _parts_table(found, tp, pp),
        "",
        f"machine's memory beside that: {_amount(need.host_bytes)}{alone}",
        f"tensor-parallel sizes: {', '.join(map(str, need.tensor_parallel_sizes))}",
        "",
    ]
    heads = ["GPU", "GiB", "usable", "takes", "fits", "fewest GPUs", "largest context", "most at once"]
    rows = [_row(one, partly, need.layers) for one in fits]
    lines.append(text_table([*heads, "layers on it"] if partly else heads, rows))
    return "\n".join([*lines, "", *(f"note: {note}" for note in found.notes)])


def _parts_table(found: "Estimate", tp: int, pp: int) -> str:
    from pointsman.render.text import text_table

    parts = found.parts(tp, pp)
    whole = sum(part.bytes for part in parts if not part.of)
    unit, size = ("GiB", GIB) if whole >= 2 * GIB else ("MiB", MIB)

    def cell(count: int | None) -> str:
        return "" if count is None else f"{count / size:,.2f}"

    rows = [
        [f"  of them {part.name}" if part.of else part.name, cell(part.bytes), cell(part.gpu_bytes)] for part in parts
    ]
    rows.append(["together", cell(whole), cell(found.gpu_bytes(tp, pp))])
    return text_table(["part", f"{unit} in all", f"{unit} per GPU"], rows)


def _row(one: "Fit", partly: bool, layers: int) -> list[str]:
    numbers = [f"{size / GIB:.1f}" for size in (one.memory_bytes, one.usable_bytes, one.gpu_bytes)]
    fewest = "" if one.gpus is None else str(one.gpus)
    cells = [one.gpu, *numbers, "yes" if one.fits else "no", fewest, f"{one.context:,}", f"{one.concurrency:,}"]
    return [*cells, f"{one.gpu_layers} of {layers}"] if partly else cells


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return f"{parameters:,}"


def _amount(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
