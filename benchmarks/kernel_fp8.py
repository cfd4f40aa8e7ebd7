"""Time GEMMs with e4m3 weights of Llama-3.1-8B in CUDA graphs; `--sweep` tries other tile shapes.

    python benchmarks/kernel_fp8.py [--sweep]

Every GEMM has weights of its own, so that no cache helps. The floor is the larger of the weight bytes over
4.28 TB/s, the copy bandwidth of an H200, and the operations over 1,400 TFLOP/s.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from measuring import COPY_BYTES_S, graph_us, random
from torch import Tensor

from quire.kernels.reference.fp8 import Scaled, linear_reference, quantize_weight
from quire.kernels.triton import matmul
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.fp8 import Plan, gated, linear, multiply, quantize
from quire.kernels.triton.launch import compiling
from quire.kernels.triton.matmul import RowsPlan, TilesPlan

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
NUMS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 2048, 8192)
HELD_BYTES = 960 << 20
"""Total bytes of the different weights of one benchmark: several times the size of the L2 cache."""


def weights_of(size_out: int, size_in: int, *, blocked: bool = False) -> list[Scaled]:
    made = []
    for _ in range(max(HELD_BYTES // (size_out * size_in), 2)):
        data, scale = quantize_weight(random(size_out, size_in))
        if blocked:
            scale = torch.rand(-(-size_out // 128), -(-size_in // 128), device="cuda") * 1e-4 + 1e-5
        made.append(Scaled(data, scale))
    return made


def floor_us(num: int, size_out: int, size_in: int) -> float:
    return max(1e6 * size_out * size_in / COPY_BYTES_S, 2 * num * size_out * size_in / 1.4e9)


def plans(num: int, parts: int) -> Iterator[Plan]:
    if num <= 4:
        for rows, warps in itertools.product((2, 4, 8), (4, 8, 16)):
            yield RowsPlan(rows, warps)
    if 1 < num <= 64:
        height = 16 if num <= 16 else 32 if num <= 32 else 64
        for rows, length, splits, warps, stages in TILES:
            if parts == 1 or splits == 1:
                yield TilesPlan(height, rows, length, splits, warps, stages)
    if num > 64:
        for shape in LARGE:
            if parts == 1 or shape[3] == 1:
                yield TilesPlan(*shape)


TILES = [
    (64, 128, 1, 4, 4), (64, 128, 1, 4, 8), (64, 256, 1, 4, 3), (64, 256, 1, 4, 4), (64, 256, 1, 4, 5),
    (64, 256, 1, 4, 8), (64, 512, 1, 4, 2), (64, 512, 1, 4, 4), (64, 512, 2, 4, 3), (64, 256, 2, 4, 4),
    (64, 256, 2, 4, 6), (64, 256, 3, 4, 5), (64, 256, 4, 4, 5), (128, 128, 1, 4, 5), (128, 128, 1, 8, 4),
    (128, 256, 1, 8, 3), (128, 256, 1, 4, 2), (64, 64, 1, 4, 6), (64, 128, 2, 4, 4),
]  # fmt: skip
LARGE = [
    (64, 64, 128, 1, 4, 5), (64, 64, 128, 2, 4, 5), (64, 64, 128, 3, 4, 6), (64, 64, 256, 1, 4, 4),
    (64, 64, 256, 2, 4, 4), (64, 64, 256, 4, 4, 4), (64, 128, 128, 1, 4, 5), (64, 128, 128, 2, 4, 5),
    (64, 128, 256, 1, 4, 4), (128, 64, 128, 1, 4, 5), (128, 64, 128, 2, 4, 6), (128, 64, 256, 1, 4, 4),
    (128, 64, 256, 2, 4, 3), (128, 128, 128, 1, 4, 4), (128, 128, 128, 1, 8, 4), (128, 128, 128, 1, 8, 5),
    (128, 128, 128, 2, 4, 4), (128, 128, 128, 3, 8, 4), (128, 256, 128, 1, 8, 4), (256, 128, 128, 1, 8, 4),
]  # fmt: skip


def fits(plan: Plan, parts: int, size_in: int) -> bool:
    if isinstance(plan, RowsPlan):
        return plan.rows * parts * size_in <= 2**17 and plan.rows * parts * size_in >= 2**11 * plan.warps
    assert plan is not None
    held = plan.stages * plan.length * (plan.num + parts * plan.rows)
    return held <= 220 << 10 and parts * plan.num * plan.rows / plan.warps <= 4096


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


Run = Callable[[], object]


def sweep(nums: tuple[int, ...], *, blocked: bool) -> None:
    runs: dict[tuple[int, str], dict[str, Run]] = {}
    counts, checks = {}, []
    for name, (size_out, size_in) in SHAPES.items():
        weights, parts = weights_of(size_out, size_in, blocked=blocked), 1 + (name == "gate, up")
        counts[name] = len(weights)
        for num in nums:
            x, of = 50 * random(num, size_in), runs.setdefault((num, name), {})
            for plan in plans(num, parts):
                if fits(plan, parts, size_in) and not (blocked and not _has_one_scale(plan)):
                    once = functools.partial(multiply, x, bias=None, plan=plan, gated=parts == 2)
                    of[str(plan)] = functools.partial(_each, once, weights)
                    first = functools.partial(once, weight=weights[0])
                    checks.append((num, name, plan, first, x, weights[0]))
            if num > 16 and not blocked:
                of["library"] = functools.partial(_each, functools.partial(_by_library, x, parts), weights)
                of["one scale"] = functools.partial(_each, functools.partial(_one_scale, x), weights)
            if num > 64 and blocked:
                of["blocks"] = functools.partial(_each, functools.partial(_by_blocks, x), weights)
            if name == "down":
                wide = 50 * random(num, 2 * size_in)
                both = lambda weight, x=wide: quantize(x, grouped=blocked, gated=True)  # noqa: E731
                of["both"] = functools.partial(_each, both, weights)
            alone = lambda weight, x=x: quantize(x, grouped=blocked)  # noqa: E731
            of["quantize"] = functools.partial(_each, alone, weights)
    try:
        with compiling():
            for of in runs.values():
                for kind, run in of.items():
                    if kind not in ("library", "one scale", "blocks"):
                        run()
    except Exception as failed:
        print("compiling:", repr(failed)[:300])
    known: dict[tuple[int, str, bool], Tensor] = {}
    for num, name, plan, once, x, weight in checks:
        key = num, name, isinstance(plan, TilesPlan)
        if key not in known:
            known[key] = linear_reference(x, weight, quantized=key[2])
        expected = gated_of(known[key], "silu") if name == "gate, up" else known[key]
        try:
            wrong = error(once(), expected)
            if not wrong < 8e-3:
                print(num, name, plan, "is wrong by", wrong)
        except Exception as failed:
            print(num, name, plan, repr(failed)[:100])
            runs[num, name].pop(str(plan))
    for (num, name), of in runs.items():
        times = []
        for kind, run in of.items():
            try:
                times.append((graph_us(run, 5) / counts[name], kind))
            except Exception as failed:
                print(num, name, kind, repr(failed)[:200])
        others = ("library", "one scale", "blocks", "quantize", "both")
        shown = sorted(pair for pair in times if pair[1] not in others)[:4]
        shown += [pair for pair in times if pair[1] in others]
        print(f"{num} {name}, floor {floor_us(num, *SHAPES[name]):.1f}:", end="")
        print(";".join(f" {us:.1f} {_short(kind)}" for us, kind in shown))


def _short(kind: str) -> str:
    for word in ("num=", "rows=", "length=", "splits=", "warps=", "stages=", " "):
        kind = kind.replace(word, "")
    return kind


def _has_one_scale(plan: Plan) -> bool:
    return not isinstance(plan, TilesPlan) or plan.length == 128 and plan.rows <= 128


def _each(once: Callable[..., object], weights: list[Scaled]) -> None:
    for weight in weights:
        once(weight=weight)


def _by_library(x: Tensor, parts: int, weight: Scaled) -> Tensor:
    y = multiply(x, weight, None, None)
    return gated_of(y, "silu") if parts == 2 else y


def _by_blocks(x: Tensor, weight: Scaled) -> Tensor:
    narrow, scale = quantize(x, grouped=True)
    return torch._scaled_mm(
        narrow, weight.data.t(), scale_a=scale, scale_b=weight.scale.t(), out_dtype=x.dtype
    )  # fmt: skip


def _one_scale(x: Tensor, weight: Scaled) -> Tensor:
    """Multiply as if the weight had a single scale, without silu."""
    narrow, scale = quantize(x, grouped=False)
    return torch._scaled_mm(
        narrow, weight.data.t(), scale_a=scale[0], scale_b=weight.scale[0], out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip


def table() -> None:
    """Print the times of the tile shapes that Quire chooses, beside those of bf16 GEMMs."""
    for blocked in (False, True):
        print("rows |", " | ".join(SHAPES), "|", "block" if blocked else "channel", "/ bf16 / floor")
        lines: dict[int, list[str]] = {num: [] for num in NUMS}
        for name, (size_out, size_in) in SHAPES.items():
            weights, both = weights_of(size_out, size_in, blocked=blocked), name == "gate, up"
            plain = [random(size_out, size_in) for _ in weights]
            for num in NUMS:
                x = 50 * random(num, size_in)
                ours = functools.partial(_each, functools.partial(gated if both else linear, x), weights)
                of_plain = matmul.gated if both else matmul.linear
                theirs = lambda x=x, of=of_plain, plain=plain: [of(x, weight) for weight in plain]  # noqa: E731
                with compiling():
                    ours()
                    theirs()
                us = [graph_us(run, 5) / len(weights) for run in (ours, theirs)]
                lines[num].append(f"{us[0]:.1f} / {us[1]:.1f} / {floor_us(num, size_out, size_in):.1f}")
        for num, cells in lines.items():
            print(num, "|", " | ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", type=int, nargs="*", default=None)
    parser.add_argument("--blocked", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.sweep is None:
        table()
    else:
        sweep(tuple(args.sweep), blocked=args.blocked)


if __name__ == "__main__":
    main()
