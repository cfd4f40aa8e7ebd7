"""Building blocks of vision and audio encoders: patch embedding, attention within an item or window, MLP."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kernels.reference.activations import ACTIVATIONS
from quire.kernels.reference.encoder import Angles as Angles
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.encoder_attention import attend_on, rotate_on
from quire.layers.linear import (
    ColumnLinear,
    GateUpLinear,
    KeysWithoutBias,
    QKVLinear,
    RowLinear,
    WholeLinear,
)
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scope import LoadedModule, Scope, Target
from quire.parallel.group import ALONE
from quire.quant.sharding import divided
from quire.quant.unquantized import PlainWeight
from quire.quant.weight import LinearShape, Weight, frozen_parameter

_GATES = dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")
_ACTIVATIONS = {name: ACTIVATIONS[same] for name, same in _GATES.items()} | ACTIVATIONS
_ACTIVATIONS["quick_gelu"] = lambda x: x * torch.sigmoid(1.702 * x)
"""Activations by the names of config.json and of `kernels/reference/activations.py`."""
_UNITS = {"cuda": 64}
"""Multiple to which the intermediate size of an encoder's MLP is padded, by device type."""


def _encoder_scope(scope: Scope, size: int) -> Scope:
    """Return the scope of an encoder layer: without quantization on load and LoRA, and tensor-parallel only
    if the group divides `size`."""

    def linear(parts: tuple[str, ...], shape: LinearShape) -> Weight:
        return scope.linear(parts, replace(shape, quantizable=False))

    group = scope.group if size % scope.group.size == 0 else ALONE
    return replace(scope, linear=linear, group=group, adapters=None, transposed=False)


@dataclass(frozen=True, slots=True)
class VisionStyle:
    """Checkpoint names and variants of the layers of an encoder family. The defaults are CLIP's and SigLIP's.
    An empty name of attention or MLP means that its parts are stored directly in the layer."""

    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names of query, key and value, or one fused name."""
    out: str = "out_proj"
    qk_norms: tuple[str, ...] = ()
    """Names of the QK norms over all heads."""
    head_norms: tuple[str, ...] = ()
    """Names of the QK norms over each head."""
    mlp: str = "mlp"
    mlp_names: tuple[str, ...] = ("fc1", "fc2")
    """Names of up and down, or of gate, up and down."""
    scales: tuple[str, ...] = ()
    """Names of the learned scales of the outputs of attention and MLP; empty if there are no scales."""
    norms_outputs: bool = False
    """Whether the norms are applied to the outputs of attention and MLP, not to their inputs."""
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    eps: float | None = None
    """Epsilon of the norms; None to use `norm_eps` of the encoder's config."""
    qk_eps: float = 1e-6
    bias: bool = True
    """Whether QKV has a bias."""
    key_bias: bool = True
    """Whether the bias of QKV includes the keys."""
    out_bias: bool = True
    mlp_bias: bool = True
    pairs: bool = False
    """Whether RoPE is interleaved."""


SIGLIP = VisionStyle()


