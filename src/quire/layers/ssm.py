"""SSM mixers, with a state in place of a KV cache: Mamba, Mamba-2, gated delta rule, short convolution."""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts, StateFacts
from quire.checkpoint.layout import CacheSpec
from quire.kernels.reference.ssm import (
    ConvWeights,
    DecayRates,
    DeltaInputs,
    MambaInputs,
    ScanInputs,
    SSMSequences,
    choose,
)
from quire.layers.linear import ColumnLinear, Linear, RowLinear
from quire.layers.norm import RMSNorm, sum_of_squares
from quire.layers.scope import LoadedModule, Scope, Target
from quire.parallel.group import Group
from quire.quant.sharding import Runs, Shard, by_group, divided, of_heads
from quire.quant.weight import frozen_parameter


class SSMMixer(LoadedModule):
    """Base of all SSM mixers: the weights of the convolution and, for each batch row (sequence), the last
    inputs of the convolution and the SSM state. `forward` maps [T, hidden] to [T, hidden] and updates
    both."""

    conv_name = "conv1d"

    def __init__(self, channels: Runs, facts: StateFacts, state: tuple[int, ...], scope: Scope) -> None:
        super().__init__()
        self.name = scope.name
        self.local_channels = channels
        num_channels = sum(run.size for run in channels)
        self.ops = choose(scope.device, scope.dtype)
        self.state_shapes = (((num_channels, facts.conv - 1), scope.dtype), (state, torch.float32))
        """Shape and dtype of the convolution inputs and of the SSM state of one row (sequence)."""
        self.conv_weight = frozen_parameter(scope.empty(num_channels, facts.conv))
        self.conv_bias = frozen_parameter(scope.empty(num_channels)) if facts.conv_bias else None
        self.conv_state: Tensor | None = None
        self.state: Tensor | None = None
        self.states_per_row = 1
        """Number of SSM states per row (sequence): several if draft tokens may be rejected. It is set before
        memory is bound."""

    @property
    def cache_spec(self) -> CacheSpec:
        numbers = sum(math.prod(shape) for shape, _ in self.state_shapes)
        return CacheSpec("state", bytes_per_row=4 * numbers)

    def bind_memory(self, memory: Tensor, *, block_size: int, cache_dtype: torch.dtype, group: int) -> None:
        (inputs, narrow), (state, wide) = self.state_shapes
        num_rows, memory = len(memory), memory.flatten()
        end = num_rows * math.prod(state) * wide.itemsize
        rest = memory[end : end + num_rows * math.prod(inputs) * narrow.itemsize]
        self.bind(rest.view(narrow).view(num_rows, *inputs), memory[:end].view(wide).view(num_rows, *state))

    def bind(self, conv_state: Tensor, state: Tensor) -> None:
        """Use these tensors for convolution inputs and SSM states. Both have `states_per_row` entries, of the
        `state_shapes`, for each row (sequence) and for padding."""
        assert ((conv_state.shape[1:], conv_state.dtype), (state.shape[1:], state.dtype)) == self.state_shapes
        self.conv_state, self.state = conv_state, state

    def seqs_of(self, batch: Batch) -> SSMSequences:
        """Return the batch's sequences (rows, token ranges, positions) in the form that SSM mixers need; it
        is built once per step."""
        if batch.state is None:
            lens, num_states = batch.query_lens_host, self.states_per_row
            batch.state = SSMSequences(batch.query_starts, batch.rows, batch.positions, lens, num_states)
        seqs: SSMSequences = batch.state
        return seqs

    @property
    def conv_weights(self) -> ConvWeights:
        return ConvWeights(self.conv_weight, self.conv_bias)

    @property
    def bound(self) -> tuple[Tensor, Tensor]:
        assert self.conv_state is not None and self.state is not None, "bind() comes before forward()"
        return self.conv_state, self.state

    def targets(self) -> Iterator[Target]:
        name = f"{self.name}.{self.conv_name}"
        yield Target(f"{name}.weight", self.conv_weight.unsqueeze(1), 0, self.local_channels)
        if self.conv_bias is not None:
            yield Target(f"{name}.bias", self.conv_bias, 0, self.local_channels)


