"""Llama with other layers: TeleChat 2, PLaMo 3, Nemotron of variable layers, Ouro."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.attention import PagedAttention
from quire.layers.linear import QKVLinear
from quire.layers.mlp import MLP
from quire.layers.norm import Norm, norm_of
from quire.layers.rope import Rope
from quire.layers.scope import DecoderNames, Scope
from quire.models import llama
from quire.models.decoder import Decoder, decoder_of, refuse_pipeline
from quire.models.gemma import SandwichLayer


class QueryKeyValue(QKVLinear):
    """QKV projection with two tensors in the checkpoint: queries, and keys and values grouped by head."""

    def __init__(
        self, size_in: int, heads: int, kv_heads: int, head_dim: int, scope: Scope, **settings: Any
    ) -> None:
        settings |= {"names": ("query", "key_value"), "by_head": True}
        super().__init__(size_in, heads, kv_heads, head_dim, scope, **settings)


class FusedKeyValueAttention(llama.Attention):
    """Llama attention whose keys and values are one tensor in the checkpoint."""

    Product = QueryKeyValue


class TeleChatLayer(llama.Layer):
    """Llama layer whose gate and up projections have no biases, unlike the down projection."""

    Mixer = FusedKeyValueAttention

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MLP(facts, scope / scope.names.mlp, has_up_bias=False)


TeleChat2 = decoder_of(
    TeleChatLayer,
    body="transformer",
    embedding="word_embeddings",
    layers="h",
    last_norm="ln_f",
    attention="self_attention",
    out="dense",
)


class PlamoLayer(SandwichLayer):
    """Layer whose norms multiply by offsets plus their weights."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.attended_norm.offset, self.fed_norm.offset = 1 / 5, 1 / 5**1.5


Plamo3 = decoder_of(
    PlamoLayer,
    layers="layers.layers",
    norms=("pre_mixer_norm", "pre_mlp_norm"),
    after_norms=("post_mixer_norm", "post_mlp_norm"),
    attention="mixer",
)


class PartialLayer(nn.Module):
    """Llama layer that may have no attention or no MLP. A missing part has no norm either."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        names = scope.names
        self.norms, self.parts = nn.ModuleList(), nn.ModuleList()
        if layer.mixer == "attention":
            self.norms.append(norm_of(facts, scope / names.norms[0]))
            self.parts.append(llama.Attention(facts, layer, rope, scope / names.attention))
        if layer.has_mlp:
            self.norms.append(norm_of(facts, scope / names.norms[1]))
            self.parts.append(MLP(facts, scope / names.mlp))

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x, residual = norm(x, residual)
            x = part(x, batch)
        return x, residual


DeciLM = decoder_of(PartialLayer)
"""Llama-Nemotron decoder."""


class RepeatedAttention(nn.Module):
    """Attention with the weights of another layer and a KV cache of its own."""

    def __init__(self, like: llama.Attention, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.like = (like,)  # in a tuple, since its weights belong to the other layer
        self.mix = PagedAttention(like.mix.spec, rope, scope)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        (like,) = self.like
        return like.out(self.mix(x, like.qkv, batch), batch)


class RepeatedLayer(nn.Module):
    """Layer with the weights of another layer and a KV cache of its own."""

    def __init__(self, like: SandwichLayer, rope: Rope, scope: Scope) -> None:
        super().__init__()
        assert isinstance(like.attention, llama.Attention)
        self.like = (like,)
        self.attention = RepeatedAttention(like.attention, rope, scope)
        self.first_norm: tuple[Norm, ...] = ()
        """The norm of the model's output, if the layer is the first of a loop."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        for norm in self.first_norm:
            x, residual = norm(x, residual)[0], None
        return self.like[0].run(x, residual, batch, self.attention)


class Ouro(Decoder):
    """Ouro decoder: all layers run several times, with the final norm after each time."""

    names = DecoderNames(after_norms=("input_layernorm_2", "post_attention_layernorm_2"))

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        refuse_pipeline(scope, "Ouro, whose layers run several times")
        built = list[SandwichLayer]()
        self.Layer = partial(self._build, built=built)
        super().__init__(facts, scope)
        for layer in self.layers[len(built) :: len(built)]:
            assert isinstance(layer, RepeatedLayer) and self.norm is not None
            layer.first_norm = (self.norm,)

    @staticmethod
    def _build(
        facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope, *, built: list[SandwichLayer]
    ) -> nn.Module:
        if layer.shared_block >= 0:
            return RepeatedLayer(built[layer.shared_block], rope, scope / "attn")
        built.append(SandwichLayer(facts, layer, rope, scope))
        return built[-1]
