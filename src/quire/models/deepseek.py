"""DeepSeek-V2, V3 and V3.2, Kimi-K2, GLM-5, Mistral 4 and A.X K1: MLA, and experts in most layers."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.attention.mla import MLASpec
from quire.attention.sparse_indices import SparseIndices
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.errors import ConfigError
from quire.layers.linear import ColumnLinear, Linear, RowLinear, without_bias
from quire.layers.mla import MLAAttention, SparseIndexer
from quire.layers.norm import RMSNorm, norm_of
from quire.layers.rope import Rope, mscale
from quire.layers.scope import Scope, Target
from quire.models import llama
from quire.models.decoder import Decoder, LayerFactory, decoder_of
from quire.models.llama4 import temperature_scales
from quire.quant.sharding import Runs, divided

_EPS = 1e-6
"""Epsilon of the norms of latents, independent of the model's."""


def latent_spec(facts: ArchFacts, layer: LayerFacts, heads: int) -> MLASpec:
    """Return the MLA parameters of a layer with `heads` heads on this rank; with YaRN, attention scores are
    scaled by mscale squared."""
    mla, rope = facts.mla, layer.rope
    assert mla is not None and rope is not None
    stretched = rope.kind != "default" and rope.mscale_all_dim
    return MLASpec(
        heads=heads,
        rank=mla.kv_latent,
        nope_dim=mla.nope_dim,
        rope_dim=mla.rope_dim,
        v_dim=mla.v_dim,
        scale=mla.scales[0]
        * (mla.nope_dim + mla.rope_dim) ** -0.5
        * (mscale(rope, stretched) ** 2 if stretched else 1.0),
        neighbours=rope.pairs,
    )


class _DirectQueryLinear(Linear):
    """Fused query and KV-latent projection of models without a query latent; queries have no bias."""

    def targets(self) -> Iterator[Target]:
        return without_bias(self.part_names[0], super().targets())


@dataclass(slots=True)
class SelectedTokens:
    """The tokens that the last sparse indexer of a forward pass selected, for the layers that reuse them."""

    indices: SparseIndices | None = None


class Attention(nn.Module):
    """Latent attention (MLA) of one layer: down projections to query and KV latents, query up projection,
    attention, output projection."""

    query_scales: Tensor | None
    LatentNorm: type[RMSNorm] = RMSNorm

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        spec = latent_spec(facts, layer, scope.group.share(facts.heads))
        q_latent, queries = facts.mla and facts.mla.q_latent, facts.heads * spec.query_dim
        parts: dict[str, int | Runs] = {(scope / "q_a_proj").name: q_latent or 0}
        if not q_latent:
            parts = {(scope / "q_proj").name: (divided(scope.group, queries),)}
        parts[(scope / "kv_a_proj_with_mqa").name] = spec.width
        linear = Linear if q_latent else _DirectQueryLinear
        self.down = linear(facts.hidden, parts, scope, bias=facts.qkv_bias)
        self.q_norm = RMSNorm(q_latent, _EPS, scope / "q_a_layernorm") if q_latent else None
        self.q_up = ColumnLinear(q_latent, queries, scope / "q_b_proj") if q_latent else None
        kv_norm = self.LatentNorm(spec.rank, _EPS, scope / "kv_a_layernorm")
        index = None if facts.mla is None else facts.mla.index
        self.indexer: SparseIndexer | None = None
        if index is not None and layer.has_indexer:
            assert q_latent, "an indexer needs a query latent"
            sizes = facts.hidden, q_latent, spec.rope_dim
            self.indexer = SparseIndexer(index, *sizes, rope, scope / "indexer")
        index_dim = index.dim if index is not None and layer.has_indexer else 0
        self.mix = MLAAttention(spec, rope, kv_norm, scope / "kv_b_proj", index_dim=index_dim)
        self.out = RowLinear(
            facts.heads * spec.v_dim, facts.hidden, scope / scope.names.out, bias=facts.out_bias
        )
        self.ops = scope.ops
        scales = temperature_scales(facts.attention_temperature, 0, scope)
        self.register_buffer("query_scales", scales, persistent=False)

    def forward(self, x: Tensor, batch: Batch, selected: SelectedTokens | None = None) -> Tensor:
        return self.out(self.attend(x, batch, selected or SelectedTokens()), batch)

    def attend(self, x: Tensor, batch: Batch, selected: SelectedTokens) -> Tensor:
        """Return the attention output of all heads [T, heads * v_dim]."""
        q, kv = self.down.multiply(x, batch).split(self.down.sizes_out, -1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_norm(q, None)[0]
            if self.indexer is not None:
                selected.indices = self._select_tokens(x, q, batch)
            q = self.q_up(q, batch)
        if self.query_scales is not None:
            q = self.ops.scale_rows(q, self.ops.embed(batch.positions, self.query_scales))
        return self.mix(q, kv, batch, selected.indices)

    def _select_tokens(self, x: Tensor, q_latent: Tensor, batch: Batch) -> SparseIndices | None:
        assert self.indexer is not None and self.mix.index_keys is not None, "bind() comes before forward()"
        batch = batch.groups[self.mix.group]
        topk_indices: SparseIndices | None = self.indexer(x, q_latent, self.mix.index_keys, batch)
        return topk_indices


class Layer(llama.Layer):
    """Pre-norm layer: latent attention, then MLP or experts, each with a residual."""

    Mixer: LayerFactory = Attention


class SparseLayer(Layer):
    """Layer with sparse attention, in models that have an indexer."""

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, selected: SelectedTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self._scaled(self.attention(x, batch, selected)), residual)
        return self._scaled(self.mlp(x, batch)), residual


class Deepseek(Decoder):
    """DeepSeek decoder."""

    Layer = SparseLayer

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        first, *_ = scope.stage.layers(len(facts.layers))
        if not facts.layers[first].has_indexer:
            raise ConfigError(
                f"a pipeline stage cannot begin with layer {first}, which reuses the sparse indices of the "
                "layer before it: set another pp_layer_partition, or pipeline_parallel_size=1"
            )
        super().__init__(facts, scope)

    def layer_inputs(self, x: Tensor, batch: Batch) -> tuple[SelectedTokens]:
        return (SelectedTokens(),)


class AXK1Layer(Layer):
    """DeepSeek layer with a norm after the experts."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.fed_norm = norm_of(facts, scope / "post_mlp_layernorm") if layer.moe else None

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = super().forward(x, residual, batch)
        return x if self.fed_norm is None else self.fed_norm.normalize(x), residual


AXK1 = decoder_of(AXK1Layer)
