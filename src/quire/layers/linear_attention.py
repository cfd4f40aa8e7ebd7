"""Linear attention with a state in place of a KV cache: delta rule (also KDA) and lightning attention."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import StateFacts
from quire.kernels.reference.ssm import DecayRates, DeltaForm, DeltaInputs, ScanInputs
from quire.layers.linear import ColumnLinear, RowLinear
from quire.layers.norm import RMSNorm, norm_sharded_parts
from quire.layers.scope import Scope, Target
from quire.layers.ssm import DecayMixer, OrderedLinear, SSMMixer, ungrouped_order
from quire.quant.sharding import Runs, Shard, divided, of_heads
from quire.quant.weight import frozen_parameter

_EPS = 1e-6
"""Epsilon of the norm after lightning attention, independent of the model's."""


class DeltaAttention(DecayMixer):
    """Gated delta rule with separate projections and convolutions of queries, keys and values.

    The state decays per head (OLMo Hybrid) or per key channel (KDA: Kimi Linear, Ling 3). If `facts.rank` is
    not 0, the projections to decay and output gate are of this low rank.
    """

    def __init__(
        self, hidden: int, facts: StateFacts, eps: float, scope: Scope, *, out: str = "o_proj"
    ) -> None:
        group, heads = scope.group, divided(scope.group, facts.heads)
        inner = divided(group, facts.heads * facts.head_dim)
        keys = of_heads(group, facts.groups, facts.state)
        super().__init__((keys, keys, inner), facts, (heads.size, facts.state, facts.head_dim), scope)
        self.local_decays = keys if facts.decays_channels else heads
        bias = torch.empty(self.local_decays.size, dtype=torch.float32, device=scope.device)
        self.dt_bias = frozen_parameter(bias)
        self.form = DeltaForm(facts.log_bound, facts.beta_scale)
        rank = (Shard(facts.rank),)
        parts: dict[str, int | Runs] = {"q_proj": (keys,), "k_proj": (keys,), "v_proj": (inner,)}
        parts["b_proj"] = (heads,)
        self.decay_up: ColumnLinear | None = None
        self.gate_up: ColumnLinear | None = None
        if facts.rank:
            parts |= {"f_a_proj": rank, "g_a_proj": rank}
            self.decay_up = ColumnLinear(facts.rank, self.local_decays.all, scope / "f_b_proj")
            self.gate_up = ColumnLinear(facts.rank, inner.all, scope / "g_b_proj")
        else:
            decay = "f_proj" if facts.decays_channels else "a_proj"
            parts |= {decay: (self.local_decays,), "g_proj": (inner,)}
        self.into = OrderedLinear(hidden, parts, scope, orders=[])
        self.split = (sum(self.into.sizes_out[:3]), *self.into.sizes_out[3:])
        self.gate, self.head_dim = facts.gate, facts.head_dim
        self.norm = RMSNorm(facts.head_dim, facts.norm_eps or eps, scope / "o_norm")
        self.out = RowLinear(inner.all, hidden, scope / out)
        self.has_wide_rates = len(scope.shape_of(f"{scope.name}.A_log")) > 1
        """Whether the decay rates are stored as [1, 1, heads, 1] (Kimi Linear)."""

    def targets(self) -> Iterator[Target]:
        weights = self.conv_weight.unsqueeze(1).split([run.size for run in self.local_channels])
        for part, weight, run in zip("qkv", weights, self.local_channels, strict=True):
            yield Target(f"{self.name}.{part}_conv1d.weight", weight, 0, (run,))
        rate, axis = (self.rate.view(1, 1, -1, 1), 2) if self.has_wide_rates else (self.rate, 0)
        yield Target(f"{self.name}.A_log", rate, axis, (self.local_heads,))
        yield Target(f"{self.name}.dt_bias", self.dt_bias, 0, (self.local_decays,))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        (conv_state, state), seqs = self.bound, self.seqs_of(batch)
        qkv, b, a, gate = self.into(x, batch).split(self.split, 1)
        if self.decay_up is not None and self.gate_up is not None:
            a, gate = self.decay_up(a, batch), self.gate_up(gate, batch)
        qkv = self.ops.conv(qkv, self.conv_weights, conv_state, seqs)
        y = self.ops.delta(qkv, DeltaInputs(a, b, self.rates, self.form), state, seqs)
        if self.gate == "silu":
            y = self.ops.gated_norm(y, gate, self.norm.weight, self.norm.eps, gate_first=False)
        else:
            y = self.norm.normalize(y.view(-1, self.head_dim)).view(len(y), -1)
            y = self.ops.gate(y, gate, self.gate)
        return self.out(y, batch)


class LightningAttention(SSMMixer):
    """Lightning attention (MiniMax-Text-01): h = decay * h + k v^T, y = q h, with a fixed decay per head and
    layer. This is the scan of Mamba-2 with time steps of 1 and no convolution."""

    def __init__(
        self, hidden: int, facts: StateFacts, scope: Scope, *, depth: float, activation: str
    ) -> None:
        """Build the layer. `depth` is the index of the layer divided by that of the last layer; the states of
        deep layers decay slower."""
        inner, heads = divided(scope.group, facts.heads * facts.head_dim), divided(scope.group, facts.heads)
        super().__init__((), facts, (heads.size, facts.head_dim, facts.state), scope)
        queries, keys, values = ungrouped_order(heads.size, *[inner.size] * 3).chunk(3)
        self.activate = scope.ops.activate
        self.activation = activation
        self.into = OrderedLinear(
            hidden, {"qkv_proj": (divided(scope.group, 3 * inner.all),)}, scope,
            orders=[torch.cat((values, keys, queries))],
        )  # fmt: skip
        self.gate = ColumnLinear(hidden, inner.all, scope / "output_gate")
        self.norm = RMSNorm(inner, _EPS, scope / "norm")
        self.out = RowLinear(inner.all, hidden, scope / "out_proj")
        numbers = torch.arange(1, facts.heads + 1, dtype=torch.float32)[heads.start :][: heads.size]
        slopes = 2.0 ** (-8.0 / facts.heads * numbers) * (1 - depth + 1e-5)
        steps = torch.full_like(slopes, math.log(math.e - 1))  # softplus(log(e - 1)) is 1
        self.decay = DecayRates(-slopes.to(scope.device), steps.to(scope.device))
        self.skip = torch.zeros_like(self.decay.rate)
        self.no_steps = torch.zeros(1, heads.size, dtype=scope.dtype, device=scope.device)
        self.group = scope.group

    def targets(self) -> Iterator[Target]:
        yield from ()

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate: Tensor = self.gate(x, batch)
        vkq = self.activate(self.into(x, batch), self.activation)
        steps = self.no_steps.expand(len(x), -1)
        y = self.ops.scan(vkq, ScanInputs(steps, self.decay, self.skip), self.bound[1], self.seqs_of(batch))
        if self.group.size > 1:
            y = norm_sharded_parts(y, (self.norm.weight,), self.norm.eps, group=self.group)
        else:
            y = self.norm.normalize(y)
        return self.out(self.ops.gate(y, gate, "sigmoid"), batch)
