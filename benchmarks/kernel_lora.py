"""Time a decode step of the 8B without attention, and the GEMMs of prompts, by number of LoRA adapters.

    python benchmarks/kernel_lora.py [--prompt]

Adapters have rank 16 and are on all projections.
"""

import argparse
import functools
import itertools

import torch
from kernel_decode_layer import EPS, MODELS, OPS, Model
from measuring import graph_us, random
from torch import Tensor

from quire.kernels.ops import HeadEntry, LoRAHeads
from quire.kernels.triton import sampling
from quire.kernels.triton.launch import compiling
from quire.kernels.triton.lora import LoRARows, assign
from quire.kernels.triton.matmul import gated, linear
from quire.kernels.triton.qkv import enter


class Adapters:
    """LoRA weights of all layers; the memory of a slot is contiguous, as in `AdapterSlots`."""

    def __init__(self, model: Model, rank: int, num_slots: int) -> None:
        self.num_slots = num_slots
        sizes = model.sizes
        width, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.points = [
            (sizes.hidden, (width, kv, kv)),
            (width, (sizes.hidden,)),
            (sizes.hidden, (sizes.intermediate, sizes.intermediate)),
            (sizes.intermediate, (sizes.hidden,)),
        ]
        numbers = sum(rank * (len(outs) * size_in + sum(outs)) for size_in, outs in self.points)
        memory, at = random(num_slots, sizes.layers * numbers), 0
        self.layers: list[list[tuple[Tensor, Tensor, tuple[int, ...]]]] = []
        for _ in range(sizes.layers):
            self.layers.append([])
            for size_in, outs in self.points:
                middle, end = at + len(outs) * rank * size_in, at + rank * (len(outs) * size_in + sum(outs))
                a = memory[:, at:middle].unflatten(1, (len(outs) * rank, size_in))
                self.layers[-1].append((a, memory[:, middle:end].unflatten(1, (sum(outs), rank)), outs))
                at = end

    def of(self, layer: int, tokens: LoRARows | None) -> list[LoRAHeads | None]:
        return [tokens and LoRAHeads(*point, tokens) for point in self.layers[layer]]


def step(
    model: Model, adapters: Adapters, ids: Tensor, positions: Tensor, slots: Tensor, of: Tensor | None
) -> Tensor:
    """Compute a decode step; `of` holds the LoRA adapter slot of each row, or is None without LoRA."""
    x = residual = OPS.embed(ids, model.head)
    tokens = None if of is None else assign(of, adapters.num_slots)
    for i, (qkv, out, gate_up, down) in enumerate(model.weights):
        add = functools.partial(OPS.add_norm, x) if i else OPS.norm
        x = add(residual, model.norm, EPS)
        entry = HeadEntry(model.sizes.heads, model.table, positions, slots, *model.caches, model.norms)
        points = adapters.of(i, tokens)
        q = enter(x, entry, qkv, None, adapted=points[0])
        q = OPS.rotate_and_write(linear(x, qkv, None, points[0]), entry) if q is None else q
        x = OPS.add_norm(linear(q.flatten(1), out, None, points[1]), residual, model.norm, EPS)
        x = linear(gated(x, gate_up, points[2]), down, None, points[3])
    return sampling.argmax(linear(OPS.add_norm(x, residual, model.norm, EPS), model.head))


def steps(model: Model, adapters: Adapters, batches: list[int], counts: list[int]) -> None:
    runs = {}
    for batch, count in itertools.product(batches, counts):
        if count > min(batch, adapters.num_slots):
            continue
        ids, positions = torch.randint(0, 4000, (2, batch), device="cuda")
        slots = torch.randperm(1024, device="cuda")[:batch]
        of = (torch.arange(batch, device="cuda") % count).int() if count else None
        runs[batch, count] = functools.partial(step, model, adapters, ids, positions, slots, of)
    with compiling():
        for run in runs.values():
            run()
    torch.cuda.synchronize()
    for (batch, count), run in runs.items():
        print(
            f"batch {batch}, {count} of {adapters.num_slots} adapters: {graph_us(run) / 1e3:.3f} ms",
            flush=True,
        )


def prompts(model: Model, adapters: Adapters, num: int, counts: list[int]) -> None:
    (qkv, out, gate_up, down), hidden = model.weights[0], model.sizes.hidden
    x, inner = random(num, hidden), random(num, model.sizes.intermediate)
    for count in counts:
        of = (torch.arange(num, device="cuda") * count // num).int() if count else None
        tokens = None if of is None else assign(of, adapters.num_slots)
        points = adapters.of(0, tokens)
        runs = [
            functools.partial(linear, x, qkv, None, points[0]),
            functools.partial(linear, x, out, None, points[1]),
            functools.partial(gated, x, gate_up, points[2]),
            functools.partial(linear, inner, down, None, points[3]),
        ]
        took = [graph_us(run) for run in runs]
        print(f"{num} tokens, {count} adapters:", *(f"{us:.0f}" for us in took), f"= {sum(took):.0f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 64])
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, nargs="*", default=[2048, 8192])
    args = parser.parse_args()
    model = Model(MODELS["Llama-3.1-8B"])
    for num_slots in args.slots:
        adapters = Adapters(model, args.rank, num_slots)
        counts = [count for count in args.adapters if count <= num_slots]
        steps(model, adapters, args.batch, counts)
        for num in args.prompt:
            prompts(model, adapters, num, counts)