class VisionAttention(nn.Module):
    """QKV projection, optional QK norms and RoPE, attention within a span, output projection."""

    def __init__(
        self, hidden: int, heads: int, scope: Scope, style: VisionStyle = SIGLIP, kv_heads: int = 0
    ) -> None:
        """Build the attention; `kv_heads` is the number of key/value heads, by default that of query
        heads."""
        super().__init__()
        head_dim, self.eps = hidden // heads, style.qk_eps
        scope = _encoder_scope(scope, heads)
        self.attend, self.rotate = attend_on(scope.device), rotate_on(scope.device)
        kind = QKVLinear if style.key_bias or not style.bias else KeysWithoutBias
        self.qkv = kind(
            hidden,
            heads,
            kv_heads or heads,
            head_dim,
            scope / "qkv",
            bias=style.bias,
            names=style.qkv,
            paired_dim=head_dim if style.pairs else 0,
        )
        size = divided(scope.group, heads * head_dim)
        self.norms = nn.ModuleList(RMSNorm(size, self.eps, scope / name) for name in style.qk_norms)
        self.head_norms = nn.ModuleList(
            RMSNorm(head_dim, self.eps, scope / name) for name in style.head_norms
        )
        self.out = RowLinear(heads * head_dim, hidden, scope / style.out, bias=style.out_bias)

    def forward(self, x: Tensor, spans: Spans, angles: Angles | None = None) -> Tensor:
        """Return the attention output [T, hidden]; patches attend within their span, such as an image.
        `angles` are the RoPE angles of queries and keys; None without RoPE."""
        qkv = self.qkv.multiply(x)
        if len(self.norms):
            weights = tuple(norm.weight for norm in self.norms if isinstance(norm, RMSNorm))
            qkv = self.qkv.norm_parts(qkv, weights, self.eps)
        heads = qkv.view(len(x), -1, self.qkv.head_dim)
        num_heads, num_keys = self.qkv.heads, self.qkv.kv_heads
        parts = heads.split([num_heads, num_keys, num_keys], 1)
        for norm, part in zip(self.head_norms, parts, strict=False):
            part.copy_(norm.normalize(part.reshape(-1, self.qkv.head_dim)).view(part.shape))  # type: ignore[operator]
        if angles is not None:
            self.rotate(heads[:, : num_heads + num_keys], angles)
        q, k, v = parts
        if num_keys != num_heads:
            k, v = (part.repeat_interleave(num_heads // num_keys, 1) for part in (k, v))
        return self.out(self.attend(q, k, v, spans, None).flatten(1))


class VisionMLP(nn.Module):
    """Plain MLP, down(act(up(x))), or gated MLP, down(act(gate(x)) * up(x)), with three `names`. `size_out`
    defaults to the input size. Also used as the merger or projector of an encoder."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        scope: Scope,
        *,
        size_out: int = 0,
        names: tuple[str, ...] = ("fc1", "fc2"),
        activation: str = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        scope = _encoder_scope(scope, intermediate)
        *ups, down = names
        self.up: GateUpLinear | ColumnLinear
        self.act: Callable[[Tensor], Tensor] | None = None
        if len(ups) > 1:
            gate, parts = _GATES.get(activation, activation), tuple(ups)
            self.up = GateUpLinear(
                hidden, intermediate, scope / "gate_up", bias=bias, activation=gate, names=parts
            )
        else:
            self.up = ColumnLinear(hidden, intermediate, scope / ups[0], bias=bias)
            self.act = _ACTIVATIONS[activation]
        self.down = RowLinear(intermediate, size_out or hidden, scope / down, bias=bias)
        first, second, unit = self.up.weight, self.down.weight, _UNITS.get(scope.device.type, 1)
        if isinstance(first, PlainWeight) and isinstance(second, PlainWeight) and intermediate % unit:
            first.widen(outputs=unit)
            second.widen(inputs=unit)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the MLP, [T, size_out], for x [T, hidden]."""
        up = self.up(x)
        return self.down(up if self.act is None else self.act(up))


class VisionLayer(nn.Module):
    """Pre-norm layer of an encoder: attention, then MLP, each with a residual. `facts` has `hidden`, `heads`,
    `intermediate`, `activation`, `kv_heads` if they are fewer, and `norm_eps` unless the style has an
    epsilon."""

    def __init__(self, facts: Any, scope: Scope, style: VisionStyle = SIGLIP) -> None:
        super().__init__()
        hidden, eps = facts.hidden, facts.norm_eps if style.eps is None else style.eps
        self.attention_norm, self.mlp_norm = (style.norm(hidden, eps, scope / name) for name in style.norms)
        kv_heads: int = getattr(facts, "kv_heads", 0)
        self.attention = VisionAttention(hidden, facts.heads, scope / style.attention, style, kv_heads)
        self.mlp = VisionMLP(
            hidden,
            facts.intermediate,
            scope / style.mlp,
            names=style.mlp_names,
            activation=facts.activation,
            bias=style.mlp_bias,
        )

    def forward(self, x: Tensor, spans: Spans, angles: Angles | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm.normalize(x), spans, angles)
        return x + self.mlp(self.mlp_norm.normalize(x))


class PostNormVisionLayer(VisionLayer):
    """Encoder layer with norms of the outputs of attention and MLP, not of their inputs."""

    def forward(self, x: Tensor, spans: Spans, angles: Angles | None = None) -> Tensor:
        x = x + self.attention_norm.normalize(self.attention(x, spans, angles))
        return x + self.mlp_norm.normalize(self.mlp(x))


class ScaledVisionLayer(VisionLayer):
    """Encoder layer with learned scales on the outputs of attention and MLP."""

    def __init__(self, facts: Any, scope: Scope, style: VisionStyle) -> None:
        super().__init__(facts, scope, style)
        self.attention_scale, self.mlp_scale = (Learned(scope / name, facts.hidden) for name in style.scales)

    def forward(self, x: Tensor, spans: Spans, angles: Angles | None = None) -> Tensor:
        attended = self.attention(self.attention_norm.normalize(x), spans, angles)
        x = x + self.attention_scale.vectors * attended
        return x + self.mlp_scale.vectors * self.mlp(self.mlp_norm.normalize(x))


class VisionLayers(nn.ModuleList):
    """The layers of an encoder. Patches attend to each other within spans: images, windows, audio chunks."""

    def forward(self, x: Tensor, lens: Sequence[int], angles: Angles | None = None) -> Tensor:
        """Run all layers on x [T, hidden], with attention within spans. `lens` are the numbers of tokens of
        the spans; `angles` rotate queries and keys (RoPE)."""
        spans = spans_of(np.array(lens, np.int32), x.device)
        for layer in self:
            x = layer(x, spans, angles)
        return x

    def on_squares(self, x: Tensor) -> Tensor:
        """Run all layers on N images of equal size, x [N, tokens, hidden], with attention within each
        image."""
        return self(x.flatten(0, 1), [x.shape[1]] * len(x)).view_as(x)


def vision_layers(facts: Any, depth: int, scope: Scope, style: VisionStyle = SIGLIP) -> VisionLayers:
    """Build the first `depth` layers of an encoder; `scope` / i is the scope of layer i."""
    kind: type[VisionLayer] = PostNormVisionLayer if style.norms_outputs else VisionLayer
    kind = ScaledVisionLayer if style.scales else kind
    return VisionLayers(kind(facts, scope / i, style) for i in range(depth))


class PatchEmbedding(LoadedModule):
    """Patch embedding: a convolution with stride equal to its kernel, computed as a GEMM of flat patches.
    `kernel` is the shape of a patch in the checkpoint: (channels, [frames,] height, width), or (size,) of a
    flat patch."""

    def __init__(self, kernel: tuple[int, ...], hidden: int, scope: Scope, *, bias: bool = True) -> None:
        super().__init__()
        self.name = scope.name
        self.kernel = kernel
        self.weight = frozen_parameter(scope.empty(hidden, prod(kernel)))
        self.bias = frozen_parameter(scope.empty(hidden)) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """Project flat patches [T, size of a patch] of any float dtype to [T, hidden]."""
        return F.linear(patches.to(self.weight.dtype), self.weight, self.bias)

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.name}.weight", self.weight.view(-1, *self.kernel))
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias)


