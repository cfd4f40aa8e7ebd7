"""Decoders with SSM layers: Mamba, Nemotron-H, Jamba, Bamba, Granite 4, LFM2 and LFM3."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.lora_layers import alias_targets
from quire.layers.mlp import MLP, PlainMLP
from quire.layers.moe import MoE
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.ssm import mixer_of
from quire.models import llama
from quire.models.decoder import decoder_of
from quire.models.gemma import SandwichLayer
from quire.models.step3 import GatedHeads


class MambaLayer(nn.Module):
    """Pre-norm layer: SSM mixer with a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.norm = norm_of(facts, scope / "norm")
        self.mixer = self.build_mixer(facts, layer, rope, scope)

    def build_mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        """Build the mixer of the layer. `scope` is that of the layer."""
        return mixer_of(facts, layer, scope / "mixer")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual)
        return self.mixer(x, batch), residual


MambaModel = decoder_of(MambaLayer, body="backbone", embedding="embeddings", last_norm="norm_f")
"""Mamba, Falcon-Mamba and Mamba-2 decoder: SSM layers only."""


class NemotronHLayer(MambaLayer):
    """Pre-norm layer with one mixer and a residual: Mamba-2, attention, experts or a plain MLP."""

    def build_mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer == "mamba":
            return super().build_mixer(facts, layer, rope, scope)
        if layer.mixer == "attention":
            return llama.Attention(facts, layer, rope, scope / "mixer")
        if layer.moe:
            return MoE(facts, scope)
        return PlainMLP(facts, scope / "mixer", names=("up_proj", "down_proj"))


NemotronH = decoder_of(NemotronHLayer, MambaModel)


class HybridLayer(llama.Layer):
    """Pre-norm layer: SSM mixer or attention, then MLP or experts, each with a residual."""

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer == "attention":
            return super().mixer(facts, layer, rope, scope)
        return mixer_of(facts, layer, scope / scope.names.ssm)


Jamba = decoder_of(
    HybridLayer,
    last_norm="final_layernorm",
    norms=("input_layernorm", "pre_ff_layernorm"),
    mlp="feed_forward",
)
"""Jamba decoder: Mamba layers, a few attention layers, and experts in every other layer."""
Bamba = decoder_of(HybridLayer, Jamba)
"""Bamba decoder: Mamba-2 layers and a few attention layers."""


class GraniteHybridLayer(HybridLayer):
    """Layer of Granite 4; gate and up are fused in checkpoints, and separate in GGUF files."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        if layer.moe or facts.fused_gate_up:
            return super().feed_forward(facts, layer, scope)
        return MLP(facts, scope / scope.names.mlp)


GraniteHybrid = decoder_of(GraniteHybridLayer, mlp="shared_mlp", mlp_names=("input_linear", "output_linear"))
"""Granite 4 decoder: Mamba-2 layers and a few attention layers, some with experts."""


class GatedLfm3Attention(GatedHeads):
    """Llama attention with a scalar gate on the output of each head."""

    gate_name = "gate_proj"


class Lfm3Layer(SandwichLayer):
    """Short convolution or gated attention, then MLP, each with a norm before and after and a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        alias_targets(self.attention, ".gate_proj", ".g_proj")  # the name of transformers

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer != "attention":
            return mixer_of(facts, layer, scope / scope.names.ssm)
        mixer = GatedLfm3Attention if facts.head_gate else llama.Attention
        return mixer(facts, layer, rope, scope / scope.names.attention)


Lfm2 = decoder_of(
    HybridLayer,
    last_norm="embedding_norm",
    norms=("operator_norm", "ffn_norm"),
    qk_norms=("q_layernorm", "k_layernorm"),
    out="out_proj",
    ssm="conv",
    mlp="feed_forward",
    mlp_names=("w1", "w3", "w2"),
)
"""LFM2 decoder: short convolutions, a few attention layers, and experts in some models."""
Lfm3 = decoder_of(
    Lfm3Layer,
    Lfm2,
    qk_norms=("q_norm", "k_norm"),
    out="o_proj",
    after_norms=("post_operator_norm", "post_ffn_norm"),
)
"""LFM3 decoder: short convolutions, and attention with and without a window."""
