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
from quire.plan.model_sizes import by_parameters, precision_in, subject

_CONTEXT, _CONCURRENCY, _GPUS = 8192, 1, 8
_EXAMPLES = ("p5.48xlarge", "g6e.12xlarge", "a3-highgpu-8g")
_PASSED = (
    *("kv_cache_dtype", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"),
    *("cpu_offload_gb", "kv_offloading_size"),
)
"""Engine flags that affect memory; the estimate uses them."""
_HOST_MEMORY = {
    "--cpu-offload-gb": "GiB of weights per GPU to keep in host memory",
    "--kv-offloading-size": "GiB of host memory for evicted KV cache blocks",
}
"""Flags for host memory, and their help texts."""
_ANY = ("bf16", "fp8", "int8", "int4", "fp32")
"""Precisions that are compared if the user gives none."""
_BY_PRECISION = ("precision", "quantization", "dtype")
"""Flags that choose the precision; the first that is given counts."""
_VLLM_NAMES = {
    **dict.fromkeys(("auto", "bfloat16", "float16", "half"), "bf16"),
    **dict.fromkeys(("float32", "float"), "fp32"),
    **dict.fromkeys(("awq", "gptq"), "int4"),
}
"""Values of vLLM's --dtype and --quantization, each with its precision."""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=None,
        help="directory, .gguf file, hub id, URL (s3://...), a name with a size in it, or sizes:"
        " layers=80,hidden=8192,heads=64,kv_heads=8,intermediate=28672,vocab=128256",
    )
    parser.add_argument(
        "--params",
        default=None,
        metavar="SIZE",
        help="instead of a model, its number of parameters, such as 175B: the other sizes are estimated",
    )
    parser.add_argument(
        "--active",
        default=None,
        metavar="SIZE",
        help="active parameters of a mixture of experts, such as 37B",
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
    parser.add_argument(
        "--precision",
        default=None,
        help=f"one of {', '.join(PRECISIONS)}, or a name of --quantization or --dtype; all by default",
    )
    parser.add_argument(
        "--quantization", "-q", default=None, help="fp8, int8, awq, gptq, ...: the precision, by vLLM's flag"
    )
    parser.add_argument(
        "--dtype", default=None, help="bfloat16, float16 or float32: the precision without quantization"
    )
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a hub model")
    parser.add_argument("--kv-cache-dtype", default=None)
    parser.add_argument("--gpu-memory-utilization", type=float, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    for flag, text in _HOST_MEMORY.items():
        parser.add_argument(flag, type=float, default=None, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", type=Path, default=None, metavar="FILE", help="draw the memory as SVG")


def run(args: Namespace) -> int:
    checkpoint, note = _read_model(args)
    wanted = _parse_workload(args, checkpoint)
    precisions = _precisions(args, checkpoint)
    if note and args.params is None and precisions == _ANY and (named := precision_in(args.model)):
        precisions, note = (named,), f"{note}; {named} weights, by the name"
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


def _read_model(args: Namespace) -> tuple[Checkpoint, str]:
    """Return the model to plan for, and a note if its sizes were estimated."""
    if args.model is None and args.params is None:
        raise ConfigError("name a model, or give its number of parameters: --params 70B")
    if args.model is not None and args.params is not None:
        raise ConfigError(f"--params {args.params} stands in place of a model: leave out {args.model!r}")
    if args.active is not None and args.params is None:
        raise ConfigError("--active needs --params, the parameters of the whole model")
    if args.params is None:
        return subject(args.model, Env.read(os.environ), revision=args.revision)
    checkpoint, note = by_parameters(args.params, args.active)
    args.model = args.params if args.active is None else f"{args.params}-A{args.active}"
    return checkpoint, note


def _parse_workload(args: Namespace, checkpoint: Checkpoint) -> Wanted:
    context = args.context or min(_CONTEXT, checkpoint.derived_max_len)
    if context < 1 or args.concurrency < 1:
        raise ConfigError("--context and --concurrency must be at least 1")
    flags = {name: getattr(args, name) for name in _PASSED if getattr(args, name) is not None}
    return Wanted(context, args.concurrency, flags)


def _precisions(args: Namespace, checkpoint: Checkpoint) -> tuple[str, ...]:
    flag, name = next(
        ((flag, value) for flag in _BY_PRECISION if (value := getattr(args, flag)) is not None), ("", None)
    )
    if stored_only(checkpoint):
        stored = checkpoint.format if checkpoint.quant is None else checkpoint.quant.method
        if flag not in ("", "dtype") and name not in (STORED, stored):
            raise ConfigError(f"--{flag} {name}: the weights are stored as {stored}; leave it out")
        return (STORED,)
    if name is None:
        return _ANY
    precision = _VLLM_NAMES.get(name, name)
    if precision not in PRECISIONS:
        raise ConfigError(f"--{flag} {name!r}; known: {', '.join([*PRECISIONS, *_VLLM_NAMES])}")
    return (precision,)


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
