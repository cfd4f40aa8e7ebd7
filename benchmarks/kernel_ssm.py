"""Time the SSM state kernels of a layer in a CUDA graph; `--sweep` tries other tile shapes.

    python benchmarks/kernel_ssm.py [--sweep]

The floor of a decode is its states, read and written once, over 4.28 TB/s, the copy bandwidth of an H200.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from measuring import COPY_BYTES_S, graph_us, random
from torch import Tensor

from quire.kernels.reference.ssm import ConvWeights, DecayRates, DeltaInputs, ScanInputs, SSMSequences
from quire.kernels.triton import ssm as kernels

OPS = kernels.TritonStateOps()


class Sizes(NamedTuple):
    state: tuple[int, int, int]
    groups: int
    """Number of SSM groups (Mamba) or of key heads (gated delta net)."""
    delta: bool

    @property
    def channels(self) -> int:
        heads, first, second = self.state
        per_head, shared = (second, first) if self.delta else (first, second)
        return heads * per_head + 2 * self.groups * shared


MODELS = {
    "granite-4.0-h-small": Sizes((128, 64, 128), 1, False),
    "granite-4.0-h-tiny": Sizes((48, 64, 128), 1, False),
    "qwen3-next": Sizes((32, 128, 128), 16, True),
}


class Layer:
    """Operations of a mixer between its two GEMMs."""

    def __init__(self, sizes: Sizes, num_rows: int, num_tokens: int) -> None:
        heads, first, second = sizes.state
        self.sizes, self.width = sizes, heads * (second if sizes.delta else first)
        self.product = random(num_tokens, sizes.channels + self.width + 2 * heads)
        self.weight, self.bias = random(sizes.channels, 4), random(sizes.channels)
        self.norm = random(second if sizes.delta else self.width)
        self.rates = DecayRates(-torch.rand(heads, device="cuda"), torch.randn(heads, device="cuda"))
        self.skip = torch.randn(heads, device="cuda")
        self.conv_state = torch.zeros(num_rows, sizes.channels, 3, device="cuda", dtype=torch.bfloat16)
        self.state = torch.zeros(num_rows, *sizes.state, device="cuda")

    def mix(self, x: Tensor, seqs: SSMSequences) -> Tensor:
        heads = self.sizes.state[0]
        a, b = self.product[:, -2 * heads :].chunk(2, 1)
        if self.sizes.delta:
            return OPS.delta(x, DeltaInputs(a, b, self.rates), self.state, seqs)
        return OPS.scan(x, ScanInputs(a, self.rates, self.skip), self.state, seqs)

    def run(self, seqs: SSMSequences) -> Tensor:
        channels = self.sizes.channels
        x = OPS.conv(self.product[:, :channels], ConvWeights(self.weight, self.bias), self.conv_state, seqs)
        gate = self.product[:, channels : channels + self.width]
        return OPS.gated_norm(self.mix(x, seqs), gate, self.norm, 1e-6, gate_first=not self.sizes.delta)


def sequences(lens: list[int]) -> SSMSequences:
    starts = torch.tensor([0, *itertools.accumulate(lens)], device="cuda", dtype=torch.int32)
    positions = torch.cat([torch.arange(n) + 5 for n in lens]).cuda()
    rows = torch.arange(len(lens), device="cuda", dtype=torch.int32)
    return SSMSequences(starts, rows, positions, np.array(lens, np.int32))


def layer_us(
    sizes: Sizes, lens: list[int], part: Callable[[Layer, SSMSequences], object], layers: int
) -> float:
    seqs = sequences(lens)
    if not seqs.single:
        _ = seqs.split  # a host copy, which a CUDA graph cannot capture
    every = [Layer(sizes, len(lens), sum(lens)) for _ in range(layers)]
    return graph_us(lambda: [part(layer, seqs) for layer in every]) / layers


def whole(layer: Layer, seqs: SSMSequences) -> Tensor:
    return layer.run(seqs)


def only_state(layer: Layer, seqs: SSMSequences) -> Tensor:
    return layer.mix(layer.product[:, : layer.sizes.channels], seqs)


def report(name: str, sizes: Sizes) -> None:
    row_bytes = 2 * 4 * int(np.prod(sizes.state))
    for batch in (1, 8, 32, 128, 256):
        layers = max(2, min(24, 2**31 // (row_bytes * batch)))
        mixed, every = (layer_us(sizes, [1] * batch, part, layers) for part in (only_state, whole))
        floor = 1e6 * row_bytes * batch / COPY_BYTES_S
        print(f"{name:20} decode {batch:4}: state {mixed:7.1f} us ({floor / mixed:4.0%})", end=", ")
        print(f"with conv and norm {every:7.1f} us ({floor / every:4.0%})", flush=True)
    for lens in ([8192], [2048] * 4, [512] * 16, [8000] + [1] * 192):
        mixed, every = (layer_us(sizes, lens, part, 2) for part in (only_state, whole))
        print(f"{name:20} {len(lens):3} x {lens[0]:4}: state {mixed:7.1f} us", end=", ")
        print(f"with conv and norm {every:7.1f} us, {sum(lens) / every:5.1f}M tokens/s", flush=True)


SCANS = [(64, 4, 2), (64, 4, 3), (64, 8, 2), (32, 4, 2), (32, 4, 3), (32, 2, 2)]
DELTAS = [(32, 4, 2), (32, 4, 3), (32, 8, 2), (64, 4, 2), (64, 8, 2), (16, 4, 2), (16, 4, 3)]
TILES = list(itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)))


def sweep(name: str, sizes: Sizes) -> None:
    """Measure and print all tile shapes of the kernels for these sizes, one after the other."""
    which, shapes = ("_DELTA", DELTAS) if sizes.delta else ("_SCAN", SCANS)
    warps_of = f"{which}_WARPS"
    tries: list[dict[str, Any]] = [{which: kernels.SSMShape(*shape)} for shape in shapes]
    tries += [{"_SOLVE_WARPS": warps} for warps in (2, 4, 8) if sizes.delta]
    for given in tries:
        print(name, given, round(_with(given, sizes, [8192], 2), 1), flush=True)
    for batch, layers in ((1, 24), (32, 8), (256, 2)):
        times = {
            (tile, warps): _with({"_SMALL": tile, "_TILE": tile, warps_of: warps}, sizes, [1] * batch, layers)
            for tile, warps in TILES
        }
        said = ", ".join(f"{tile}/{warps}: {us:.1f}" for (tile, warps), us in times.items())
        print(f"{name} decode {batch}, numbers of state / warps: {said}", flush=True)


def _with(given: dict[str, Any], sizes: Sizes, lens: list[int], layers: int) -> float:
    before = {name: getattr(kernels, name) for name in given}
    try:
        for name, value in given.items():
            setattr(kernels, name, value)
        return layer_us(sizes, lens, only_state, layers)
    except (RuntimeError, triton.TritonError) as error:  # a shape that does not fit
        print(type(error).__name__)
        return float("nan")
    finally:
        for name, value in before.items():
            setattr(kernels, name, value)


if __name__ == "__main__":
    for name, sizes in MODELS.items():
        (sweep if "--sweep" in sys.argv else report)(name, sizes)
