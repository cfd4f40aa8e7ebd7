"""Time the experts of a Qwen3-30B-A3B layer in CUDA graphs, by part; `--sweep` tries other tile shapes.

    python benchmarks/kernel_moe.py [--sweep]

Routing is random and every layer has weights of its own. The floor is the bytes of the chosen experts over
4.28 TB/s, the copy bandwidth of an H200.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from measuring import COPY_BYTES_S, graph_us, random
from torch import Tensor

from quire.checkpoint.facts import Routing
from quire.kernels.reference.moe import ExpertWeights
from quire.kernels.triton import moe as kernels
from quire.kernels.triton.launch import compiling, overlap
from quire.kernels.triton.moe import MoERowsPlan, MoETile, MoETilesPlan, Plan
from quire.kernels.triton.moe_align import add

EXPERTS, TOP, HIDDEN, INNER, LAYERS = 128, 8, 2048, 768, 4
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192, 16384)
ROUTING = Routing(TOP, renormalized=True)
EXPERT_BYTES = 2 * 3 * HIDDEN * INNER
PARTS = ("choose", "sort", "up", "down", "sum", "mix", "both")
BYTES_US = COPY_BYTES_S / 1e6


class Layer(NamedTuple):
    experts: ExpertWeights
    router: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor


def layers(weights: list[ExpertWeights], num: int) -> list[Layer]:
    """Return the layers for batches of `num` tokens: as many as a model has if a layer is quick, since a
    graph itself takes some microseconds."""
    made = []
    for i in range(48 if num <= 8 else 16 if num <= 512 else LAYERS):
        router, x = random(EXPERTS, HIDDEN), 50 * random(num, HIDDEN)
        ids = torch.rand(num, EXPERTS, device="cuda").topk(TOP).indices.to(torch.int32)
        made.append(Layer(weights[i % LAYERS], router, x, ids, torch.rand(num, TOP, device="cuda")))
    return made


def parts(of: list[Layer], plan: Plan) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each part of an MoE layer, and a function that runs this part of all layers."""
    num = len(of[0].x)
    between, apart, out = random(num * TOP, INNER), random(num * TOP, HIDDEN), random(num, HIDDEN)

    def each(run: Callable[[Layer], object]) -> Callable[[], object]:
        return lambda: [run(layer) for layer in of]

    yield "choose", each(lambda layer: kernels.choose(layer.x, layer.router, ROUTING))
    if isinstance(plan, MoERowsPlan):
        yield "up", each(lambda at: kernels.up_rows(between, at.x, at.ids, at.experts, "silu", plan))
        yield "down", each(lambda at: kernels.down_rows(out, between, at.ids, at.weights, at.experts, plan))
    else:
        ahead = num <= 256 and overlap(1)
        yield "sort", each(lambda layer: kernels.sort(layer.ids, EXPERTS, plan.num, ahead=ahead))
        pairs = [kernels.sort(layer.ids, EXPERTS, plan.num, ahead=ahead) for layer in of]
        multiply = functools.partial(kernels.multiply, plan=plan, top=TOP, ahead=ahead)
        yield (
            "up",
            lambda: [
                multiply(between, at.x, pair, experts=at.experts, activation="silu")
                for at, pair in zip(of, pairs, strict=True)
            ],
        )
        yield (
            "down",
            lambda: [
                multiply(apart, between, pair, experts=at.experts) for at, pair in zip(of, pairs, strict=True)
            ],
        )
        yield "sum", each(lambda layer: add(out, apart, layer.ids, layer.weights, ahead=ahead))
    mixed = functools.partial(kernels.mixed, activation="silu", plan=plan)
    yield "mix", each(lambda at: mixed(at.x, at.ids, at.weights, at.experts))

    def whole(at: Layer) -> None:
        kernels.choose(at.x, at.router, ROUTING)
        mixed(at.x, at.ids, at.weights, at.experts)

    yield "both", each(whole)


def planned(num: int) -> Plan:
    return kernels.plan_of(num * TOP, TOP, EXPERTS, HIDDEN, INNER, torch.bfloat16)


