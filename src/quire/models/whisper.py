"""Whisper's decoder: self-attention, cross-attention to the audio encoder's output, MLP."""

from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.cross_attention import CrossAttention, CrossAttentionCache
from quire.layers.linear import KeysWithoutBias
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder, LayerFactory
from quire.models.gpt2 import OPT


class Attention(llama.Attention):
    """Llama attention without a bias of keys."""

    Product = KeysWithoutBias


class Layer(llama.PlainLayer):
    """Pre-norm layer: self-attention, cross-attention to the audio, MLP, each with a residual."""

    Mixer: LayerFactory = Attention

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.cross_norm = norm_of(facts, scope / "encoder_attn_layer_norm")
        self.cross = CrossAttention(facts, scope / "encoder_attn")

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cross_batch: Batch | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), [T, hidden] each, whose sum is the output of the layer; `cross_batch` is the
        batch for cross-attention."""
        x, residual = self.attention_norm(x, residual)
        x, residual = self.cross_norm(self.attention(x, batch), residual)
        x, residual = self.mlp_norm(self.cross(x, cross_batch), residual)
        return self.mlp(x, batch), residual


class WhisperModel(Decoder):
    """Whisper decoder."""

    Layer = Layer
    names = OPT.names._replace(last_norm="layer_norm", head="proj_out")

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.media is not None, "a Whisper model needs an audio encoder"
        layers = [layer.cross for layer in self.layers if isinstance(layer, Layer)]
        self.cross_cache = CrossAttentionCache(layers, facts.media.num_cross_states, scope)

    def layer_inputs(self, x: Tensor, batch: Batch) -> tuple[Batch]:
        """Return the batch for cross-attention in a tuple: the additional argument of every layer."""
        return (self.cross_cache.cross_batch(batch),)
