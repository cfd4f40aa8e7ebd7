"""Falcon-H1: attention and Mamba-2 in parallel in each layer, with muP scales of most inputs and outputs."""

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.ssm import Mamba2Mixer
from quire.models import llama
from quire.models.decoder import decoder_of


class ParallelMixer(nn.Module):
    """Attention and Mamba-2 in parallel; their outputs are scaled and added. `scope` is that of the layer."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        assert facts.state is not None
        self.ops = scope.ops
        self.scales, self.state_scale = facts.attention_scales, facts.state_scale
        self.attention = llama.Attention(facts, layer, rope, scope / "self_attn")
        self.mamba = Mamba2Mixer(facts.hidden, facts.state, facts.norm_eps, scope / "mamba")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        scale_in, scale_out = self.scales
        mamba_out = self.ops.scale(self.mamba(x, batch), self.state_scale)
        attention_out = self.ops.scale(self.attention(self.ops.scale(x, scale_in), batch), scale_out)
        return self.ops.add(mamba_out, attention_out)


class ScaledMLP(MLP):
    """Gated MLP with scale factors on its gate and its output."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.ops, (gate, self.scale) = scope.ops, facts.mlp_scales
        size = sum(self.gate_up.sizes_out) // 2
        self.factors = torch.cat([scope.empty(size).fill_(factor) for factor in (gate, 1.0)])

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        gate_up = self.ops.scale_columns(self.gate_up.multiply(x, batch), self.factors)
        gated = self.ops.gated(gate_up, self.gate_up.activation)
        return self.ops.scale(self.down(gated, batch), self.scale)


class Layer(llama.Layer):
    """Pre-norm layer: attention and Mamba-2 in parallel, then MLP, each with a residual."""

    Mixer = ParallelMixer

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        return ParallelMixer(facts, layer, rope, scope)

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return ScaledMLP(facts, scope / "feed_forward")


FalconH1 = decoder_of(Layer, last_norm="final_layernorm", norms=("input_layernorm", "pre_ff_layernorm"))
