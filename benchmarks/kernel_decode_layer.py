"""Time a decode step without attention, and sampling, in CUDA graphs.

    python benchmarks/kernel_decode_layer.py

The floor is the bytes of the weights over 4.28 TB/s, the copy bandwidth of an H200.
"""

import functools
from typing import NamedTuple

import torch
from measuring import COPY_BYTES_S, graph_us, random
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.ops import HeadEntry, HeadNorms
from quire.kernels.triton import sampling
from quire.kernels.triton.launch import compiling
from quire.kernels.triton.matmul import gated, linear
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.qkv import enter

OPS = TritonOps()
EPS = 1e-6


class Sizes(NamedTuple):
    hidden: int
    heads: int
    intermediate: int
    layers: int
    vocab: int
    normed: bool
    kv_heads: int = 8
    head_dim: int = 128


MODELS = {
    "Qwen3-0.6B": Sizes(1024, 16, 3072, 28, 151936, True),
    "Llama-3.1-8B": Sizes(4096, 32, 14336, 32, 128256, False),
}


class Model:
    """All of a decode step but the attention itself; queries stand in for its output."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        width = sizes.heads * sizes.head_dim
        qkv = width + 2 * sizes.kv_heads * sizes.head_dim
        shapes = [
            (qkv, sizes.hidden),
            (sizes.hidden, width),
            (2 * sizes.intermediate, sizes.hidden),
            (sizes.hidden, sizes.intermediate),
        ]
        self.weights = [[random(*shape) for shape in shapes] for _ in range(sizes.layers)]
        self.head, self.norm, self.table = (
            random(sizes.vocab, sizes.hidden),
            random(sizes.hidden),
            random(4096, 128),
        )
        self.caches = random(2, 64, 16, sizes.kv_heads, sizes.head_dim)
        norms = HeadNorms(random(sizes.head_dim), random(sizes.head_dim), EPS)
        self.norms = norms if sizes.normed else None
        num = sum(weight.numel() for layer in self.weights for weight in layer) + self.head.numel()
        self.floor_ms = 1e3 * 2 * num / COPY_BYTES_S

    def step(self, ids: Tensor, positions: Tensor, slots: Tensor, *, own: bool) -> Tensor:
        multiply = linear if own else F.linear
        x = residual = OPS.embed(ids, self.head)
        for i, (qkv, out, gate_up, down) in enumerate(self.weights):
            add = functools.partial(OPS.add_norm, x) if i else OPS.norm
            x = add(residual, self.norm, EPS)
            entry = HeadEntry(self.sizes.heads, self.table, positions, slots, *self.caches, self.norms)
            q = enter(x, entry, qkv, None) if own else None
            q = OPS.rotate_and_write(multiply(x, qkv), entry) if q is None else q
            x = OPS.add_norm(multiply(q.flatten(1), out), residual, self.norm, EPS)
            x = gated(x, gate_up) if own else OPS.gated(F.linear(x, gate_up), "silu")
            x = multiply(x, down)
        return sampling.argmax(multiply(OPS.add_norm(x, residual, self.norm, EPS), self.head))


def steps() -> None:
    for name, sizes in MODELS.items():
        model = Model(sizes)
        runs = {}
        for batch in (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256):
            ids, positions = torch.randint(0, 4000, (2, batch), device="cuda")
            slots = torch.randperm(1024, device="cuda")[:batch]
            runs[batch] = functools.partial(model.step, ids, positions, slots)
        with compiling():
            for run in runs.values():
                run(own=True)
        for batch, run in runs.items():
            own, library = (graph_us(functools.partial(run, own=own)) / 1e3 for own in (True, False))
            print(f"{name} batch {batch}: {own:.3f} ms, library {library:.3f}, floor {model.floor_ms:.3f}")


def samples() -> None:
    kinds = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (0.6, 0, 1.0, 0.0),
        "top_k 20, top_p": (0.6, 20, 0.95, 0.0),
        "top_p": (1.0, 0, 0.9, 0.0),
        "min_p": (1.0, 0, 1.0, 0.1),
    }
    for num in (1, 32, 256):
        logits = 3 * torch.randn(num, 151936, device="cuda")
        whole = torch.arange(num, device="cuda")
        print(f"{num} rows: argmax {graph_us(lambda x=logits: sampling.argmax(x)):.1f} us", end="")  # type: ignore[misc]
        for name, values in kinds.items():
            heat, top_k, top_p, min_p = (torch.full((num,), value, device="cuda") for value in values)
            run = functools.partial(sampling.sample, logits, heat, top_k, top_p, min_p, whole, whole)
            print(f", {name} {graph_us(run):.1f}", end="")
        print()


if __name__ == "__main__":
    steps()
    samples()
