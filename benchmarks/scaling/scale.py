"""`python benchmarks/scaling/scale.py`: TTFT, ITL and throughput of a model on 1 to 128 GPUs, simulated.

The scheduler is the real one. Steps take the time measured on one H200 for a GPU's shard of the model, and
collectives the time assumed for the links between GPUs."""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from layouts import GPU_BYTES, OTHER_BYTES, USED_SHARE, GpuLayout, StepCost
from shapes import MEASURED, PREFILL_STEP, SHAPES
from simulated import MOST_CORES, MOST_IN_LOCKSTEP, SimulatedCore, Traffic, run
from step_costs import KV_BYTES_S, PREFILL, Links, decode_of, fitted

from quire.errors import ConfigError
from quire.plan.rates import BATCHES, CONTEXT

ROUNDS = 3
"""Number of requests, as a multiple of the concurrency."""
LEAST_REQUESTS, LEAST_S = 48, 30.0
"""Least requests per simulated core, and least seconds of traffic at a request rate."""
COLUMNS = {
    "gpus": "{:>5}",
    "layout": "{:<12}",
    "at_once": "{:>8}",
    "ttft_ms": "{:>9}",
    "ttft_p99_ms": "{:>9}",
    "itl_ms": "{:>8}",
    "itl_p99_ms": "{:>8}",
    "out_tok_s": "{:>10}",
    "tok_s_gpu": "{:>9}",
    "weights_gb": "{:>8}",
    "kv_tokens": "{:>11}",
}
TITLES = {
    "at_once": "requests",
    "ttft_ms": "TTFT ms",
    "ttft_p99_ms": "p99",
    "itl_ms": "ITL ms",
    "itl_p99_ms": "p99",
    "out_tok_s": "out tok/s",
    "tok_s_gpu": "per GPU",
    "weights_gb": "weights",
    "kv_tokens": "KV tokens",
}


FREE = Links(1e30, 1e30, one_shot_s=0, two_shot_s=0, ring_s=0, node_ring_s=0, send_s=0, node_send_s=0)
"""Links that take no time, to time steps without communication."""
STEP_TITLE = (
    f" gpus layout       decode with {CONTEXT} tokens of context, ms (links alone), with "
    f"{', '.join(map(str, BATCHES))} rows in each copy; prefill of all, tok/s"
)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python benchmarks/scaling/scale.py",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    flags.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    flags.add_argument(
        "--layouts", nargs="+", help="tp8, tp8pp2, dp16tp8, dp8ep, ... instead of sensible ones for --gpus"
    )
    flags.add_argument("--concurrency", type=int, default=32, help="concurrent requests per GPU")
    flags.add_argument("--request-rate", type=float, help="requests per second and GPU, instead")
    flags.add_argument("--total", action="store_true", help="--concurrency and --request-rate are totals")
    flags.add_argument("--num-requests", type=int, help="requests to the simulated cores")
    flags.add_argument("--input-len", type=int, default=1024)
    flags.add_argument("--output-len", type=int, default=256)
    flags.add_argument("--max-num-seqs", type=int, default=1024)
    flags.add_argument("--max-num-batched-tokens", type=int, default=8192)
    flags.add_argument(
        "--all-to-all", action="store_true", help="send tokens only to the ranks of their experts"
    )
    flags.add_argument(
        "--steps", action="store_true", help="show the duration of single steps, and of links in it"
    )
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", action="store_true", help="one line of JSON for each row")
    for field in dataclasses.fields(Links):
        flag, kind = f"--{field.name.replace('_', '-')}", int if field.default == 8 else float
        flags.add_argument(flag, type=kind, default=field.default, help="assumed property of the links")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    links = Links(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Links)})
    layouts = [GpuLayout.of(text) for text in args.layouts or ()]
    if not args.json:
        print("\n".join(assumptions(args.model, links)))
        print(STEP_TITLE if args.steps else line({name: TITLES.get(name, name) for name in COLUMNS}))
    for layout in layouts or sensible(args.model, args.gpus):
        row = steps(args.model, layout, links) if args.steps else measure(args, layout, links)
        print(json.dumps(row) if args.json else step_line(row) if args.steps else line(row), flush=True)
    return 0


