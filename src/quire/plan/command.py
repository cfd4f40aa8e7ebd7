"""`quire plan`: the memory of a model, where it fits, its expected speed, and the command to run."""

import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from quire.checkpoint.model import Checkpoint
from quire.config.env import Env
from quire.errors import ConfigError
from quire.plan import report
from quire.plan.devices import DEVICES, count_of_instance, device
from quire.plan.estimate import PRECISIONS, STORED, MemoryFit, Wanted, smallest, stored_only
from quire.plan.model_sizes import subject

_CONTEXT, _CONCURRENCY, _GPUS = 8192, 1, 8
_EXAMPLES = ("p5.48xlarge", "g6e.12xlarge", "a3-highgpu-8g")
_PASSED = (
    *("kv_cache_dtype", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"),
    "cpu_offload_gb",
)
"""Engine flags that affect memory."""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="directory, .gguf file, hub id, a name with a size in it, or sizes:"
        " layers=80,hidden=8192,heads=64,kv_heads=8,intermediate=28672,vocab=128256",
    )
    parser.add_argument(
        "--gpu",
        default="h200",
        help=f"{', '.join(DEVICES)}, the GiB of one, or a cloud instance such as {', '.join(_EXAMPLES)}",
    )
    parser.add_argument(
        "--gpus", type=int, default=None, help="number of GPUs, at most; 8, or those of the instance"
    )
    parser.add_argument(
        "--context",
        "--max-model-len",
        type=int,
        default=None,
        help=f"tokens of the longest request; {_CONTEXT:,} or the model's maximum",
    )
    parser.add_argument(
        "--concurrency", type=int, default=_CONCURRENCY, help="concurrent requests of that length"
    )
    parser.add_argument("--precision", default=None, help=f"one of {', '.join(PRECISIONS)}; all by default")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a hub model")
    parser.add_argument("--kv-cache-dtype", default=None)
    parser.add_argument("--gpu-memory-utilization", type=float, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument(
        "--cpu-offload-gb", type=float, default=None, help="GiB of weights per GPU to keep in host memory"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", type=Path, default=None, metavar="FILE", help="draw the memory as SVG")


def run(args: Namespace) -> int:
    checkpoint, note = subject(args.model, Env.read(os.environ), revision=args.revision)
    wanted = _parse_workload(args, checkpoint)
    precisions = _precisions(args, checkpoint)
    kind = device(args.gpu)
    if args.gpus is None:
        args.gpus = count_of_instance(args.gpu) or _GPUS
    if args.gpus < 1:
        raise ConfigError(f"--gpus {args.gpus} must be at least 1")
    fits = smallest(
        checkpoint, kind.machine(args.gpus), wanted, precisions, most=args.gpus, per_node=kind.per_node
    )
    if args.svg is not None:
        args.svg.write_text(report.memory_chart(args.model, kind, fits), encoding="utf-8")
    if args.json:
        print(json.dumps(_as_json(args, checkpoint, wanted, precisions, fits), indent=2))
    else:
        print(report.text(args.model, checkpoint, kind, args.gpus, wanted, fits, note))
    return 0 if any(not fit.why_not for fit in fits) else 1


def _parse_workload(args: Namespace, checkpoint: Checkpoint) -> Wanted:
    context = args.context or min(_CONTEXT, checkpoint.derived_max_len)
    if context < 1 or args.concurrency < 1:
        raise ConfigError("--context and --concurrency must be at least 1")
    flags = {name: getattr(args, name) for name in _PASSED if getattr(args, name) is not None}
    return Wanted(context, args.concurrency, flags)


def _precisions(args: Namespace, checkpoint: Checkpoint) -> tuple[str, ...]:
    if stored_only(checkpoint):
        if args.precision not in (None, STORED):
            stored = checkpoint.format if checkpoint.quant is None else checkpoint.quant.method
            raise ConfigError(
                f"--precision {args.precision}: the weights are stored as {stored}; leave it out"
            )
        return (STORED,)
    if args.precision is None:
        return ("bf16", "fp8", "int8", "int4", "fp32")
    if args.precision not in PRECISIONS:
        raise ConfigError(f"--precision {args.precision!r}; known: {', '.join(PRECISIONS)}")
    return (args.precision,)


def _as_json(
    args: Namespace,
    checkpoint: Checkpoint,
    wanted: Wanted,
    precisions: tuple[str, ...],
    fits: list[MemoryFit],
) -> dict[str, Any]:
    kind, chosen = device(args.gpu), report.best(fits, precisions[0])
    return {
        "model": args.model,
        **report.facts_of(checkpoint, precisions, "bfloat16"),
        "device": {"name": kind.label, "bytes": kind.total_bytes, "count": args.gpus},
        "context": wanted.context,
        "concurrency": wanted.concurrency,
        "layouts": [report.described(fit, kind, wanted) for fit in fits],
        "command": None if chosen is None else report.command(args.model, chosen, wanted),
    }
