"""Mixers that keep a state instead of keys and values: Mamba-2 and the gated delta rule."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.kernels.state import Rates, Seqs, choose
from quire.layers.linear import ColumnLinear, Linear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """The shape of a Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int
    """Heads next to each other share the B and C of their group."""
    size: int
    """Numbers of state for each of a head's dimensions."""
    kernel: int
    conv_bias: bool = True
    proj_bias: bool = False


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """The shape of a gated delta mixer."""

    key_heads: int
    key_dim: int
    heads: int
    """Heads of values; those next to each other share a head of keys and queries."""
    value_dim: int
    kernel: int


class StateMixer(nn.Module):
    """What both mixers keep: a state and the last inputs of a convolution for each row, and the weights that
    are no product."""

    def __init__(
        self, channels: int, kernel: int, state: tuple[int, int, int], scope: Scope, *, conv_bias: bool
    ) -> None:
        super().__init__()
        self.name = scope.name
        self.ops = choose(scope.device, scope.dtype)
        self.state_shapes = (((channels, kernel - 1), scope.dtype), (state, torch.float32))
        """The shape and type of what a row takes: the inputs, the state."""
        self.conv_weight = _parameter(scope.empty(channels, kernel))
        self.conv_bias = _parameter(scope.empty(channels)) if conv_bias else None
        self.rate = _parameter(torch.empty(state[0], dtype=torch.float32, device=scope.device))
        self.dt_bias = _parameter(torch.empty_like(self.rate))
        self.conv_state: Tensor | None = None
        self.state: Tensor | None = None

    def bind(self, conv_state: Tensor, state: Tensor) -> None:
        """Use these from now on: a row of `state_shapes` for each row of the worker, and one that pads."""
        assert ((conv_state.shape[1:], conv_state.dtype), (state.shape[1:], state.dtype)) == self.state_shapes
        self.conv_state, self.state = conv_state, state

    @property
    def bound(self) -> tuple[Tensor, Tensor]:
        assert self.conv_state is not None and self.state is not None, "bind() comes before forward()"
        return self.conv_state, self.state

    @property
    def rates(self) -> Rates:
        return Rates(self.rate, self.dt_bias)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.conv1d.weight", self.conv_weight.unsqueeze(1)
        if self.conv_bias is not None:
            yield f"{self.name}.conv1d.bias", self.conv_bias
        yield f"{self.name}.A_log", self.rate
        yield f"{self.name}.dt_bias", self.dt_bias

    def finish(self) -> None:
        self.rate.copy_(-self.rate.exp())


class Mamba2(StateMixer):
    """Mamba-2: a convolution, a selective scan, a gated norm."""

    def __init__(self, hidden: int, sizes: MambaSizes, eps: float, scope: Scope) -> None:
        inner, shared = sizes.heads * sizes.head_dim, sizes.groups * sizes.size
        channels = inner + 2 * shared
        state = (sizes.heads, sizes.head_dim, sizes.size)
        super().__init__(channels, sizes.kernel, state, scope, conv_bias=sizes.conv_bias)
        self.skip = _parameter(torch.empty_like(self.rate))
        self.split = (inner, channels, sizes.heads)
        self.into = ColumnLinear(hidden, sum(self.split), scope / "in_proj", bias=sizes.proj_bias)
        self.norm = RMSNorm(inner, eps, scope / "norm")
        self.out = RowLinear(inner, hidden, scope / "out_proj", bias=sizes.proj_bias)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().targets()
        yield f"{self.name}.D", self.skip

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        (conv_state, state), seqs = self.bound, seqs_of(batch)
        gate, xbc, dt = self.into(x).split(self.split, 1)
        xbc = self.ops.conv(xbc, self.conv_weight, self.conv_bias, conv_state, seqs)
        y = self.ops.scan(xbc, dt, self.rates, self.skip, state, seqs)
        y = self.ops.gated_norm(y, gate, self.norm.weight, self.norm.eps, gate_first=True)
        out: Tensor = self.out(y)
        return out


class GatedDelta(StateMixer):
    """The gated delta rule: a convolution, a state that learns values by key, a gated norm of each head.

    `parts` are the input projections of the checkpoint and their sizes; `order`: where their rows lie that
    give queries, keys, values, gates, and each head's b and a, if not one after the other.
    """

    def __init__(
        self,
        hidden: int,
        sizes: DeltaSizes,
        eps: float,
        scope: Scope,
        *,
        parts: dict[str, int],
        order: Tensor | None = None,
    ) -> None:
        inner, channels = sizes.heads * sizes.value_dim, delta_channels(sizes)
        state = (sizes.heads, sizes.key_dim, sizes.value_dim)
        super().__init__(channels, sizes.kernel, state, scope, conv_bias=False)
        self.split = (channels, inner, sizes.heads, sizes.heads)
        named = {f"{scope.name}.{name}": size for name, size in parts.items()}
        self.into = OrderedLinear(hidden, named, scope, order=order)
        self.norm = RMSNorm(sizes.value_dim, eps, scope / "norm")
        self.out = RowLinear(inner, hidden, scope / "out_proj")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        (conv_state, state), seqs = self.bound, seqs_of(batch)
        qkv, gate, b, a = self.into(x).split(self.split, 1)
        qkv = self.ops.conv(qkv, self.conv_weight, None, conv_state, seqs)
        y = self.ops.delta(qkv, a, b, self.rates, state, seqs)
        y = self.ops.gated_norm(y, gate, self.norm.weight, self.norm.eps, gate_first=False)
        out: Tensor = self.out(y)
        return out


class OrderedLinear(Linear):
    """A linear layer whose outputs come in another order than in the checkpoint: `order` [size] says where
    each of them lies there."""

    def __init__(
        self,
        size_in: int,
        parts: dict[str, int],
        scope: Scope,
        *,
        order: Tensor | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(size_in, parts, scope, bias=bias)
        assert order is None or len(order) == sum(self.sizes_out)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    def finish(self) -> None:
        if self.order is not None:
            for tensor in self.parameters():
                assert len(tensor) == len(self.order), "a format that keeps no row for each output"
                tensor.copy_(tensor[self.order.to(tensor.device)])
        super().finish()


def delta_channels(sizes: DeltaSizes) -> int:
    """Queries, keys and values of a token, which pass the convolution."""
    return 2 * sizes.key_heads * sizes.key_dim + sizes.heads * sizes.value_dim


def seqs_of(batch: Batch) -> Seqs:
    """The batch as mixers read it, made once per step."""
    if batch.state is None:
        batch.state = Seqs(batch.query_starts, batch.rows, batch.positions, batch.query_lens_host)
    seqs: Seqs = batch.state
    return seqs


def state_layers(modules: Iterable[nn.Module]) -> list[StateMixer]:
    """Those of a model's modules that keep a state, in its order."""
    return [module for module in modules if isinstance(module, StateMixer)]


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
