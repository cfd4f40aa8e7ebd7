"""Decoders with attention and MLP in parallel: Command R, StableLM, Phi 1 and 2, GPT-J, GPT-NeoX, Falcon.

Some models of these families have sequential layers: Persimmon, Bloom, and sizes of StableLM and Falcon.
"""

from dataclasses import replace

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.norm import Norm, norm_of
from quire.layers.rope import Rope
from quire.layers.scope import DecoderNames, Scope
from quire.models import llama
from quire.models.decoder import Decoder, LayerFactory, decoder_of
from quire.models.gpt2 import GPT2
from quire.models.llama import PlainLayer


class ParallelLayer(llama.Layer):
    """Attention and MLP read the same normed input, and their outputs are added."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        del self.mlp_norm

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        return self.ops.add(self.attention(x, batch), self.mlp(x, batch)), residual


class PlainParallelLayer(ParallelLayer):
    """Parallel layer with an MLP without gate."""

    feed_forward = PlainLayer.feed_forward


class WideParallelLayer(PlainLayer):
    """Parallel layer with separate norms of attention and a plain MLP."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        mlp_out = self.mlp(self.mlp_norm.normalize(residual), batch)
        return self.ops.add(self.attention(x, batch), mlp_out), residual


Cohere = decoder_of(ParallelLayer)


class StableLM(Decoder):
    """StableLM decoder."""

    names = DecoderNames(qk_norms=("q_layernorm", "k_layernorm"))

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        return (ParallelLayer if facts.parallel_norms else llama.Layer)(facts, layer, rope, scope)


Phi = decoder_of(
    PlainParallelLayer,
    last_norm="final_layernorm",
    norms=("input_layernorm",),
    qk_norms=("q_layernorm", "k_layernorm"),
    out="dense",
    mlp_names=("fc1", "fc2"),
)
GPTJ = decoder_of(PlainParallelLayer, GPT2, norms=("ln_1",), out="out_proj", mlp_names=("fc_in", "fc_out"))


class GPTNeoX(Decoder):
    """GPT-NeoX and Pythia decoder. The fused QKV is grouped by key head."""

    names = DecoderNames(
        body="gpt_neox",
        embedding="embed_in",
        last_norm="final_layer_norm",
        head="embed_out",
        attention="attention",
        qkv="query_key_value",
        qkv_by_head=True,
        qk_norms=("q_layernorm", "k_layernorm"),
        out="dense",
        mlp_names=("dense_h_to_4h", "dense_4h_to_h"),
    )

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        return (WideParallelLayer if facts.parallel_norms else PlainLayer)(facts, layer, rope, scope)


Persimmon = decoder_of(
    PlainLayer,
    GPTNeoX,
    body="model",
    embedding="embed_tokens",
    last_norm="final_layernorm",
    head="lm_head",
    attention="self_attn",
)


class Falcon(Decoder):
    """Falcon decoder: sequential (Falcon-RW), parallel with one norm (7B) or with two norms (40B)."""

    names = GPTNeoX.names._replace(
        body="transformer",
        embedding="word_embeddings",
        layers="h",
        last_norm="ln_f",
        head="lm_head",
        attention="self_attention",
    )

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        kinds: list[LayerFactory] = [PlainLayer, PlainParallelLayer, WideParallelLayer]
        kind = kinds[facts.parallel_norms]
        if kind is WideParallelLayer:
            scope = replace(scope, names=scope.names._replace(norms=("ln_attn", "ln_mlp")))
        return kind(facts, layer, rope, scope)


class Bloom(Falcon):
    """Bloom decoder: Falcon-RW's layers, and a norm after the embedding."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.embed_norm: Norm | None = None
        if scope.stage.is_first:
            self.embed_norm = norm_of(facts, scope / self.names.body / "word_embeddings_layernorm")

    def embedded(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        assert self.embed_norm is not None, "only the first stage reads tokens"
        return self.embed_norm.normalize(super().embedded(batch)[0]), None
