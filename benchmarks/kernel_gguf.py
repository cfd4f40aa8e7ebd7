"""Time GEMMs with GGUF, AWQ and GPTQ weights in CUDA graphs, and their share of the floor.

    python benchmarks/kernel_gguf.py [--sweep]

The layers are those of Llama-3.1-8B. Every GEMM has weights of its own, so that no cache helps; `awq` is 4
bits in groups of 128. The floor is the bytes of the weight over 4.28 TB/s, the copy bandwidth of an H200.
The results of each tile shape are compared with those of the dequantized weight.
"""

import argparse
import functools
from collections.abc import Callable
from itertools import product as product_of
from typing import Any

import torch
from measuring import COPY_BYTES_S, graph_us, random
from torch import Tensor

from quire.kernels.triton import gguf_launch, int4
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.gguf_layout import Planes, _allocate
from quire.kernels.triton.gguf_rows import WholeRows
from quire.kernels.triton.launch import compiling
from quire.kernels.triton.matmul import TilesPlan

SHAPES = {
    "qkv": (6144, 4096, ""),
    "o": (4096, 4096, ""),
    "gate_up": (28672, 4096, "silu"),
    "down": (4096, 14336, ""),
    "head": (128256, 4096, ""),
}
BYTES_US = COPY_BYTES_S / 1e6
"""Copy bandwidth of an H200 in bytes per microsecond."""
ENOUGH_BYTES = 4e8
SWEEP: dict[int, list[WholeRows | TilesPlan]] = {
    1: [WholeRows(132 * per, warps, two) for per in (2, 3, 4) for warps in (4, 8) for two in (False, True)],
    8: [TilesPlan(16, rows, 256, s, rows // 16, 3) for rows in (64, 128) for s in (1, 2, 4, 8)],
    32: [TilesPlan(32, rows, 256, s, rows // 16, 3) for rows in (64, 128) for s in (1, 2, 4, 8)],
    64: [TilesPlan(64, rows, 128, s, rows // 16, 4) for rows in (64, 128) for s in (1, 2, 4)],
    128: [TilesPlan(128, rows, 128, s, rows // 16, 3) for rows in (64, 128) for s in (1, 2, 4)],
    256: [TilesPlan(128, 64, 128, s, 4, 3) for s in (1, 2)]
    + [TilesPlan(256, 128, 128, s, 8, 3) for s in (1, 2, 4)],
}
"""Plans by rows of x; lengths are for 4-bit codes."""
Weight = Planes | int4.GroupedWeight


def made(kind: str, rows: int, columns: int) -> Weight:
    """Return a weight of the given quantization with random bytes and small scales."""
    if kind == "awq":
        words = torch.randint(-(2**31), 2**31, (rows, columns // 32, 4), dtype=torch.int32, device="cuda")
        scales = torch.rand(rows, columns // 128, device="cuda") * 0.01
        zeros = torch.randint(0, 16, scales.shape, device="cuda")
        few = torch.zeros(rows, columns, dtype=torch.uint8, device="cuda")
        return int4.pack(few, scales, zeros, bits=4, dtype=torch.bfloat16)._replace(codes=words)
    planes = _allocate(kind, rows, columns, torch.device("cuda"))
    planes.data.random_(0, 256)
    planes.subs.bitwise_and_(63)
    planes.scales.copy_(torch.randn(planes.scales.shape, device="cuda") * 0.01)
    return planes


def bytes_of(weight: Weight) -> int:
    if isinstance(weight, Planes):
        return weight.data.numel()
    return 4 * (weight.codes.numel() + weight.heads.numel())


def chosen(x: Tensor, weight: Weight, activation: str) -> Tensor:
    of: Any = gguf_launch if isinstance(weight, Planes) else int4
    if activation:
        return of.gated(x, weight)  # type: ignore[no-any-return]
    return of.product(x, weight) if isinstance(weight, Planes) else of.linear(x, weight)


def planned(x: Tensor, weight: Weight, activation: str, plan: WholeRows | TilesPlan) -> Tensor:
    if isinstance(weight, Planes):
        unit = gguf_launch.form_of(weight).unit
        plan = plan._replace(length=plan.length * unit // 32) if isinstance(plan, TilesPlan) else plan
        return gguf_launch.multiply(x, weight, None, plan, activation)
    return int4.multiply(x, weight, None, plan, gated=activation != "")


def expected(x: Tensor, weight: Weight, activation: str) -> Tensor:
    of: Any = gguf_launch if isinstance(weight, Planes) else int4
    y = x @ of.unpack(weight, x.dtype).t()
    return gated_of(y, activation) if activation else y


def timed(run: Callable[..., Tensor], weights: list[Weight], x: Tensor, activation: str) -> str:
    def all_of() -> None:
        for weight in weights:
            run(x, weight, activation)

    ours, known = run(x, weights[0], activation), expected(x, weights[0], activation)
    error = ((ours.float() - known.float()).norm() / known.float().norm()).item()
    us, floor = graph_us(all_of) / len(weights), bytes_of(weights[0]) / BYTES_US
    return f"{us:.1f} us {100 * floor / us:.0f}%" + (f" WRONG: {error:.3f}" if not error < 0.02 else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="Q4_K,Q8_0,Q6_K,Q5_K,Q4_0,awq")
    parser.add_argument("--tokens", default="1,8,32,64,128,256")
    parser.add_argument("--sweep", action="store_true", help="other plans, too")
    args = parser.parse_args()
    for kind, (shape, (size_out, size_in, activation)) in product_of(args.kinds.split(","), SHAPES.items()):
        first = made(kind, size_out, size_in)
        num = max(3, min(40, int(ENOUGH_BYTES // bytes_of(first))))
        weights, said = [first, *(made(kind, size_out, size_in) for _ in range(num - 1))], []
        for x in (random(int(tokens), size_in) for tokens in args.tokens.split(",")):
            runs: dict[str, Callable[..., Tensor]] = {"chosen": chosen}
            for plan in SWEEP.get(len(x), []) if args.sweep else []:
                runs[str(tuple(map(int, plan)))] = functools.partial(planned, plan=plan)
            with compiling():
                for run in runs.values():
                    run(x, first, activation)
            for name, run in runs.items():
                said.append(f"{len(x)} {name}: {timed(run, weights, x, activation)}")
        print(f"{kind} {shape} (floor {bytes_of(first) / BYTES_US:.1f} us):", "; ".join(said), flush=True)


if __name__ == "__main__":
    main()