def table(weights: list[ExpertWeights]) -> None:
    cases = {num: layers(weights, num) for num in TOKENS}
    with compiling():
        for num, of in cases.items():
            for _, run in parts(of, planned(num)):
                run()
    print(
        "tokens | experts |", " | ".join(PARTS), "| floor | GB/s of mix | TFLOP/s of up, down | floor / mix"
    )
    for num, of in cases.items():
        us = {name: graph_us(run) / len(of) for name, run in parts(of, planned(num))}
        touched = sum(len(layer.ids.unique()) for layer in of) / len(of)
        size, flop = touched * EXPERT_BYTES, num * TOP * EXPERT_BYTES
        times = " | ".join(f"{us[name]:.1f}" if name in us else "-" for name in PARTS)
        floor, products = size / BYTES_US, us["up"] + us["down"]
        print(
            f"{num} | {touched:.1f} | {times} | {floor:.1f} | {size / us['mix'] / 1e3:.0f} | "
            f"{flop / products / 1e6:.0f} | {floor / us['mix']:.0%}"
        )


HEIGHTS = {1: (16,), 8: (16,), 32: (16,), 128: (16, 32), 256: (16, 32), 512: (32, 64), 2048: (64, 128),
           8192: (64, 128), 16384: (128,)}  # fmt: skip
SMALL = [
    MoETile(*shape)
    for shape in [
        (32, 128, 4, 4), (32, 256, 4, 3), (32, 256, 4, 4), (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3),
        (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 256, 4, 2), (64, 256, 4, 3), (128, 64, 4, 4),
        (128, 64, 4, 6), (128, 128, 4, 2), (128, 128, 4, 3), (128, 128, 8, 3), (128, 128, 4, 4),
        (256, 64, 8, 3),
    ]
]  # fmt: skip
LARGE = [
    MoETile(*shape)
    for shape in [
        (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4),
        (128, 128, 8, 2), (256, 64, 8, 3), (256, 64, 8, 4), (128, 128, 8, 3),
    ]
]  # fmt: skip
ROWS = [
    MoERowsPlan(*shape)
    for shape in [
        (4, 2, 8, 4), (2, 2, 4, 8), (4, 4, 4, 8), (8, 4, 8, 4), (2, 1, 8, 4), (1, 1, 4, 2), (8, 8, 16, 16),
        (2, 8, 2, 8), (1, 1, 2, 1), (4, 2, 16, 2),
    ]
]  # fmt: skip


def fits(num: int, tile: MoETile, parts: int) -> bool:
    height, rows, length = num, tile.rows * parts, tile.length
    return (
        2 * tile.stages * length * (height + rows) <= 220 * 1024 and height * rows / tile.warps <= 4096 + 64
    )


def plans(num: int) -> Iterator[Plan]:
    """Yield the tile plans to try for `num` tokens. Up and down projections have the same tile, as each
    part is timed alone."""
    if num <= 4:
        yield from ROWS
    for height in HEIGHTS.get(num, ()):
        for tile in SMALL if height < 64 else LARGE:
            yield MoETilesPlan(height, tile, tile)


def usable(plan: Plan, name: str) -> bool:
    if isinstance(plan, MoERowsPlan):
        return name in ("up", "down")
    return name in ("up", "down") and fits(plan.num, plan.up, 2 if name == "up" else 1)


def sweep(weights: list[ExpertWeights]) -> None:
    cases = {num: layers(weights, num) for num in (1, 2, 4, *list(HEIGHTS)[1:])}
    runs = {}
    for num, of in cases.items():
        for plan in plans(num):
            for name, run in parts(of, plan):
                if usable(plan, name):
                    runs[num, name, plan] = run
    with compiling():
        for run in runs.values():
            run()
    found: dict[tuple[int, str], list[tuple[float, Plan]]] = {}
    for (num, name, plan), run in runs.items():
        found.setdefault((num, name), []).append((graph_us(run, 5) / len(cases[num]), plan))
    for (num, name), times in found.items():
        touched = sum(len(layer.ids.unique()) for layer in cases[num]) / len(cases[num])
        share = 2 / 3 if name == "up" else 1 / 3
        floor = share * touched * EXPERT_BYTES / BYTES_US
        flop = share * num * TOP * EXPERT_BYTES
        print(f"{num} {name}, floor {floor:.1f}, {flop / min(times)[0] / 1e6:.0f} TFLOP/s:")
        for us, plan in sorted(times)[:8]:
            shown = plan if isinstance(plan, MoERowsPlan) else (plan.num, *plan.up)
            print(f"    {us:.1f} {tuple(shown)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    weights = [ExpertWeights(*(random(*shape) for shape in shapes)) for _ in range(LAYERS)]
    (sweep if args.sweep else table)(weights)


if __name__ == "__main__":
    main()