class ShortConv(SSMMixer):
    """Short convolution between two gates (LFM2), without an SSM state."""

    conv_name = "conv"

    def __init__(self, hidden: int, facts: StateFacts, eps: float, scope: Scope) -> None:
        inner = divided(scope.group, facts.heads)
        super().__init__((inner,), facts, (0,), scope)
        into = scope / "in_proj"
        self.into = Linear(hidden, {into.name: (inner,) * 3}, into, bias=facts.proj_bias)
        self.out = RowLinear(inner.all, hidden, scope / "out_proj", bias=facts.proj_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate_in, gate_out, x = self.into.multiply(x, batch).chunk(3, 1)
        x = self.ops.gate(x, gate_in, "itself")
        conv_state, seqs = self.bound[0], self.seqs_of(batch)
        x = self.ops.conv(x, self.conv_weights._replace(activated=False), conv_state, seqs)
        return self.out(self.ops.gate(x, gate_out, "itself"), batch)


class DecayMixer(SSMMixer):
    """Base of mixers with a decaying state: the decay rate (A) of each head, or with `per_element` of each
    element of the state, and the bias of the time steps (dt)."""

    bias_name = "dt_bias"

    def __init__(
        self,
        channels: Runs,
        facts: StateFacts,
        state: tuple[int, ...],
        scope: Scope,
        *,
        per_element: bool = False,
    ) -> None:
        super().__init__(channels, facts, state, scope)
        self.local_heads = divided(scope.group, state[0] * scope.group.size)
        rates = state if per_element else state[:1]
        self.rate = frozen_parameter(torch.empty(rates, dtype=torch.float32, device=scope.device))
        self.dt_bias = frozen_parameter(torch.empty(state[0], dtype=torch.float32, device=scope.device))

    @property
    def rates(self) -> DecayRates:
        return DecayRates(self.rate, self.dt_bias)

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        yield Target(f"{self.name}.A_log", self.rate, 0, (self.local_heads,))
        yield Target(f"{self.name}.{self.bias_name}", self.dt_bias, 0, (self.local_heads,))

    def finish(self) -> None:
        self.rate.copy_(-self.rate.exp())


class _ParamsLinear(RowLinear):
    """Projection to dt, B and C, never quantized: each output affects a whole state."""

    quantizable = False


class _TimeStepLinear(ColumnLinear):
    """Projection of time steps, never quantized."""

    quantizable = False


class MambaMixer(DecayMixer):
    """Mamba: a convolution, a projection to dt, B and C (optionally normed), a selective scan, a gate."""

    bias_name = "dt_proj.bias"

    def __init__(self, hidden: int, facts: StateFacts, eps: float, scope: Scope) -> None:
        inner = divided(scope.group, facts.heads)
        super().__init__((inner,), facts, (inner.size, facts.state), scope, per_element=True)
        self.skip = frozen_parameter(torch.empty_like(self.dt_bias))
        self.param_sizes = (facts.rank, facts.state, facts.state)
        into = scope / "in_proj"
        self.into = Linear(hidden, {into.name: (inner, inner)}, into, bias=facts.proj_bias)
        self.params = _ParamsLinear(inner.all, sum(self.param_sizes), scope / "x_proj")
        self.norm_parts, self.eps = scope.ops.norm_parts, facts.norm_eps or eps
        named = zip(("dt", "b", "c"), self.param_sizes, strict=True)
        norms = [RMSNorm(size, self.eps, scope / f"{name}_layernorm") for name, size in named]
        self.norms = nn.ModuleList(norms if facts.norm == "weighed" else [])
        self.weights = tuple[Tensor, ...](norm.weight for norm in norms if facts.norm == "weighed")
        if facts.norm == "bare":
            self.weights = tuple(scope.empty(size).fill_(1) for size in self.param_sizes)
        self.steps = _TimeStepLinear(facts.rank, inner.all, scope / "dt_proj")
        self.out = RowLinear(inner.all, hidden, scope / "out_proj", bias=facts.proj_bias)

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        yield Target(f"{self.name}.D", self.skip, 0, (self.local_heads,))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        (conv_state, state), seqs = self.bound, self.seqs_of(batch)
        x, gate = self.into.multiply(x, batch).chunk(2, 1)
        x = self.ops.conv(x, self.conv_weights, conv_state, seqs)
        params = self.params(x, batch)
        if self.weights:
            params = self.norm_parts(params, self.weights, self.eps)
        dt, b, c = params.split(self.param_sizes, 1)
        inputs = MambaInputs(self.steps(dt, batch), b, c, self.rates, self.skip)
        y = self.ops.select(x, gate, inputs, state, seqs)
        return self.out(y, batch)


class Mamba2Mixer(DecayMixer):
    """Mamba-2: a convolution, a selective scan, a gated norm."""

    def __init__(self, hidden: int, facts: StateFacts, eps: float, scope: Scope) -> None:
        group, heads = scope.group, divided(scope.group, facts.heads)
        inner = divided(group, facts.heads * facts.head_dim)
        shared = of_heads(group, facts.groups, facts.state)
        channels = (inner, shared, shared)
        super().__init__(channels, facts, (heads.size, facts.head_dim, facts.state), scope)
        self.skip, self.limits = frozen_parameter(torch.empty_like(self.rate)), facts.time_limits
        self.split = (inner.size, len(self.conv_weight), heads.size)
        into = scope / "in_proj"
        self.into = Linear(hidden, {into.name: (inner, *channels, heads)}, into, bias=facts.proj_bias)
        self.scale_columns, self.scales = scope.ops.scale_columns, None
        if facts.scales:
            sizes = [run.size for run in (inner, *channels, heads)]
            scales = zip(sizes, facts.scales, strict=True)
            self.scales = torch.cat([scope.empty(size).fill_(scale) for size, scale in scales])
        self.normed = GatedNorm(inner, facts, facts.norm_eps or eps, scope) if facts.norm != "none" else None
        self.out = RowLinear(inner.all, hidden, scope / "out_proj", bias=facts.proj_bias)

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        yield Target(f"{self.name}.D", self.skip, 0, (self.local_heads,))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        (conv_state, state), seqs = self.bound, self.seqs_of(batch)
        projected = self.into.multiply(x, batch)
        if self.scales is not None:
            projected = self.scale_columns(projected, self.scales)
        gate, xbc, dt = projected.split(self.split, 1)
        xbc = self.ops.conv(xbc, self.conv_weights, conv_state, seqs)
        y = self.ops.scan(xbc, ScanInputs(dt, self.rates, self.skip, self.limits), state, seqs)
        y = self.ops.gate(y, gate, "silu") if self.normed is None else self.normed(y, gate)
        return self.out(y, batch)


class GatedNorm(nn.Module):
    """Gated RMS norm after Mamba-2's scan, over all channels or over groups of channels. Both may span
    tensor-parallel devices."""

    def __init__(self, inner: Shard, facts: StateFacts, eps: float, scope: Scope) -> None:
        super().__init__()
        self.norm = RMSNorm(inner, eps, scope / "norm")
        self.gated_norm = choose(scope.device, scope.dtype).gated_norm
        self.gate_first = facts.norm == "gate_first"
        norms = facts.norm_groups // scope.group.size
        self.unit = torch.ones_like(self.norm.weight[::norms]) if norms > 1 else None
        """Weight of ones with which the channels of a group are normalized before the real weight is applied;
        None unless there are several groups."""
        if not norms:
            self.gated_norm = partial(_gated_norm_of_shards, group=scope.group, norms=facts.norm_groups)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        weight = self.norm.weight if self.unit is None else self.unit
        y = self.gated_norm(x, gate, weight, self.norm.eps, gate_first=self.gate_first)
        return y if self.unit is None else self.norm.ops.scale_columns(y, self.norm.weight)


def _gated_norm_of_shards(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool, group: Group, norms: int
) -> Tensor:
    """Return the gated RMS norm as `StateOps.gated_norm` does, if a norm group is divided over
    tensor-parallel ranks."""
    wide, factor = x.float(), F.silu(gate.float())
    wide = wide * factor if gate_first else wide
    parts = group.gather(sum_of_squares(wide)).unflatten(1, (norms, -1))
    squares = torch.stack(parts.unbind(-1)).sum(0)  # adds in the order of the ranks
    index = group.rank * norms // group.size
    mean = squares[:, index : index + 1] * norms / (group.size * x.shape[1])
    y = weight * (wide * torch.rsqrt(mean + eps)).to(weight.dtype)
    return (y if gate_first else y * factor).to(x.dtype)


class GatedDelta(DecayMixer):
    """Gated delta rule: a convolution, a state of key-value associations, a gated norm of each head.

    With `grouped` the checkpoint fuses queries, keys, values and gates in one projection and b and a in
    another, both grouped by key head. Otherwise the projections of QKV, gate (z), b and a are separate.
    """

    def __init__(self, hidden: int, facts: StateFacts, eps: float, scope: Scope, *, grouped: bool) -> None:
        group, heads = scope.group, divided(scope.group, facts.heads)
        inner = divided(group, facts.heads * facts.head_dim)
        keys = of_heads(group, facts.groups, facts.state)
        channels, shape = (keys, keys, inner), (heads.size, facts.state, facts.head_dim)
        super().__init__(channels, facts, shape, scope)
        self.split = (len(self.conv_weight), inner.size, heads.size, heads.size)
        if grouped:
            both = {"in_proj_qkvz": (*channels, inner), "in_proj_ba": (heads, heads)}
            num_groups = keys.size // facts.state
            orders = [ungrouped_order(num_groups, *(run.size for run in runs)) for runs in both.values()]
            parts = {name: by_group(group, facts.groups, runs) for name, runs in both.items()}
        else:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            shards: tuple[Runs, ...] = (channels, (inner,), (heads,), (heads,))
            parts, orders = dict(zip(names, shards, strict=True)), []
        self.into = OrderedLinear(hidden, parts, scope, orders=orders)
        self.norm = RMSNorm(facts.head_dim, eps, scope / "norm")
        self.out = RowLinear(inner.all, hidden, scope / "out_proj")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        (conv_state, state), seqs = self.bound, self.seqs_of(batch)
        qkv, gate, b, a = self.into(x, batch).split(self.split, 1)
        qkv = self.ops.conv(qkv, self.conv_weights, conv_state, seqs)
        y = self.ops.delta(qkv, DeltaInputs(a, b, self.rates), state, seqs)
        y = self.ops.gated_norm(y, gate, self.norm.weight, self.norm.eps, gate_first=False)
        return self.out(y, batch)


class OrderedLinear(Linear):
    """A linear layer with reordered outputs: `orders` has, by part, the checkpoint index of each output."""

    def __init__(
        self,
        size_in: int,
        parts: Mapping[str, int | Runs],
        scope: Scope,
        *,
        orders: list[Tensor],
        bias: bool = False,
    ) -> None:
        named = {f"{scope.name}.{name}": size for name, size in parts.items()}
        super().__init__(size_in, named, scope, bias=bias)
        self._orders = orders

    def orders(self) -> list[Tensor]:
        return self._orders

    forward = Linear.multiply


def ungrouped_order(groups: int, *sizes: int) -> Tensor:
    """Return, for outputs that the checkpoint stores group by group, the checkpoint index of each output in
    the order part by part. `sizes` are the sizes of the parts over all groups."""
    grouped = torch.arange(sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in grouped.split([size // groups for size in sizes], 1)])


_MIXERS = {"selective": MambaMixer, "mamba": Mamba2Mixer, "conv": ShortConv}


def mixer_of(facts: ArchFacts, layer: LayerFacts, scope: Scope) -> SSMMixer:
    assert facts.state is not None
    return _MIXERS[layer.mixer](facts.hidden, facts.state, facts.norm_eps, scope)


def state_layers(modules: Iterable[nn.Module]) -> list[SSMMixer]:
    return [module for module in modules if isinstance(module, SSMMixer)]
