"""Time MLA attention by tile shape and number of KV splits, on an idle GPU.

python benchmarks/kernel_mla.py {decode,prefill} [--short]
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring import COLD_BYTES, COPY_BYTES_S, cold_seconds, print_best, random
from torch import Tensor
from triton.runtime.errors import OutOfResources

from quire.attention.batch import Batch
from quire.attention.mla import MLAEntry, MLASpec
from quire.attention.triton_mla import TritonMLA
from quire.kernels.triton import mla_launch as launch
from quire.kernels.triton.attention import AttentionSeqs
from quire.kernels.triton.attention_launch import AttentionShape
from quire.kernels.triton.launch import compiling

MODELS = {"V2-Lite": 16, "V3": 128}
BLOCK = 16
SHARE_SHAPES = {
    "V2-Lite": [
        AttentionShape(16, 64, 8, 2),
        AttentionShape(16, 64, 8, 3),
        AttentionShape(16, 64, 4, 3),
        AttentionShape(16, 32, 4, 3, 2),
        AttentionShape(16, 32, 4, 2, 2),
        AttentionShape(16, 32, 8, 4),
        AttentionShape(16, 32, 8, 6),
        AttentionShape(16, 128, 8, 2),
        AttentionShape(16, 16, 4, 5, 2),
    ],
    "V3": [
        AttentionShape(64, 64, 8, 2),
        AttentionShape(64, 32, 8, 3),
        AttentionShape(64, 32, 8, 2),
        AttentionShape(32, 64, 8, 2),
        AttentionShape(32, 32, 4, 3),
        AttentionShape(32, 32, 8, 3),
    ],
}
TILE_SHAPES = [
    AttentionShape(128, 64, 8, 3),
    AttentionShape(128, 64, 8, 2),
    AttentionShape(128, 128, 8, 2),
    AttentionShape(128, 64, 4, 3),
    AttentionShape(64, 64, 4, 3),
    AttentionShape(128, 32, 8, 4),
]


class Load:
    """Batch of sequences of equal length, with several copies of the MLA KV cache of one layer."""

    def __init__(self, model: str, num_seqs: int, length: int, num_queries: int = 1) -> None:
        heads = MODELS[model]
        self.spec = spec = MLASpec(heads, 512, 128, 64, 128, 192**-0.5)
        blocks = -(-length // BLOCK)
        self.bytes = num_seqs * length * spec.width * 2
        order = np.random.default_rng(0).permutation(num_seqs * blocks).astype(np.int32)
        tables = torch.from_numpy(order.reshape(num_seqs, blocks)).cuda()
        copies = max(2, -(-COLD_BYTES // self.bytes))
        self.caches = [random(num_seqs * blocks, BLOCK, spec.width) for _ in range(copies)]
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
        lens = torch.full_like(starts[1:], length)
        rows = starts[:-1].clone()
        self.seqs = AttentionSeqs(starts * num_queries, lens, rows, tables, tables.stride(0))
        num_tokens = num_seqs * num_queries
        self.fused = random(num_tokens, heads * spec.query_dim + spec.width)
        self.q = self.fused[:, : heads * spec.query_dim].view(num_tokens, heads, spec.query_dim)
        self.latent, self.seen = (random(num_tokens, heads, spec.rank) for _ in range(2))
        self.weight = random(heads, spec.nope_dim + spec.v_dim, spec.rank) * 0.05
        places = torch.arange(length - num_queries, length, device="cuda").repeat(num_seqs)
        slots = tables.long()[:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")
        self.batch = Batch(
            token_ids=places,
            positions=places,
            slots=slots.flatten(1)[:, length - num_queries : length].flatten(),
            query_starts=self.seqs.query_starts,
            seq_lens=lens,
            rows=rows,
            block_tables=tables,
            logit_tokens=places,
            query_lens_host=np.full(num_seqs, num_queries, np.int32),
            seq_lens_host=np.full(num_seqs, length, np.int32),
        )
        self.table, self.norm = random(length, spec.rope_dim), random(spec.rank)

    def decode(self, cache: Tensor, shape: AttentionShape | None = None) -> None:
        """Run only the two attention kernels of a decode step, not the projections."""
        sizes = launch.MLASizes(self.spec.heads, 512, 128, 64, 128, self.spec.scale)
        latents, rope = launch.latents_of(cache), self.q[..., self.spec.nope_dim :]
        launch.attend_shares(self.seen, self.latent, rope, latents, self.seqs, sizes, 1, shape)

    def layer(self, cache: Tensor) -> None:
        """Run everything of an MLA layer between its input and its output projection."""
        kv, batch = self.fused[:, -self.spec.width :], self.batch
        entry = MLAEntry(self.norm, 1e-6, self.table, batch.positions, batch.slots, cache)
        TritonMLA().enter(self.q, kv, entry, self.spec)
        self.seen = TritonMLA().attend(self.q, self.weight, cache, batch, self.spec)


def decode_rows(short: bool) -> Iterator[dict[str, Any]]:
    for model, num_seqs, length in itertools.product(MODELS, (1, 32, 128), (1024, 4096, 16384)):
        load = Load(model, num_seqs, length)
        runs: dict[Any, Callable[[Tensor], None]] = {"chosen": load.decode, "layer": load.layer}
        if not short:
            runs = {shape: partial(load.decode, shape=shape) for shape in SHARE_SHAPES[model]}
        for name, run in runs.items():
            try:
                time_s = cold_seconds(run, load.caches)
            except OutOfResources:
                continue
            yield {
                "model": model,
                "seqs": num_seqs,
                "keys": length,
                "shape": tuple(name) if isinstance(name, AttentionShape) else name,
                "us": round(time_s * 1e6, 1),
                "GB/s": round(load.bytes / time_s / 1e9),
                "%": round(100 * load.bytes / time_s / COPY_BYTES_S),
            }


def prefill_rows(short: bool) -> Iterator[dict[str, Any]]:
    chosen = launch.tile_shape
    for model, num_seqs, length, num_queries in [
        ("V2-Lite", 8, 1024, 1024),
        ("V2-Lite", 1, 8192, 8192),
        ("V2-Lite", 1, 16384, 2048),
        ("V3", 1, 4096, 4096),
    ]:
        load = Load(model, num_seqs, length, num_queries)
        pairs = num_seqs * num_queries * (length - (num_queries - 1) / 2)
        flops = 2 * pairs * load.spec.heads * (load.spec.query_dim + load.spec.v_dim)
        for shape in [chosen(torch.bfloat16, 228 << 10)] if short else TILE_SHAPES:
            launch.tile_shape = lambda dtype, sm_bytes, shape=shape: shape
            try:
                time_s = cold_seconds(load.layer, load.caches[:2])
            except OutOfResources:
                continue
            yield {
                "model": model,
                "seqs": num_seqs,
                "keys": length,
                "queries": num_queries,
                "shape": tuple(shape),
                "us": round(time_s * 1e6, 1),
                "TFLOP/s": round(flops / time_s / 1e12),
            }
    launch.tile_shape = chosen


def compile_all() -> None:
    with compiling():
        for model in MODELS:
            load = Load(model, 2, 64)
            for shape in SHARE_SHAPES[model]:
                load.decode(load.caches[0], shape)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("decode", "prefill"))
    parser.add_argument("--short", action="store_true", help="only the shapes in use")
    args = parser.parse_args()
    if args.what == "decode" and not args.short:
        compile_all()
    rows = decode_rows(args.short) if args.what == "decode" else prefill_rows(args.short)
    print_best(rows)


if __name__ == "__main__":
    main()
