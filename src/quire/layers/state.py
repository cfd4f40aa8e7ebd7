"""Mixers that keep a state instead of keys and values: Mamba-2 and the gated delta rule."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.config.facts import StateFacts
from quire.config.layout import CacheSpec
from quire.kernels.state import Rates, Seqs, choose
from quire.layers.linear import ColumnLinear, Linear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope, Target


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

    @property
    def keeps(self) -> CacheSpec:
        numbers = sum(math.prod(shape) for shape, _ in self.state_shapes)
        return CacheSpec("state", bytes_per_row=4 * numbers)

    def bind_memory(self, memory: Tensor, *, block_size: int, kept_as: torch.dtype, group: int) -> None:
        (inputs, narrow), (state, wide) = self.state_shapes
        num_rows, memory = len(memory), memory.flatten()
        end = num_rows * math.prod(state) * wide.itemsize
        rest = memory[end : end + num_rows * math.prod(inputs) * narrow.itemsize]
        self.bind(rest.view(narrow).view(num_rows, *inputs), memory[:end].view(wide).view(num_rows, *state))

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

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.name}.conv1d.weight", self.conv_weight.unsqueeze(1))
        if self.conv_bias is not None:
            yield Target(f"{self.name}.conv1d.bias", self.conv_bias)
        yield Target(f"{self.name}.A_log", self.rate)
        yield Target(f"{self.name}.dt_bias", self.dt_bias)

    def finish(self) -> None:
        self.rate.copy_(-self.rate.exp())


class Mamba2(StateMixer):
    """Mamba-2: a convolution, a selective scan, a gated norm."""

    def __init__(self, hidden: int, facts: StateFacts, eps: float, scope: Scope) -> None:
        inner = facts.heads * facts.head_dim
        channels = inner + 2 * facts.groups * facts.state
        shape = (facts.heads, facts.head_dim, facts.state)
        super().__init__(channels, facts.conv, shape, scope, conv_bias=facts.conv_bias)
        self.skip = _parameter(torch.empty_like(self.rate))
        self.split = (inner, channels, facts.heads)
        self.into = ColumnLinear(hidden, sum(self.split), scope / "in_proj", bias=facts.proj_bias)
        self.norm = RMSNorm(inner, eps, scope / "norm")
        self.unit = (
            None if facts.norm_groups == 1 else torch.ones_like(self.norm.weight[:: facts.norm_groups])
        )
        """Where parts have a norm each, the weight comes after it."""
        self.out = RowLinear(inner, hidden, scope / "out_proj", bias=facts.proj_bias)

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        yield Target(f"{self.name}.D", self.skip)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        (conv_state, state), seqs = self.bound, seqs_of(batch)
        gate, xbc, dt = self.into(x).split(self.split, 1)
        xbc = self.ops.conv(xbc, self.conv_weight, self.conv_bias, conv_state, seqs)
        y = self.ops.scan(xbc, dt, self.rates, self.skip, state, seqs)
        weight = self.norm.weight if self.unit is None else self.unit
        y = self.ops.gated_norm(y, gate, weight, self.norm.eps, gate_first=True)
        if self.unit is not None:
            y = self.norm.ops.scale_columns(y, self.norm.weight)
        out: Tensor = self.out(y)
        return out


class GatedDelta(StateMixer):
    """The gated delta rule: a convolution, a state that learns values by key, a gated norm of each head.

    `grouped`: the checkpoint has one projection of queries, keys, values and gates, and one of b and a, both
    with all that belongs to one head of keys together; else one each.
    """

    def __init__(self, hidden: int, facts: StateFacts, eps: float, scope: Scope, *, grouped: bool) -> None:
        inner, keys = facts.heads * facts.head_dim, facts.groups * facts.state
        channels = 2 * keys + inner
        shape = (facts.heads, facts.state, facts.head_dim)
        super().__init__(channels, facts.conv, shape, scope, conv_bias=False)
        self.split = (channels, inner, facts.heads, facts.heads)
        if grouped:
            parts = {"in_proj_qkvz": channels + inner, "in_proj_ba": 2 * facts.heads}
            orders = [apart(facts.groups, keys, keys, inner, inner), apart(facts.groups, *self.split[2:])]
        else:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            parts, orders = dict(zip(names, self.split, strict=True)), []
        self.into = OrderedLinear(hidden, parts, scope, orders=orders)
        self.norm = RMSNorm(facts.head_dim, eps, scope / "norm")
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
    """A linear layer whose outputs come in another order than in the checkpoint: for each part, where each of
    its outputs lies there."""

    def __init__(
        self,
        size_in: int,
        parts: dict[str, int],
        scope: Scope,
        *,
        orders: list[Tensor],
        bias: bool = False,
    ) -> None:
        named = {f"{scope.name}.{name}": size for name, size in parts.items()}
        super().__init__(size_in, named, scope, bias=bias)
        self.orders = orders

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    def finish(self) -> None:
        if self.orders:
            self.weight.reorder(self.orders)
        super().finish()


def apart(groups: int, *sizes: int) -> Tensor:
    """Where the outputs of several things lie, thing after thing, if each group of them lies together; sizes
    are those of all groups."""
    grouped = torch.arange(sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in grouped.split([size // groups for size in sizes], 1)])


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