def patches_of(pixels: Tensor, size: int) -> Tensor:
    """Split images [N, channels, height, width] into patches of side `size`, [N, patches, channels * size *
    size], row by row."""
    parts = pixels.unfold(2, size, size).unfold(3, size, size)  # [N, channels, rows, columns, size, size]
    return parts.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class Learned(LoadedModule):
    """A checkpoint tensor that is used as it is, such as position embeddings; `scope.name` is its name."""

    def __init__(self, scope: Scope, *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.name = scope.name
        self.vectors = frozen_parameter(torch.empty(shape, dtype=dtype or scope.dtype, device=scope.device))

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.vectors)


class FusedAttention(nn.Module):
    """Attention whose query, key and value projections are stored as one tensor (in_proj), with biases."""

    def __init__(self, hidden: int, heads: int, scope: Scope) -> None:
        super().__init__()
        self.heads = heads
        self.weight = Learned(scope / "in_proj_weight", 3 * hidden, hidden)
        self.bias = Learned(scope / "in_proj_bias", 3 * hidden)
        self.out = WholeLinear(hidden, hidden, scope / "out_proj", bias=True)

    def project(self, *inputs: Tensor) -> list[Tensor]:
        """Project inputs of queries, keys and values, [..., L, hidden] each, to [..., heads, L, head_dim]."""
        weights, biases = self.weight.vectors.chunk(3), self.bias.vectors.chunk(3)
        projected = map(F.linear, inputs, weights, biases)
        return [x.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for x in projected]


class DownsamplingConv(nn.Module):
    """Convolution that reduces rows and columns; an odd kernel is padded by half of its size."""

    def __init__(
        self, size_in: int, size_out: int, scope: Scope, *, kernel: int = 3, stride: int = 2
    ) -> None:
        super().__init__()
        self.weight = Learned(scope / "weight", size_out, size_in, kernel, kernel)
        self.bias = Learned(scope / "bias", size_out)
        self.stride, self.padding = stride, kernel // 2 if kernel % 2 else 0

    def forward(self, x: Tensor) -> Tensor:
        """Convert [N, size_in, rows, columns] to [N, size_out, rows / stride, columns / stride]."""
        weight, bias = self.weight.vectors, self.bias.vectors
        return F.conv2d(x, weight, bias, stride=self.stride, padding=self.padding)
