"""Time the paged attention kernels by tile shape and number of KV splits, on an idle GPU.

python benchmarks/kernel_attention.py {decode,prefill,far} [--short] [--fp8]
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring import COLD_BYTES, cold_seconds, print_best
from torch import Tensor
from triton.runtime.errors import OutOfResources

from quire.kernels.triton import attention_launch as launch
from quire.kernels.triton.attention import AttentionSeqs, Cache
from quire.kernels.triton.attention_launch import AttentionLayer, AttentionShape
from quire.kernels.triton.launch import compiling

MODELS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}
CONTEXT = 576
BLOCK = 16

SHARE_SHAPES = [
    AttentionShape(16, 32, 1, 3),
    AttentionShape(16, 32, 2, 2),
    AttentionShape(16, 32, 2, 3),
    AttentionShape(16, 32, 4, 3),
    AttentionShape(16, 64, 2, 3),
    AttentionShape(16, 64, 4, 2),
    AttentionShape(16, 64, 4, 3),
    AttentionShape(16, 128, 4, 2),
]
TILE_SHAPES = [
    AttentionShape(128, 64, 8, 3),
    AttentionShape(128, 128, 8, 2),
    AttentionShape(128, 32, 4, 3),
    AttentionShape(64, 64, 4, 3),
]


class Load:
    """Batch of sequences of equal length, with several copies of its KV cache, so that the L2 cache does
    not help."""

    def __init__(
        self, model: str, num_seqs: int, num_queries: int, length: int, cache_dtype: torch.dtype
    ) -> None:
        heads, kv_heads, dim = MODELS[model]
        self.layer = AttentionLayer(heads, kv_heads, dim, dim**-0.5, 0, 0.0, 1.0, 1.0)
        blocks = -(-length // BLOCK)
        self.bytes = num_seqs * length * kv_heads * dim * 2 * cache_dtype.itemsize
        copies = max(2, -(-COLD_BYTES // self.bytes))
        order = np.random.default_rng(0).permutation(num_seqs * blocks).astype(np.int32)
        tables = torch.from_numpy(order.reshape(num_seqs, blocks)).cuda()
        wide = torch.zeros(num_seqs, max(blocks, 256), dtype=torch.int32, device="cuda")
        wide[:, :blocks] = tables
        shape = (num_seqs * blocks, BLOCK, kv_heads, dim)
        self.caches = [
            launch.cache_of(
                *(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(cache_dtype) for _ in "kv")
            )
            for _ in range(copies)
        ]
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
        self.seqs = AttentionSeqs(
            starts * num_queries,
            torch.full_like(starts[1:], length),
            starts[:-1].clone(),
            wide,
            wide.stride(0),
        )
        self.num_queries = num_queries
        self.q = torch.randn(num_seqs * num_queries, heads, dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)

    def decode(self, cache: Cache, shape: AttentionShape | None = None, shares: int | None = None) -> None:
        launch.attend_shares(self._args(cache), None, shape, shares)

    def prefill(self, cache: Cache, shape: AttentionShape, tiles: Tensor) -> None:
        launch.attend_tiles(self._args(cache), tiles, None, shape)

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return the query starts and sequence lengths with an empty sequence at the end."""
        starts, lens = self.seqs.query_starts, self.seqs.seq_lens
        return torch.cat((starts, starts[-1:])), torch.cat((lens, lens.new_zeros(1)))

    def _args(self, cache: Cache) -> launch.AttentionArgs:
        return launch.AttentionArgs(self.out, self.q, cache, self.seqs, self.layer)

    def tiles(self, shape: AttentionShape) -> Tensor:
        firsts = np.arange(0, self.num_queries, shape.block_m // self.layer.group)[::-1]
        num_seqs = len(self.seqs.seq_lens)
        work = np.stack((np.repeat(np.arange(num_seqs), len(firsts)), np.tile(firsts, num_seqs)), 1)
        return torch.from_numpy(work.astype(np.int32)).cuda()


def measured(load: Load, runs: Mapping[Any, Callable[[Cache], None]]) -> Iterator[tuple[Any, float, float]]:
    """Yield (name, seconds, largest absolute difference from the output of the first run) for each run
    whose kernel fits the device."""
    reference: Tensor | None = None
    for name, run in runs.items():
        try:
            time_s = cold_seconds(run, load.caches)
        except OutOfResources:
            continue
        load.out.fill_(torch.nan)
        run(load.caches[0])
        reference = load.out.clone() if reference is None else reference
        yield name, time_s, float((load.out - reference).abs().max())


def decode_rows(
    shapes: list[AttentionShape], short: bool, cache_dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield rows of results for batches of equal lengths, of lengths of 300 to 1,700 tokens, and with one
    long sequence among short ones."""
    batches = (1, 8, 16, 32, 64, 128, 256)
    works = [(model, n, lens) for model in MODELS for n in batches for lens in ("equal", "spread")]
    works += [("8B", 1, "long"), ("8B", 16, "long"), ("8B", 64, "long")]
    for model, num_seqs, lens in works:
        load = decode_load(model, num_seqs, lens, cache_dtype)
        runs: dict[tuple[Any, int], Callable[[Cache], None]] = {
            (shape, per_sm): partial(load.decode, shape=shape, shares=per_sm * 132 // load.layer.kv_heads)
            for shape, per_sm in itertools.product(shapes, (1, 2, 3, 4, 6))
        }
        if short:
            runs = {("chosen", 0): load.decode}
        for (shape, per_sm), time_s, error in measured(load, runs):
            yield {
                "model": model,
                "seqs": num_seqs,
                "keys": lens,
                "shape": shape,
                "per_sm": per_sm,
                "us": round(time_s * 1e6, 2),
                "GB/s": round(load.bytes / time_s / 1e9),
                "error": round(error, 4),
            }


def decode_load(model: str, num_seqs: int, lens: str, cache_dtype: torch.dtype) -> Load:
    rng = np.random.default_rng(1)
    wanted = {
        "equal": np.full(num_seqs, CONTEXT),
        "spread": rng.integers(300, 1700, num_seqs),
        "long": np.array([32768, *[CONTEXT] * (num_seqs - 1)]),
    }[lens]
    load = Load(model, num_seqs, 1, int(wanted.max()), cache_dtype)
    load.seqs.seq_lens.copy_(torch.from_numpy(wanted.astype(np.int32)))
    load.bytes = int(load.bytes * wanted.sum() / (wanted.max() * num_seqs))
    return load


def prefill_rows(shapes: list[AttentionShape], cache_dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for model, num_seqs, length in [("8B", 16, 2048), ("0.6B", 16, 2048), ("8B", 1, 8192)]:
        load = Load(model, num_seqs, length, length, cache_dtype)
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


def far_rows(shapes: list[AttentionShape], cache_dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield rows of results for a few queries after many keys, in one program for a tile and in pieces, for
    several numbers of programs per multiprocessor."""
    lengths = [(16, 512), (64, 2048), (64, 8192), (64, 32768), (256, 2048), (256, 8192), (256, 32768)]
    lengths += [(512, 512), (512, 8192), (1024, 32768), (2048, 32768), (64, 200_000)]
    for model, (num_queries, length) in itertools.product(MODELS, lengths):
        load = Load(model, 1, num_queries, length, cache_dtype)
        keys = num_queries * (length - num_queries) + num_queries * (num_queries + 1) / 2
        flops = 4 * keys * load.layer.heads * load.layer.head_dim
        runs: dict[Any, Callable[[Cache], None]] = {}
        for shape in shapes:
            tile = shape.block_m // load.layer.group
            runs[shape, 0] = partial(load.prefill, shape=shape, tiles=load.tiles(shape))
            padded = load.padded()
            for per_sm in (1, 2):
                programs = per_sm * 132 // load.layer.kv_heads
                _, pieces = launch.cut_on_device(*padded, num_queries, 4, tile, programs)
                runs[shape, per_sm] = partial(load.prefill, shape=shape, tiles=pieces)
        for (shape, per_sm), time_s, error in measured(load, runs):
            yield {
                "model": model,
                "seqs": num_queries,
                "keys": length,
                "shape": shape,
                "per_sm": per_sm,
                "us": round(time_s * 1e6, 1),
                "TFLOP/s": round(flops / time_s / 1e12),
                "error": round(error, 4),
            }


def host_seconds() -> float:
    """Return the host's seconds of one launch, without waiting for the device."""
    load = Load("8B", 8, 1, CONTEXT, torch.bfloat16)
    load.decode(load.caches[0])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        load.decode(load.caches[0])
    return (time.perf_counter() - start) / 200


def compile_all(what: str, shapes: list[AttentionShape], cache_dtype: torch.dtype) -> None:
    with compiling():
        for model, shape in itertools.product(MODELS, shapes):
            load = Load(model, 2, 1 if what == "decode" else 64, 64, cache_dtype)
            if what == "decode":
                load.decode(load.caches[0], shape, 2)
            else:
                load.prefill(load.caches[0], shape, load.tiles(shape))
            if what == "far":
                pieces = torch.zeros((1, 6), dtype=torch.int32, device="cuda")
                load.prefill(load.caches[0], shape, pieces)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("decode", "prefill", "far"))
    parser.add_argument("--short", action="store_true", help="only the shapes in use")
    parser.add_argument("--fp8", action="store_true", help="over an 8-bit cache")
    args = parser.parse_args()
    cache_dtype = torch.float8_e4m3fn if args.fp8 else torch.bfloat16
    if args.what == "decode":
        shapes = [] if args.short else SHARE_SHAPES
        compile_all(args.what, shapes, cache_dtype)
        print(f"host: {host_seconds() * 1e6:.1f} us a launch")
        rows = list(decode_rows(shapes, args.short, cache_dtype))
    else:
        layer = AttentionLayer(32, 8, 128, 1.0, 0, 0.0, 1.0, 1.0)
        shapes = [launch.tile_shape(layer, torch.bfloat16, 2048)] if args.short else TILE_SHAPES
        compile_all(args.what, shapes, cache_dtype)
        rows = list((far_rows if args.what == "far" else prefill_rows)(shapes, cache_dtype))
    print_best(rows)


if __name__ == "__main__":
    main()
