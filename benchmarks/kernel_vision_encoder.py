"""Time vision encoders at the shapes of Qwen2.5-VL-3B against the GPU's peak, on an idle GPU.

python benchmarks/kernel_vision_encoder.py [--shapes]
"""

import argparse

import numpy as np
import torch
from measuring import event_s
from torch import Tensor
from triton.runtime.errors import OutOfResources

from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import qwen2_5_vl
from quire.checkpoint.reader import ConfigReader
from quire.kernels.ops import choose
from quire.kernels.reference.encoder import Spans, tiles_of
from quire.kernels.triton import encoder
from quire.kernels.triton.encoder import EncoderShape
from quire.kernels.triton.launch import compiling
from quire.layers.scope import Loads, Scope
from quire.models.towers.qwen_vl import Qwen2_5VL
from quire.worker.cuda.encoder_graphs import MOST_VECTORS, TIMES, TowerGraphs

HEADS, DIM = 16, 80
PEAK, BANDWIDTH = 989e12, 4.8e12
"""Peak bfloat16 FLOP/s and bytes per second of an H200."""
SHAPES = [
    EncoderShape(block_n, warps, stages)
    for block_n, warps, stages in [
        (64, 8, 2), (64, 8, 3), (128, 8, 2), (128, 8, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2), (32, 4, 3),
    ]
]  # fmt: skip
CASES = [("full", 4096, 4096), ("full", 8192, 8192), ("full", 16384, 16384)]
CASES += [("windows", 64, 4096), ("windows", 64, 16384)]


def spans(length: int, num_tokens: int, height: int) -> Spans:
    lens = np.full(num_tokens // length, length, np.int32)
    return Spans(lens.tolist(), torch.from_numpy(tiles_of(lens, height)).cuda(), height)


def floor(length: int, num_tokens: int, dim: int = DIM) -> float:
    """Return the seconds of the GEMMs at the peak, or of reading queries, keys and values and writing outputs
    once."""
    flops = 4 * length * num_tokens * HEADS * dim
    return max(flops / PEAK, 4 * num_tokens * HEADS * dim * 2 / BANDWIDTH)


def qkv_of(num_tokens: int, dim: int = DIM) -> tuple[Tensor, ...]:
    qkv = torch.randn(num_tokens, 3, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    return qkv.unbind(1)


def compare_shapes() -> None:
    with compiling():
        for height in (64, 128):
            for shape in SHAPES:
                encoder.attend(*qkv_of(128), spans(64, 128, height), None, shape)
    for name, length, num_tokens in CASES:
        q, k, v = qkv_of(num_tokens)
        found = []
        for height in (64,) if length <= 64 else (64, 128):
            for shape in SHAPES:
                some = spans(length, num_tokens, height)
                try:
                    time_s = event_s(lambda: encoder.attend(q, k, v, some, None, shape))  # noqa: B023
                except OutOfResources:
                    continue
                found.append((time_s, height, *shape))
        for time_s, *shape in sorted(found)[:5]:
            share = floor(length, num_tokens) / time_s
            print(f"{name:8} {num_tokens:6} {shape!s:20} {time_s * 1e6:9.1f} us  {share:5.0%} of the floor")


def chosen() -> None:
    for dim in (64, 72, 80, 88, 96, 128, 160):
        q, k, v = qkv_of(8192, dim)
        some = spans(8192, 8192, 128)
        ours = event_s(lambda: encoder.attend(q, k, v, some))  # noqa: B023
        heads = [each.transpose(0, 1)[None] for each in (q, k, v)]
        theirs = event_s(lambda: torch.nn.functional.scaled_dot_product_attention(*heads))  # noqa: B023
        share = floor(8192, 8192, dim) / ours
        print(f"head {dim:4}  {ours * 1e6:8.1f} us  {share:5.0%} of the floor; torch {theirs * 1e6:8.1f} us")
    x = torch.randn(16384, 3 * HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(16384, DIM // 2, device="cuda")
    turned = x[:, : 2 * HEADS]
    time_s = event_s(lambda: encoder.rotate(turned, (angles, angles)))
    print(f"turn 16384  {time_s * 1e6:8.1f} us, floor {2 * turned.numel() * 2 / BANDWIDTH * 1e6:.1f} us")


@torch.inference_mode()
def tower() -> None:
    """Measure the whole vision encoder with random weights, for images from 336 pixels a side to 16 thousand
    patches; small ones as CUDA graphs, too."""
    vision = {"out_hidden_size": 2048, "hidden_size": 1280, "num_heads": 16, "depth": 32}
    vision |= {"intermediate_size": 3420, "patch_size": 14, "in_chans": 3}
    text = {"hidden_size": 2048, "num_attention_heads": 16, "vision_config": vision}
    media = qwen2_5_vl(ConfigReader("dummy", text))[1]
    facts = ArchFacts("", 8, 2048, 8, 16, 2, 128, 1e-6, (), media=media)
    device, dtype = torch.device("cuda"), torch.bfloat16
    scope = Scope(dtype, device, TorchSDPA(), 64, ops=choose(device, dtype))
    made = Qwen2_5VL(facts, scope)
    for parameter in made.parameters():
        parameter.normal_(std=0.02)
    for layer in made.modules():
        if isinstance(layer, Loads):
            layer.finish()
    graphs = TowerGraphs(made)
    graphs.max_bytes = 8 << 30
    for side in (24, 48, 74, 96, 128):
        num = side * side
        item = {"pixels": torch.randn(1, side, side, made.patches.weight.shape[1], device=device)}
        time_s = event_s(lambda: made.encode("image", [item]), 3)  # noqa: B023
        per_patch = 2 * 32 * (4 * 1280**2 + 3 * 1280 * 3420) + 2 * 5120 * (5120 + 2048) // 4 + 2 * 1176 * 1280
        mixed = 4 * 1280 * num * (4 * num + 28 * 64)
        bound = (per_patch * num + mixed) / PEAK
        share = bound / time_s
        played = ""
        if num // 4 <= MOST_VECTORS:
            found = [graphs.encode("image", [item], num // 4)[0] for _ in range(TIMES)]
            assert len(graphs) and torch.equal(found[-1], made.encode("image", [item])[0])
            time_g = event_s(lambda: graphs.encode("image", [item], num // 4), 3)  # noqa: B023
            played = f"; as a graph {time_g * 1e3:6.2f} ms, {graphs._num_bytes / 2**20:.0f} MiB by now"
        print(
            f"tower {num:6} patches {time_s * 1e3:8.2f} ms, floor {bound * 1e3:6.2f} ms: {share:4.0%}{played}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", action="store_true", help="of tiles, all that fit")
    if parser.parse_args().shapes:
        compare_shapes()
    chosen()
    tower()
