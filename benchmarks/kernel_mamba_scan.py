"""Time Mamba's scan over prompts by channels per warp, beside the decode kernel launched once per token.

    python benchmarks/kernel_mamba_scan.py

The floor is everything read and written once, over 4.8 TB/s, the bandwidth that an H200 is sold with.
"""

import itertools

import torch
from kernel_ssm import sequences
from measuring import graph_us, random

from quire.kernels.reference.ssm import DecayRates, MambaInputs, StateReference
from quire.kernels.triton import ssm as kernels

OPS, SIZE, RANK = kernels.TritonStateOps(), 16, 256
BANDWIDTH = 4.8e12


class Scan:
    """Mamba's selective scan of one layer, over prompts that continue from an SSM state."""

    def __init__(self, lens: list[int], channels: int) -> None:
        self.lens, self.num_tokens, self.channels = lens, sum(lens), channels
        rates = DecayRates(-torch.rand(channels, SIZE, device="cuda"), torch.randn(channels, device="cuda"))
        self.x, self.gate = (
            random(self.num_tokens, channels),
            random(self.num_tokens, 2 * channels)[:, channels:],
        )
        b, c = random(self.num_tokens, RANK + 2 * SIZE)[:, RANK:].chunk(2, 1)
        self.given = MambaInputs(
            random(self.num_tokens, channels), b, c, rates, torch.randn(channels, device="cuda")
        )
        self.state = torch.randn(len(lens), channels, SIZE, device="cuda")
        self.seqs, self.singles = sequences(lens), sequences([1] * len(lens))
        _ = self.seqs.split  # a host copy, which a CUDA graph cannot capture

    def run(self) -> torch.Tensor:
        return OPS.select(self.x, self.gate, self.given, self.state, self.seqs)

    def by_token(self, num_tokens: int) -> None:
        """Scan by launching the decode kernel once per token, with one token of each sequence."""
        rows = slice(0, len(self.lens))
        given = self.given._replace(dt=self.given.dt[rows], b=self.given.b[rows], c=self.given.c[rows])
        for _ in range(num_tokens):
            OPS.select(self.x[rows], self.gate[rows], given, self.state, self.singles)

    @property
    def floor_us(self) -> float:
        inputs = self.num_tokens * 2 * (4 * self.channels + 2 * SIZE)
        states = (2 * len(self.lens) + 1) * self.channels * SIZE * 4
        return 1e6 * (inputs + states) / BANDWIDTH


def check() -> None:
    """Check the results against torch before they are timed."""
    scan = Scan([1, 2, 63, 64, 65, 1000], 4112)
    twin = scan.state.clone()
    expected = StateReference().select(scan.x, scan.gate, scan.given, twin, scan.seqs)
    torch.testing.assert_close(scan.run().float(), expected.float(), rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(scan.state, twin, rtol=1e-3, atol=1e-3)
    print("the same as in torch: 1, 2, 63, 64, 65 and 1,000 tokens, 4,112 channels, bf16")


def report(lens: list[int], channels: int) -> None:
    scan, some, chosen = Scan(lens, channels), 64, kernels._channels_per_warp
    by_token = graph_us(lambda: scan.by_token(some)) * lens[0] / some
    widened = graph_us(lambda: kernels._pack_bc(scan.given.b, scan.given.c))
    print(f"{len(lens)} x {lens[0]} tokens, {channels} channels: floor {scan.floor_us:.0f} us", end=", ")
    print(f"by token {by_token:.0f} us, widening {widened:.0f} us", end="")
    for block in kernels._BLOCKS:
        own = " (chosen)" if block == chosen(len(lens) * channels) else ""
        kernels._channels_per_warp = lambda num_channels, block=block: block
        print(f", {block} a warp{own} {graph_us(scan.run):.0f} us", end="", flush=True)
    kernels._channels_per_warp = chosen
    print()


if __name__ == "__main__":
    check()
    for lens, channels in itertools.product([[4096], [1024] * 8], (4096, 8192)):
        report(lens, channels)
