"""What towers are built of: patches become vectors, which see all of their item, or of their window."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kernels.reference.activations import ACTIVATIONS
from quire.kernels.reference.encoder import Angles as Angles
from quire.kernels.reference.encoder import Spans
from quire.layers.encoder_attention import attend_on, turn_on
from quire.layers.linear import ColumnLinear, GateUpLinear, KeysWithoutBias, QKVLinear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope, Target
from quire.parallel.group import ALONE
from quire.quant.plain import PlainWeight
from quire.quant.sharding import divided
from quire.quant.weight import LinearShape, Weight, kept

_GATES = dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")
_ACTIVATIONS = {name: ACTIVATIONS[same] for name, same in _GATES.items()} | ACTIVATIONS
_ACTIVATIONS["quick_gelu"] = lambda x: x * torch.sigmoid(1.702 * x)
"""By the names of config.json and of `kernels/reference/activations.py`."""
_UNITS = {"cuda": 64}
"""A multiple of this is between the two halves of a feed-forward layer, by type of device."""


def _within(scope: Scope, size: int) -> Scope:
    """The scope of a tower's layer that is divided into so many: among all of the group, or not at all. Its
    weights stay as they are stored."""

    def linear(parts: tuple[str, ...], shape: LinearShape) -> Weight:
        return scope.linear(parts, replace(shape, narrows=False))

    group = scope.group if size % scope.group.size == 0 else ALONE
    return replace(scope, linear=linear, group=group, adapters=None, across=False)


class VisionAttention(nn.Module):
    """Queries, keys and values, the mix of all in the same span, and the way back.

    `names` are those of the checkpoint: query, key and value, or all as one; `norms` those of the RMS norms
    of queries and keys over all heads, `head_norms` of such over each head. With `pairs`
    neighbours turn together, else the halves of a head.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        scope: Scope,
        *,
        head_dim: int = 0,
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        out: str = "out_proj",
        bias: bool = True,
        key_bias: bool = True,
        out_bias: bool = True,
        norms: tuple[str, ...] = (),
        head_norms: tuple[str, ...] = (),
        eps: float = 1e-6,
        pairs: bool = False,
    ) -> None:
        super().__init__()
        head_dim = head_dim or hidden // heads
        scope = _within(scope, heads)
        self.attend, self.turn = attend_on(scope.device), turn_on(scope.device)
        kind = QKVLinear if key_bias or not bias else KeysWithoutBias
        self.qkv = kind(
            hidden,
            heads,
            heads,
            head_dim,
            scope / "qkv",
            bias=bias,
            names=names,
            paired_dim=head_dim if pairs else 0,
        )
        size = divided(scope.group, heads * head_dim)
        self.norms = nn.ModuleList(RMSNorm(size, eps, scope / name) for name in norms)
        self.head_norms = nn.ModuleList(RMSNorm(head_dim, eps, scope / name) for name in head_norms)
        self.eps = eps
        self.out = RowLinear(heads * head_dim, hidden, scope / out, bias=out_bias)

    def forward(self, x: Tensor, spans: Spans, angles: Angles | None = None) -> Tensor:
        """[T, hidden] -> the same."""
        qkv = self.qkv.multiply(x)
        if len(self.norms):
            weights = tuple(norm.weight for norm in self.norms if isinstance(norm, RMSNorm))
            qkv = self.qkv.norm_parts(qkv, weights, self.eps)
        heads = qkv.view(len(x), -1, self.qkv.head_dim)
        parts = heads.split(self.qkv.heads, 1)
        for norm, part in zip(self.head_norms, parts, strict=False):
            part.copy_(norm.alone(part.reshape(-1, self.qkv.head_dim)).view(part.shape))  # type: ignore[operator]
        if angles is not None:
            self.turn(heads[:, : 2 * self.qkv.heads], angles)
        q, k, v = parts
        out: Tensor = self.out(self.attend(q, k, v, spans, None).flatten(1))
        return out


class VisionMLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) with three `names`; gives `size_out`, or as many as it
    takes. Also the merger or projector behind a tower."""

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
        scope = _within(scope, intermediate)
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
        """[T, hidden] -> [T, size_out]."""
        up = self.up(x)
        out: Tensor = self.down(up if self.act is None else self.act(up))
        return out


class PatchEmbedding(nn.Module):
    """A convolution whose steps are as long as its kernel: a product of patches that lie flat. `kernel` is
    the shape of one patch, as the checkpoint has it: (channels, height, width), with the frames of a video
    before the height, or (numbers,)."""

    def __init__(self, kernel: tuple[int, ...], hidden: int, scope: Scope, *, bias: bool = True) -> None:
        super().__init__()
        self.name = scope.name
        self.kernel = kernel
        self.weight = kept(scope.empty(hidden, prod(kernel)))
        self.bias = kept(scope.empty(hidden)) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """[T, numbers of a patch] of any float type -> [T, hidden]."""
        return F.linear(patches.to(self.weight.dtype), self.weight, self.bias)

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.name}.weight", self.weight.view(-1, *self.kernel))
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias)

    def finish(self) -> None:
        """The weight is used as it was loaded."""


def patches_of(pixels: Tensor, size: int) -> Tensor:
    """[N, channels, height, width] images -> [N, patches, channels * size * size], row by row."""
    parts = pixels.unfold(2, size, size).unfold(3, size, size)  # [N, channels, rows, columns, size, size]
    return parts.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class Learned(nn.Module):
    """A tensor of the checkpoint that is used as it is: the vectors of positions, of a class. The scope has
    its whole name."""

    def __init__(self, scope: Scope, *shape: int) -> None:
        super().__init__()
        self.name = scope.name
        self.vectors = kept(scope.empty(*shape))

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.vectors)

    def finish(self) -> None:
        """They are used as they were loaded."""
