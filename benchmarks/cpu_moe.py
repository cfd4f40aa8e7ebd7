"""Time a layer's routing and experts, beside a dense layer that reads as many bytes for one token.

    python benchmarks/cpu_moe.py KIND [TOKENS]

KIND is float32, bfloat16 or a GGUF type. Both are taped and run in turns; the least of all rounds counts, by
wall clock and by CPU time.
"""

import sys
import time

import test_helpers  # noqa: F401, I001
import torch
from packed import stored

from quire.checkpoint.facts import Routing
from quire.kernels.cpu.gguf import interleaves, pack
from quire.kernels.cpu.linear import LinearProduct, Matrix
from quire.kernels.cpu.moe import CpuExperts
from quire.kernels.cpu.ops import CPUOps
from quire.kernels.cpu.tape import Tape, record

HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS, ROUNDS = 1024, 512, 64, 8, 4, 40
"""Sizes of four layers of a model with 1B parameters, 0.3B of them active."""


def make(kind: str, rows: int, columns: int) -> Matrix:
    if kind in ("float32", "bfloat16"):
        return Matrix.plain((torch.randn(rows, columns) / columns**0.5).to(getattr(torch, kind)))
    return pack(stored(kind, rows, columns, 0), kind, interleaved=interleaves())


def least(tapes: tuple[Tape, Tape], logits: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the least seconds of one run of each tape (a recorded computation), by wall clock and by CPU
    time."""
    wall, cpu = [1e9, 1e9], [1e9, 1e9]
    for _ in range(ROUNDS):
        logits.normal_()
        for i, tape in enumerate(tapes):
            start, used = time.perf_counter(), time.process_time()
            tape.replay()
            wall[i] = min(wall[i], time.perf_counter() - start)
            cpu[i] = min(cpu[i], time.process_time() - used)
    return wall, cpu


@torch.inference_mode()
def main(kind: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    ops, routing = CPUOps(), Routing(CHOSEN, renormalized=True)
    sparse = [
        CpuExperts(
            [[make(kind, INNER, HIDDEN) for _ in range(2)] for _ in range(EXPERTS)],
            [make(kind, HIDDEN, INNER) for _ in range(EXPERTS)],
            "silu",
        )
        for _ in range(LAYERS)
    ]
    wide = CHOSEN * INNER
    dense = [
        (
            LinearProduct([make(kind, wide, HIDDEN) for _ in range(2)]),
            LinearProduct([make(kind, HIDDEN, wide)]),
        )
        for _ in range(LAYERS)
    ]
    x = torch.randn(num_tokens, HIDDEN).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    logits = torch.randn(LAYERS, num_tokens, EXPERTS)
    with record() as first:
        for layer, scores in zip(sparse, logits, strict=True):
            layer(x, *ops.route(scores, routing))
    with record() as second:
        for gate_up, down in dense:
            down(ops.gated(gate_up(x), "silu"))
    assert first.complete and second.complete
    for name, (ours, theirs) in zip(("clock", "CPU"), least((first, second), logits), strict=True):
        experts_us, dense_us = (seconds / LAYERS * 1e6 for seconds in (ours, theirs))
        print(
            f"{kind}, {num_tokens} tokens, by the {name}: {experts_us:.0f} us, dense {dense_us:.0f} us",
            end="",
        )
        print(f", {theirs / ours:.0%} of its speed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
