"""MobileNet-V5, the vision encoder of Gemma 3n: convolutions, then attention with one key head over the image
(arXiv 2404.10518 describes its blocks)."""

from itertools import starmap

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.multimodal.gemma3n import Gemma3nVisionFacts
from quire.layers.scope import Scope
from quire.layers.vision import Learned

_EPS = 1e-6
INVERTED = {
    1: [(3, 5, 6), (5, 0, 4), (3, 0, 4), (5, 0, 4), (3, 0, 4)],
    2: [(5, 5, 6), *[(5, 0, 4)] * 7, (0, 0, 1)],
    3: [(5, 5, 6)],
}
"""The inverted residual blocks at the start of stages 1 to 3: size of the kernel before the expansion, size
of the kernel within it (0: there is none), and expansion factor."""
ATTENTION = {2: (14, 12, 64, 2), 3: (19, 16, 96, 1)}
"""Attention blocks of stages 2 and 3, each followed by an inverted residual block: number of blocks, number
of query heads, head size, and stride of keys and values."""


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm over the channels of x [N, channels, rows, columns]."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + _EPS)
    return (scaled * weight.float()[:, None, None]).to(x.dtype)


class PaddedConvolution(nn.Module):
    """Convolution, whose padding keeps the number of rows and columns apart from the stride, then an optional
    norm, then an optional GELU."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        scope: Scope,
        norm: Scope | None = None,
        *,
        stride: int = 1,
        is_active: bool = False,
        bias: bool = False,
    ) -> None:
        """Build a convolution. `shape` is (output channels, input channels per group, kernel size)."""
        super().__init__()
        size, inputs, self.kernel = shape
        self.stride, self.is_active = stride, is_active
        self.weight = Learned(scope / "weight", size, inputs, self.kernel, self.kernel)
        self.bias = Learned(scope / "bias", size) if bias else None
        self.norm = None if norm is None else Learned(norm / "weight", size)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.vectors
        sizes = [max(self.kernel - 1 - (side - 1) % self.stride, 0) for side in x.shape[:1:-1]]
        padding = [side for size in sizes for side in (size // 2, size - size // 2)]
        x = F.pad(x, padding) if any(padding) else x
        bias = None if self.bias is None else self.bias.vectors
        x = F.conv2d(x, weight, bias, stride=self.stride, groups=x.shape[1] // weight.shape[1])
        x = x if self.norm is None else normed(x, self.norm.vectors)
        return F.gelu(x, approximate="tanh") if self.is_active else x


class EdgeResidual(nn.Module):
    """Convolution that widens by 4, then a product."""

    def __init__(self, size_in: int, size: int, stride: int, scope: Scope) -> None:
        super().__init__()
        wide = 4 * size_in
        first, last = (wide, size_in, 3), (size, wide, 1)
        self.widen = PaddedConvolution(
            first, scope / "conv_exp", scope / "bn1", stride=stride, is_active=True
        )
        self.narrow = PaddedConvolution(last, scope / "conv_pwl", scope / "bn2")
        self.is_residual = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(self.widen(x))
        return x + out if self.is_residual else out


class InvertedResidual(nn.Module):
    """Depthwise convolution, product that widens, depthwise convolution, product that narrows. A kernel size
    of 0 leaves a depthwise convolution out."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        kernels: tuple[int, int],
        stride: int,
        scope: Scope,
        *,
        scales: bool = True,
    ) -> None:
        """Build the block. `sizes` are the numbers of channels: input, widened, output."""
        super().__init__()
        size_in, wide, size = sizes
        before, within = kernels
        parts = [
            ("dw_start", (size_in, 1, before), 1 if within else stride, False),
            ("pw_exp", (wide, size_in, 1), 1, True),
            ("dw_mid", (wide, 1, within), stride, True),
            ("pw_proj", (size, wide, 1), 1, False),
        ]
        self.parts = nn.Sequential(
            *(
                PaddedConvolution(
                    shape, scope / name / "conv", scope / name / "bn", stride=step, is_active=is_active
                )
                for name, shape, step, is_active in parts
                if shape[-1]
            )
        )
        self.scale = Learned(scope / "layer_scale" / "gamma", size) if scales else None
        self.is_residual = scales and stride == 1 and size_in == size

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts(x)
        out = out if self.scale is None else out * self.scale.vectors[:, None, None]
        return x + out if self.is_residual else out


