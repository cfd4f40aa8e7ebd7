"""How fast the attention kernels are, by shape of tiles and number of ranges; run on an idle GPU.

python tests/kernels/triton/attention_speed.py {decode,prefill} [--compile I/N] [--short]
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from quire.kernels.triton import attention_launch as launch
from quire.kernels.triton.attention import Cache, Seqs
from quire.kernels.triton.attention_launch import Layer, Shape

MODELS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}
CONTEXT = 576
BLOCK = 16
COLD_BYTES = 256 << 20
"""Caches are taken in turn so that this much lies between two uses of one."""

RANGE_SHAPES = [
    Shape(16, 16, 1, 3),
    Shape(16, 32, 2, 3),
    Shape(16, 32, 4, 3),
    Shape(16, 64, 4, 2),
    Shape(16, 64, 4, 3),
    Shape(16, 128, 8, 3),
]
TILE_SHAPES = [
    Shape(128, 64, 8, 3),
    Shape(128, 128, 8, 2),
    Shape(128, 32, 4, 3),
    Shape(64, 64, 4, 3),
]


class Load:
    """Sequences of equal length over several caches."""

    def __init__(
        self, model: str, num_seqs: int, num_queries: int, length: int, kept_as: torch.dtype
    ) -> None:
        heads, kv_heads, dim = MODELS[model]
        self.layer = Layer(heads, kv_heads, dim, dim**-0.5, 0, 0.0, 1.0, 1.0)
        blocks = -(-length // BLOCK)
        self.bytes = num_seqs * length * kv_heads * dim * 2 * kept_as.itemsize
        copies = max(2, -(-COLD_BYTES // self.bytes))
        order = np.random.default_rng(0).permutation(num_seqs * blocks).astype(np.int32)
        tables = torch.from_numpy(order.reshape(num_seqs, blocks)).cuda()
        wide = torch.zeros(num_seqs, max(blocks, 256), dtype=torch.int32, device="cuda")
        wide[:, :blocks] = tables
        shape = (num_seqs * blocks, BLOCK, kv_heads, dim)
        self.caches = [
            launch.cache_of(
                *(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kept_as) for _ in "kv")
            )
            for _ in range(copies)
        ]
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
        self.seqs = Seqs(
            starts * num_queries,
            torch.full_like(starts[1:], length),
            starts[:-1].clone(),
            wide,
            wide.stride(0),
        )
        self.num_queries = num_queries
        self.q = torch.randn(num_seqs * num_queries, heads, dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)

    def decode(self, cache: Cache, shape: Shape | None = None, shares: int | None = None) -> None:
        launch.attend_shares(self.out, self.q, cache, self.seqs, None, self.layer, None, shape, shares)

    def prefill(self, cache: Cache, shape: Shape, tiles: Tensor) -> None:
        launch.attend_tiles(self.out, self.q, cache, self.seqs, tiles, self.layer, None, shape)

    def tiles(self, shape: Shape) -> Tensor:
        firsts = np.arange(0, self.num_queries, shape.block_m // self.layer.group)[::-1]
        num_seqs = len(self.seqs.seq_lens)
        work = np.stack((np.repeat(np.arange(num_seqs), len(firsts)), np.tile(firsts, num_seqs)), 1)
        return torch.from_numpy(work.astype(np.int32)).cuda()


def seconds(run: Callable[[Cache], None], caches: list[Cache], repeats: int = 5) -> float:
    """Of one launch, in a graph of one launch per cache."""
    run(caches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            run(cache)
    graph.replay()
    times = []
    for _ in range(repeats):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1000 / len(caches))
    return float(sorted(times)[repeats // 2])


def measured(load: Load, runs: Mapping[Any, Callable[[Cache], None]]) -> Iterator[tuple[Any, float, float]]:
    """(name, seconds, greatest difference from the first) of each run that fits the device."""
    reference: Tensor | None = None
    for name, run in runs.items():
        try:
            time_s = seconds(run, load.caches)
        except OutOfResources:
            continue
        load.out.fill_(torch.nan)
        run(load.caches[0])
        reference = load.out.clone() if reference is None else reference
        yield name, time_s, float((load.out - reference).abs().max())


def decode_rows(shapes: list[Shape], short: bool) -> Iterator[dict[str, Any]]:
    works = [(model, n, CONTEXT) for model in MODELS for n in (1, 8, 32, 128, 256)]
    works += [("8B", 1, 32768), ("8B", 16, 8192), ("8B", 64, 2048)]
    skewed = [("8B", 16, 32768), ("8B", 64, 32768)]
    for model, num_seqs, length in [*works, *(skewed if short else [])]:
        load = Load(model, num_seqs, 1, length, torch.bfloat16)
        if (model, num_seqs, length) in skewed:
            load.seqs.seq_lens[1:] = CONTEXT
            load.bytes = load.bytes // num_seqs * (length + (num_seqs - 1) * CONTEXT) // length
        groups = num_seqs * load.layer.kv_heads
        wanted = {
            n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 33, 49, 66) if n * groups <= 132 * 12 or n == 1
        }
        parts = {min(n, -(-length // launch.MIN_KEYS)) for n in wanted}
        runs: dict[tuple[Any, int], Callable[[Cache], None]] = {
            (shape, n): partial(load.decode, shape=shape, parts=n)
            for shape, n in itertools.product(shapes, sorted(parts))
        }
        if short:
            runs = {("chosen", 0): partial(load.decode, shape=None, parts=None)}
        for (shape, n), time_s, error in measured(load, runs):
            yield {
                "model": model,
                "seqs": num_seqs,
                "keys": length,
                "shape": shape,
                "parts": n,
                "us": round(time_s * 1e6, 2),
                "GB/s": round(load.bytes / time_s / 1e9),
                "error": round(error, 4),
            }


def prefill_rows(shapes: list[Shape], short: bool) -> Iterator[dict[str, Any]]:
    for model, num_seqs, length in [("8B", 16, 2048), ("0.6B", 16, 2048), ("8B", 1, 8192)]:
        load = Load(model, num_seqs, length, length, torch.bfloat16)
        load.caches = load.caches[:2]
        flops = 4 * num_seqs * length * (length + 1) / 2 * load.layer.heads * load.layer.head_dim
        runs = {shape: partial(load.prefill, shape=shape, tiles=load.tiles(shape)) for shape in shapes}
        for shape, time_s, error in measured(load, runs):
            yield {
                "model": model,
                "seqs": num_seqs,
                "keys": length,
                "shape": shape,
                "us": round(time_s * 1e6, 1),
                "TFLOP/s": round(flops / time_s / 1e12),
                "error": round(error, 4),
            }


def long_tables() -> None:
    """Short sequences where long ones are possible, and one long among them, by the limit on ranges."""
    limits = (1, 1024, 4096, launch._MAX_RANGES)
    for num_seqs, length in [
        (8, CONTEXT),
        (32, CONTEXT),
        (128, CONTEXT),
        (256, CONTEXT),
        (16, 32768),
        (64, 32768),
    ]:
        load = Load("8B", num_seqs, 1, length, torch.bfloat16)
        if length > CONTEXT:
            load.seqs.seq_lens[1:] = CONTEXT
        tables = load.seqs.block_tables
        tables = torch.nn.functional.pad(tables, (0, 2048 - tables.shape[1]))
        load.seqs = load.seqs._replace(block_tables=tables, table_stride=tables.stride(0))
        for limit in limits:
            launch._MAX_RANGES = limit
            chosen = launch.ranges_of(num_seqs * 8, 32768, 132)
            time_s = seconds(partial(load.decode, shape=None, parts=None), load.caches)
            print(f"long tables: {num_seqs=} {length=} {limit=} {chosen} {time_s * 1e6:.1f} us")


def host_seconds() -> float:
    """What the host spends on one launch, while the device is not waited for."""
    load = Load("8B", 8, 1, CONTEXT, torch.bfloat16)
    load.decode(load.caches[0], None, None)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        load.decode(load.caches[0], None, None)
    return (time.perf_counter() - start) / 200


def compile_only(what: str, shapes: list[Shape]) -> None:
    for model in MODELS:
        load = Load(model, 2, 1 if what == "decode" else 64, 64, torch.bfloat16)
        for shape in shapes:
            with suppress(OutOfResources):
                if what == "decode":
                    load.decode(load.caches[0], shape, 2)
                    load.decode(load.caches[0], shape, 1)
                else:
                    load.prefill(load.caches[0], shape, load.tiles(shape))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("decode", "prefill"))
    parser.add_argument(
        "--compile", default="", help="I/N: compile the I-th of N parts of the shapes, and stop"
    )
    parser.add_argument("--short", action="store_true", help="only the shapes in use")
    parser.add_argument("--out", default="/dev/null")
    args = parser.parse_args()
    shapes = RANGE_SHAPES if args.what == "decode" else TILE_SHAPES
    if args.short:
        layer = Layer(32, 8, 128, 1.0, 0, 0.0, 1.0, 1.0)
        dtype = torch.bfloat16
        shapes = [] if args.what == "decode" else [launch.tile_shape(layer, dtype, 2048)]
    if args.compile:
        part, parts = map(int, args.compile.split("/"))
        return compile_only(args.what, shapes[part::parts])
    if args.what == "decode" and args.short:
        long_tables()
    if args.what == "decode":
        print(f"host: {host_seconds() * 1e6:.1f} us a launch")
    rows = list((decode_rows if args.what == "decode" else prefill_rows)(shapes, args.short))
    with open(args.out, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for _, group in itertools.groupby(rows, key=lambda row: (row["model"], row["seqs"], row["keys"])):
        for row in sorted(group, key=lambda row: row["us"])[:6]:
            print(*(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