def sensible(model: str, gpus: Sequence[int]) -> list[GpuLayout]:
    """Return layouts for each number of GPUs: tensor parallelism within a node, pipeline stages across nodes
    or instead, data parallelism for the rest; for MoE models also expert parallelism."""
    shape, layouts = SHAPES[model], []
    for count in gpus:
        sizes = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if count % (tp * pp) == 0]
        kept = [(tp, pp) for tp, pp in sizes if pp == 1 or tp * pp == min(count, 8) or (tp == 8 and pp == 2)]
        layouts += [GpuLayout(count // (tp * pp), tp, pp) for tp, pp in kept]
        if shape.experts and count > 1:
            layouts += [GpuLayout(count // tp, tp, ep=True) for tp in (1, 8) if count % tp == 0]
    return layouts


def measure(args: argparse.Namespace, layout: GpuLayout, links: Links) -> dict[str, Any]:
    """Return the results of one layout as a row of the table, or only the reason why it is impossible."""
    cost = StepCost(args.model, layout, links, args.all_to_all)
    per_gpu = 1 / layout.num_gpus if args.total else 1.0
    num_cores = simulated_cores(layout)
    on_cores = num_cores * layout.tp * layout.pp * per_gpu
    at_once = 0 if args.request_rate else max(round(args.concurrency * on_cores), 1)
    rate = args.request_rate * on_cores if args.request_rate else 0.0
    traffic = Traffic(
        args.num_requests or max(ROUNDS * at_once, LEAST_REQUESTS * num_cores, round(LEAST_S * rate)),
        args.input_len,
        args.output_len,
        concurrency=at_once,
        rate=rate,
        seed=args.seed,
    )
    row = {"model": args.model, "gpus": layout.num_gpus, "layout": str(layout)}
    if (reason := cost.why_not(traffic.longest)) is not None:
        return row | {"refused": reason}
    simulated = simulate(
        *(args.model, _to_simulate(layout), links, args.all_to_all, traffic),
        *(args.max_num_seqs, args.max_num_batched_tokens),
    )
    tok_s = simulated["tok_s"] * layout.dp / num_cores
    return row | {
        "at_once": round(at_once * layout.dp / num_cores) or None,
        **{name: round(value, 2) for name, value in simulated.items() if name != "tok_s"},
        "out_tok_s": round(tok_s),
        "tok_s_gpu": round(tok_s / layout.num_gpus),
        "weights_gb": round(cost.weights_bytes() / 1e9, 1),
        "kv_tokens": cost.kv_tokens(),
    }


def steps(model: str, layout: GpuLayout, links: Links) -> dict[str, Any]:
    """Return the duration of single steps through all stages; all cores in lockstep run the same step."""
    cost, computing = (StepCost(model, layout, between) for between in (links, FREE))
    row: dict[str, Any] = {"model": model, "gpus": layout.num_gpus, "layout": str(layout)}
    if (reason := cost.why_not(PREFILL_STEP)) is not None:
        return row | {"refused": reason}
    for batch in BATCHES:
        tokens = batch * layout.dp
        whole_s, alone_s = (
            sum(model_cost.stage_s(decode_of(batch), tokens)) for model_cost in (cost, computing)
        )
        row[f"ms_{batch}"] = round(1e3 * whole_s, 2)
        row[f"links_ms_{batch}"] = round(1e3 * (whole_s - alone_s), 2)
    tokens = PREFILL_STEP * layout.dp
    return row | {"prefill_tok_s": round(tokens / sum(cost.stage_s(PREFILL, tokens)))}


def step_line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return line(row)
    shown = [f"{row[f'ms_{batch}']:.2f} ({row[f'links_ms_{batch}']:.2f})" for batch in BATCHES]
    times = " ".join(f"{text:>14}" for text in shown)
    return f"{row['gpus']:>5} {row['layout']:<12} {times} {row['prefill_tok_s']:>10,}"


def in_lockstep(layout: GpuLayout) -> bool:
    return layout.ep and layout.dp > 1


def simulated_cores(layout: GpuLayout) -> int:
    return min(layout.dp, MOST_IN_LOCKSTEP if in_lockstep(layout) else MOST_CORES)


def _to_simulate(layout: GpuLayout) -> GpuLayout:
    """Return a layout with fewer data-parallel cores to simulate, since independent cores have the same
    speed whatever their number."""
    return layout if layout.ep else dataclasses.replace(layout, dp=simulated_cores(layout))


@functools.lru_cache(maxsize=256)
def simulate(
    model: str,
    layout: GpuLayout,
    links: Links,
    all_to_all: bool,
    traffic: Traffic,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> dict[str, float]:
    cores = [
        SimulatedCore(
            StepCost(model, layout, links, all_to_all),
            max_len=traffic.longest,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        for _ in range(simulated_cores(layout))
    ]
    watch = run(cores, traffic, layout.dp if in_lockstep(layout) else 0)
    first_ms, gaps_ms = 1e3 * np.array(watch.first_s or [0.0]), 1e3 * np.array(watch.gaps_s or [0.0])
    return {
        "ttft_ms": float(np.median(first_ms)),
        "ttft_p99_ms": float(np.percentile(first_ms, 99)),
        "itl_ms": float(gaps_ms.mean()),
        "itl_p99_ms": float(np.percentile(gaps_ms, 99)),
        "tok_s": watch.tokens_s(),
    }


def line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{row['gpus']:>5} {row['layout']:<12} not simulated: {row['refused']}"
    shown = {name: f"{value:,}" if isinstance(value, int) else value for name, value in row.items()}
    return " ".join(
        form.format(shown[name] if shown[name] is not None else "") for name, form in COLUMNS.items()
    )


def assumptions(model: str, links: Links) -> list[str]:
    """Return the assumptions behind the numbers, as comment lines."""
    rates, shape = fitted(), SHAPES[model]
    shares = ", ".join(f"1/{row.tp}" for row in MEASURED if row.model == model)
    known = f"corrected by measurements of {shares} of it" if shares else "not measured for this model"
    reads = ", ".join(f"{rate / 1e12:.2f}" for rate in rates.weight_bytes_s)
    layer = ", ".join(f"{1e6 * seconds:.0f}" for seconds in rates.layer_s)
    sums = {"small": links.one_shot_s, "to 4 MiB": links.two_shot_s, "larger": links.ring_s}
    sums["over nodes"] = links.node_ring_s
    sums_us = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in sums.items())
    return [
        f"# {model}: {shape.layers} layers of {shape.hidden}, bytes per weight: {shape.weight_bytes}",
        f"# computing ({known}), by rows {', '.join(map(str, BATCHES))}:",
        f"#   weights {reads} TB/s, and a layer {layer} us besides;",
        f"#   matmuls {rates.flops / 1e12:.0f} TFLOP/s, cache {KV_BYTES_S / 1e12:.2f} TB/s, experts"
        f" {rates.expert_bytes_s / 1e12:.2f} TB/s with uniform routing",
        f"# links (assumed): NVLink {links.nvlink_bytes_s / 1e9:.0f} GB/s between {links.gpus_per_node} GPUs,"
        f" a NIC of {links.nic_bytes_s / 1e9:.0f} GB/s for each, {links.efficiency:.0%} of either reached,",
        "#   and all NICs of a node used by collectives over nodes, but by a send only its own;",
        f"#   all-reduce, us: {sums_us}; send {1e6 * links.send_s:.0f}, to another node"
        f" {1e6 * links.node_send_s:.0f}; nothing overlaps with computing",
        f"# memory: {USED_SHARE:.0%} of {GPU_BYTES / 1e9:.0f} GB, {OTHER_BYTES / 1e9:.0f} GB of it not for"
        " weights or cache; no prefix is cached",
        f"# of many replicas {MOST_CORES} are simulated ({MOST_IN_LOCKSTEP} if in lockstep), behind a"
        " load-based router; HTTP, tokenization and host time are not simulated;",
        "#   TTFT: median; ITL: mean; requests of the first wave are not counted",
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"error: {error}")