class MultiQueryAttention(nn.Module):
    """Attention of all pixels to pixels whose rows and columns may be reduced, with one head of keys and
    values."""

    def __init__(self, size: int, heads: int, head_dim: int, stride: int, scope: Scope) -> None:
        super().__init__()
        self.heads, inner = heads, scope / "attn"
        self.norm = Learned(scope / "norm" / "weight", size)
        self.scale = Learned(scope / "layer_scale" / "gamma", size)
        self.query = PaddedConvolution((heads * head_dim, size, 1), inner / "query" / "proj")
        self.key, self.value = (
            self._reduced(size, head_dim, stride, inner / name) for name in ("key", "value")
        )
        self.out = PaddedConvolution((size, heads * head_dim, 1), inner / "output" / "proj")

    @staticmethod
    def _reduced(size: int, head_dim: int, stride: int, scope: Scope) -> nn.Sequential:
        product = PaddedConvolution((head_dim, size, 1), scope / "proj")
        if stride == 1:
            return nn.Sequential(product)
        return nn.Sequential(
            PaddedConvolution((size, 1, 3), scope / "down_conv", scope / "norm", stride=stride), product
        )

    def forward(self, x: Tensor) -> Tensor:
        y = normed(x, self.norm.vectors)
        q = self.query(y).unflatten(1, (self.heads, -1)).flatten(3).transpose(2, 3)
        k, v = (part(y).flatten(2).transpose(1, 2)[:, None] for part in (self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            q, k.expand(-1, self.heads, -1, -1), v.expand(-1, self.heads, -1, -1)
        )
        out = self.out(mixed.transpose(2, 3).reshape(len(x), -1, *x.shape[2:]))
        return x + out * self.scale.vectors[:, None, None]


class MobileNet(nn.Module):
    """MobileNet-V5 with a fusion of its last two stages; `scope` is that of timm's model."""

    def __init__(self, facts: Gemma3nVisionFacts, scope: Scope) -> None:
        super().__init__()
        stem, (first, *widths) = facts.stem, facts.widths
        inner = scope / "conv_stem"
        has_bias = scope.is_stored(f"{inner.name}.conv.bias")
        self.side = facts.side
        self.first = PaddedConvolution(
            (stem, 3, 3), inner / "conv", inner / "bn", stride=2, is_active=True, bias=has_bias
        )
        edges = [(stem, first, 2), (first, first, 1), (first, first, 1)]
        blocks = scope / "blocks"
        stages: list[list[nn.Module]] = [
            [EdgeResidual(*sizes, blocks / 0 / i) for i, sizes in enumerate(edges)]
        ]
        for number, (size_in, size) in enumerate(zip((first, *widths), widths, strict=False), 1):
            stages.append(self._stage(number, size_in, size, blocks / number))
        self.stages = nn.ModuleList(starmap(nn.Sequential, stages))
        both = sum(widths[-2:])
        self.fuse = InvertedResidual(
            (both, 2 * both, facts.hidden), (0, 0), 1, scope / "msfa" / "ffn", scales=False
        )
        self.norm = Learned(scope / "msfa" / "norm" / "weight", facts.hidden)

    @staticmethod
    def _stage(number: int, size_in: int, size: int, scope: Scope) -> list[nn.Module]:
        blocks = list[nn.Module]()
        for before, within, factor in INVERTED[number]:
            stride, size_in = (1, size) if blocks else (2, size_in)
            sizes = size_in, factor * size_in, size
            blocks.append(InvertedResidual(sizes, (before, within), stride, scope / len(blocks)))
        count, heads, head_dim, stride = ATTENTION.get(number, (0, 0, 0, 0))
        for _ in range(count):
            blocks.append(MultiQueryAttention(size, heads, head_dim, stride, scope / len(blocks)))
            blocks.append(InvertedResidual((size, 2 * size, size), (0, 0), 1, scope / len(blocks)))
        return blocks

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images [N, 3, height, width] to [N, side * side, hidden]."""
        x = self.first(pixels.to(self.norm.vectors.dtype))
        outputs = []
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        fine, coarse = outputs[-2:]
        fused = self.fuse(torch.cat((fine, F.interpolate(coarse, fine.shape[2:], mode="nearest")), 1))
        steps = [length // self.side for length in fused.shape[2:]]
        return normed(F.avg_pool2d(fused, steps), self.norm.vectors).flatten(2).transpose(1, 2)
