"""`python packed_speed.py`: us of products with packed weights in CUDA graphs, and the share of the floor.

Not a test. Layers of Llama-3.1-8B, each product with a weight of its own, so that no cache helps. The floor
is the bytes of the planes over 4.8 TB/s.
"""

import argparse
from itertools import product as product_of

import torch
from layer_speed import graph_us, random

from quire.kernels.triton.launch import compiling
from quire.kernels.triton.packed_launch import Rows, Tiles, choose, multiply, product
from quire.kernels.triton.planes import Planes, _unfilled

SHAPES = {
    "qkv": (6144, 4096, ""),
    "o": (4096, 4096, ""),
    "gate_up": (28672, 4096, "silu"),
    "down": (4096, 14336, ""),
    "head": (128256, 4096, ""),
}
TB_S = 4.8e6
"""Bytes in a microsecond."""
ENOUGH_BYTES = 4e8
SWEEP: dict[int, list[Rows | Tiles]] = {
    1: [Rows(two, warps) for two in (False, True) for warps in (2, 4, 8)],
    16: [Tiles(16, 64, 256, s, 4, 3) for s in (1, 2, 4, 8)] + [Tiles(16, 128, 128, s, 8, 3) for s in (1, 4)],
    64: [Tiles(64, 128, 128, s, 8, 3) for s in (1, 2, 4)] + [Tiles(64, 64, 128, s, 4, 3) for s in (1, 4)],
    128: [Tiles(128, 128, 128, s, 8, 2) for s in (1, 2)] + [Tiles(64, 128, 128, s, 8, 3) for s in (1, 2)],
}


def planes(kind: str, rows: int, columns: int) -> Planes:
    """Of random bytes, with small scales."""
    made = _unfilled(kind, rows, columns, torch.device("cuda"))
    made.data.random_(0, 256)
    made.scales.copy_(torch.randn(made.scales.shape, device="cuda") * 0.01)
    return made


def timed(weights: list[Planes], x: torch.Tensor, plan: Rows | Tiles | None, activation: str) -> str:
    def run() -> None:
        for weight in weights:
            if plan is None:
                product(x, weight)
            else:
                multiply(x, weight, None, plan, activation)

    us, floor = graph_us(run) / len(weights), weights[0].data.numel() / TB_S
    return f"{len(x)} {tuple(map(int, plan or ()))}: {us:.1f} us {100 * floor / us:.0f}%"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="Q4_K,Q8_0,Q6_K")
    parser.add_argument("--tokens", default="1,2,8,16,32,64,128,256")
    parser.add_argument("--sweep", action="store_true", help="other plans, too")
    args = parser.parse_args()
    for kind, (shape, (size_out, size_in, activation)) in product_of(args.kinds.split(","), SHAPES.items()):
        first = planes(kind, size_out, size_in)
        num = max(3, min(40, int(ENOUGH_BYTES // first.data.numel())))
        weights, said = [first, *(planes(kind, size_out, size_in) for _ in range(num - 1))], []
        for x in (random(int(tokens), size_in) for tokens in args.tokens.split(",")):
            chosen = choose(len(x), size_out, size_in, 2 if activation else 1)
            plans = [chosen, *(SWEEP.get(len(x), []) if args.sweep else [])]
            with compiling():
                for plan in filter(None, plans):
                    multiply(x, first, None, plan, activation)
            said += [timed(weights, x, plan, activation) for plan in plans]
        print(f"{kind} {shape} (floor {first.data.numel() / TB_S:.1f} us):", "; ".join(said), flush=True)


if __name__ == "__main__":
    main()
