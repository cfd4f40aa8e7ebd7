"""Gemma 2 and 3: a norm before and after attention and MLP. VaultGemma: only a norm before each."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder
from quire.models.llama import Attention, feed_forward


class Layer(nn.Module):
    """Attention, then MLP, each with a norm before and after and a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.before_attention = norm_of(facts, scope / "input_layernorm")
        self.attention = Attention(facts, layer, rope, scope / "self_attn")
        self.after_attention = norm_of(facts, scope / "post_attention_layernorm")
        self.before_mlp = norm_of(facts, scope / "pre_feedforward_layernorm")
        self.mlp = feed_forward(facts, layer, scope)
        self.after_mlp = norm_of(facts, scope / "post_feedforward_layernorm")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.before_attention(x, residual)
        x = self.after_attention.alone(self.attention(x, batch))
        x, residual = self.before_mlp(x, residual)
        return self.after_mlp.alone(self.mlp(x)), residual


class GemmaModel(Decoder):
    """Gemma 2 and 3 decoder."""

    Layer = Layer


class VaultLayer(llama.Layer):
    """Llama layer with Gemma's names."""

    norm_names = ("input_layernorm", "pre_feedforward_layernorm")


class VaultGemma(Decoder):
    """VaultGemma decoder."""

    Layer = VaultLayer
