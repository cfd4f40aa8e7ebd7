"""Time all GEMMs of the packaged model by number of rows, on one thread.

    python benchmarks/cpu_small_batches.py

The figure is the sum over its weights of the best of many runs, which other work on the machine hardly moves.
"""

import time

import test_helpers  # noqa: F401, I001
import torch
from packed import stored

from quire.kernels.cpu.gguf import pack
from quire.kernels.cpu.linear import LinearProduct
from quire.kernels.cpu.tape import Tape, record

WEIGHTS = {"qkv": (30, 960, 576), "out": (30, 576, 576), "gate, up": (30, 3072, 576), "down": (30, 576, 1536)}
HEAD = {"head": (1, 49152, 576)}
"""The output head: (number of weight matrices, rows, columns) by name."""
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32)
ROUNDS = 40


def taped(product: LinearProduct, num_rows: int, columns: int) -> Tape:
    x = torch.randn(num_rows, columns)
    with record() as tape:
        product(x)
    return tape


def main() -> None:
    torch.set_num_threads(1)
    tapes = {}
    for name, (_, rows, columns) in (WEIGHTS | HEAD).items():
        product = LinearProduct([pack(stored("Q4_1", rows, columns, 0), "Q4_1", interleaved=True)])
        tapes |= {(name, count): taped(product, count, columns) for count in COUNTS}
    best = dict.fromkeys(tapes, float("inf"))
    for _ in range(ROUNDS):
        for key, tape in tapes.items():
            began = time.perf_counter()
            tape.replay()
            best[key] = min(best[key], time.perf_counter() - began)
    print("rows | ms | ms a row")
    for count in COUNTS:
        total = sum(1e3 * num * best[name, count] for name, (num, _, _) in (WEIGHTS | HEAD).items())
        print(f"{count} | {total:.1f} | {total / count:.2f}", flush=True)


if __name__ == "__main__":
    main()
