"""Time the MXFP4 experts of a gpt-oss-20b layer in CUDA graphs; `--sweep` tries other tile shapes.

    python benchmarks/kernel_mxfp4.py [--sweep]

Routing is random and every layer has weights of its own. The floor is the packed bytes of the chosen experts
over 4.28 TB/s, the copy bandwidth of an H200.
"""

import argparse

import torch
from measuring import COPY_BYTES_S, graph_us, random

from quire.kernels.triton.launch import compiling
from quire.kernels.triton.moe import MoERowsPlan, MoETile, MoETilesPlan, Plan
from quire.kernels.triton.mxfp4 import Mxfp4Weights, mixed, plan_of

EXPERTS, TOP, SIZE, LAYERS = 32, 4, 2880, 4
TOKENS = (1, 2, 4, 8, 32, 64, 256, 2048)
EXPERT_BYTES = 3 * SIZE * SIZE * 17 // 32
BYTES_US = COPY_BYTES_S / 1e6
"""Copy bandwidth of an H200 in bytes per microsecond."""
ROWS: list[Plan] = [MoERowsPlan(*rows, warps, warps) for rows in ((2, 4), (4, 4), (4, 8)) for warps in (2, 4)]
SWEEP: dict[int, list[Plan]] = {
    1: [*ROWS, MoETilesPlan(16, MoETile(64, 128, 4, 4), MoETile(64, 128, 4, 4))],
    4: [*ROWS[1:4], MoETilesPlan(16, MoETile(64, 128, 4, 4), MoETile(64, 128, 4, 4))],
    32: [
        MoETilesPlan(16, MoETile(rows, length, warps, stages), MoETile(rows, length, warps, stages))
        for rows, length, warps in ((64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 128, 8))
        for stages in (3, 5)
    ],
    256: [
        MoETilesPlan(num, MoETile(rows, length, warps, 3), MoETile(rows, length, warps, 3))
        for num in (16, 32, 64)
        for rows, length, warps in ((64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 128, 8))
    ],
    2048: [MoETilesPlan(num, MoETile(64, 64, 4, 3), MoETile(128, 64, 8, 3)) for num in (32, 64, 128)],
}


def weights() -> Mxfp4Weights:
    def packed(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (EXPERTS, rows, SIZE // 32)
        codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
        return codes, torch.randint(118, 122, shape, dtype=torch.uint8, device="cuda")

    return Mxfp4Weights(*packed(2 * SIZE), *packed(SIZE), random(EXPERTS, 2 * SIZE), random(EXPERTS, SIZE))


def us_of(num: int, plan: Plan, of: list[Mxfp4Weights]) -> tuple[float, float]:
    """Return the microseconds of the experts of a layer for `num` tokens, and the least that the bandwidth
    allows."""
    x, count = random(num, SIZE), 16 if num <= 256 else LAYERS
    ids = [torch.rand(num, EXPERTS, device="cuda").topk(TOP).indices.to(torch.int32) for _ in range(count)]
    shares = torch.rand(num, TOP, device="cuda")

    def run() -> None:
        for i, chosen in enumerate(ids):
            mixed(x, chosen, shares, of[i % LAYERS], "clamped_swiglu", plan)

    touched = sum(len(chosen.unique()) for chosen in ids) / count
    return graph_us(run) / count, touched * EXPERT_BYTES / BYTES_US


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    sweep = parser.parse_args().sweep
    of = [weights() for _ in range(LAYERS)]
    wanted = [(num, [plan_of(num * TOP, EXPERTS, torch.bfloat16)]) for num in TOKENS]
    wanted += list(SWEEP.items()) if sweep else []
    with compiling():
        for num, plans in wanted:
            x, ids = random(num, SIZE), torch.zeros(num, TOP, dtype=torch.int32, device="cuda")
            for plan in plans:
                mixed(x, ids, torch.rand(num, TOP, device="cuda"), of[0], "clamped_swiglu", plan)
    for num, plans in wanted:
        for plan in plans:
            us, floor = us_of(num, plan, of)
            print(f"{num:5} {us:9.1f} us  floor {floor:8.1f}  {floor / us:5.0%}  {plan}", flush=True)


if __name__ == "__main__":
    main()
