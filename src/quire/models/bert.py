"""BERT, RoBERTa, XLM-R, ERNIE, DistilBERT and MPNet; with RoPE Nomic-BERT, GTE and Jina-embeddings-v3."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.reference.encoder import Spans
from quire.layers.embedding import TokenEmbedding
from quire.layers.encoder_attention import EncoderAttention, spans
from quire.layers.linear import GateUpLinear, RowLinear
from quire.layers.mlp import PlainMLP
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import LoadedModule, Scope, Target
from quire.parallel.group import ALONE
from quire.quant.sharding import divided


class BertNames(NamedTuple):
    """Checkpoint names of the layers and their parts."""

    stack: str
    attention: str
    qkv: tuple[str, ...]
    out: str
    norms: tuple[str, str]
    """Names of the norms after attention and after the MLP, relative to the layer."""
    mlp: tuple[str, ...]
    """Names of up and down of an MLP; or of gate, up and down; or of a fused up and gate, with the gate last,
    and down."""
    embed_norm: str = "embeddings.LayerNorm"


BERT = BertNames(
    "encoder.layer",
    "attention",
    ("self.query", "self.key", "self.value"),
    "output.dense",
    ("attention.output.LayerNorm", "output.LayerNorm"),
    ("intermediate.dense", "output.dense"),
)
DISTILBERT = BertNames(
    "transformer.layer",
    "attention",
    ("q_lin", "k_lin", "v_lin"),
    "out_lin",
    ("sa_layer_norm", "output_layer_norm"),
    ("ffn.lin1", "ffn.lin2"),
)
MPNET = BERT._replace(
    qkv=("attn.q", "attn.k", "attn.v"), out="attn.o", norms=("attention.LayerNorm", "output.LayerNorm")
)
TODAY = BertNames(
    "layers",
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "o_proj",
    ("post_attention_layernorm", "post_mlp_layernorm"),
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""Names of models with RoPE in checkpoints that current versions of transformers save. Checkpoints of the
original code have other names."""
_NOMIC = BertNames(
    "encoder.layers",
    "attn",
    ("Wqkv",),
    "out_proj",
    ("norm1", "norm2"),
    ("mlp.fc12", "mlp.fc11", "mlp.fc2"),
    "emb_ln",
)
_JINA = _NOMIC._replace(attention="mixer")
_GTE = BertNames(
    "encoder.layer",
    "attention",
    ("qkv_proj",),
    "o_proj",
    ("attn_ln", "mlp_ln"),
    ("mlp.up_gate_proj", "mlp.down_proj"),
)


class BertEmbeddings(nn.Module):
    """Sum of word, position, token type and task embeddings (as far as the model has them), and a norm."""

    def __init__(self, facts: ArchFacts, scope: Scope, norm: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        self.first, self.padding = facts.encoder.first_position, facts.encoder.padding
        self.words = TokenEmbedding(facts.vocab, facts.hidden, scope / "word_embeddings")
        replicated = replace(scope, group=ALONE)  # too small to shard
        counts = {
            "position_embeddings": facts.encoder.positions,
            "token_type_embeddings": facts.encoder.token_types,
            "task_type_embeddings": facts.encoder.task_types,
        }
        self.positions, self.types, self.tasks = (
            TokenEmbedding(count, facts.hidden, replicated / name) if count else None
            for name, count in counts.items()
        )
        self.norm = norm_of(facts, norm)

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.words(batch.token_ids, batch)
        if self.types is not None:
            types = torch.zeros_like(batch.token_ids) if batch.token_types is None else batch.token_types
            x = x + self.types(types)
        if self.positions is not None:
            x = x + self.positions(self._position_ids(batch))
        if self.tasks is not None:
            x = x + self.tasks(torch.zeros_like(batch.token_ids))
        return self.norm.normalize(x)

    def _position_ids(self, batch: Batch) -> Tensor:
        """Return the position id of each token. Padding tokens do not count, and have the id before the first
        one."""
        position_ids = batch.positions + self.first
        if self.padding is None:
            return position_ids
        is_padding = batch.token_ids == self.padding
        count = is_padding.cumsum(0)
        starts = torch.arange(len(position_ids), device=position_ids.device) - batch.positions
        num_before = count - (count - is_padding.long())[starts]
        return torch.where(is_padding, self.first - 1, position_ids - num_before)


class UpGateLinear(GateUpLinear):
    """Fused up and gate projection, stored in one tensor with the gate last."""

    def orders(self) -> list[Tensor]:
        size = self.sizes_out[0] // 2
        return [torch.arange(2 * size).roll(size)]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); only `down` may have a bias. `scope` is that of the layer."""

    def __init__(self, facts: ArchFacts, names: tuple[str, ...], scope: Scope) -> None:
        super().__init__()
        *gate_up, down = names
        make = GateUpLinear if len(gate_up) == 2 else UpGateLinear
        sizes, parts = (facts.hidden, facts.intermediate), tuple(gate_up)
        self.gate_up = make(*sizes, scope / "gate_up", activation=facts.activation, names=parts)
        self.down = RowLinear(facts.intermediate, facts.hidden, scope / down, bias=facts.mlp_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down(self.gate_up(x, batch), batch)


class Layer(nn.Module):
    """Post-norm layer: attention, then MLP, each followed by residual addition and norm."""

    def __init__(
        self, facts: ArchFacts, layer: LayerFacts, rope: Rope | None, names: BertNames, scope: Scope
    ) -> None:
        super().__init__()
        assert facts.encoder is not None
        attention = scope / names.attention
        self.attention = EncoderAttention(facts, layer, attention, names=names.qkv, out=names.out, rope=rope)
        self.attention_norm, self.mlp_norm = (norm_of(facts, scope / name) for name in names.norms)
        make = GatedMLP if facts.encoder.gated else PlainMLP
        self.mlp: nn.Module = make(facts, scope=scope, names=names.mlp)

    def forward(self, x: Tensor, batch: Batch, texts: Spans, bias: Tensor | None) -> Tensor:
        x = self.attention_norm.add_and_normalize(self.attention(x, batch, texts, bias), x)
        return self.mlp_norm.add_and_normalize(self.mlp(x, batch), x)


class Bert(nn.Module):
    """BERT encoder: embeddings and layers."""

    names = BERT

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        body = scope / facts.encoder.prefix
        names = self.stored_names(facts, body)
        self.embeddings = BertEmbeddings(facts, body / "embeddings", body / names.embed_norm)
        rope = cache(lambda rope: None if rope is None else Rope(rope, scope))
        self.layers = nn.ModuleList(
            Layer(facts, layer, rope(layer.rope), names, body / names.stack / i)
            for i, layer in enumerate(facts.layers)
        )

    def stored_names(self, facts: ArchFacts, body: Scope) -> BertNames:
        """Return the names of the encoder's layers and their parts in the checkpoint. `body` is the scope of
        the encoder."""
        return self.names

    @property
    def token_embedding(self) -> TokenEmbedding:
        return self.embeddings.words

    def forward(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden]."""
        x: Tensor = self.embeddings(batch)
        texts, bias = spans(batch), self.bias(batch)
        for layer in self.layers:
            x = layer(x, batch, texts, bias)
        return x

    def bias(self, batch: Batch) -> Tensor | None:
        """Return the bias that all layers add to attention scores, [heads, length, length] for the longest
        text of the batch; None without bias."""
        return None


class RotaryBert(Bert):
    """BERT encoder with RoPE: Nomic-BERT, GTE, Jina-embeddings-v3."""

    def stored_names(self, facts: ArchFacts, body: Scope) -> BertNames:
        assert facts.encoder is not None
        stored = (
            names
            for names in (_NOMIC, _JINA, _GTE)
            if body.is_stored(f"{body.name}.{names.stack}.0.{names.attention}.{names.out}.weight")
        )
        names = next(stored, TODAY)
        return names if facts.encoder.gated else names._replace(mlp=("mlp.fc1", "mlp.fc2"))


class DistilBert(Bert):
    """DistilBERT encoder: BERT with other checkpoint names."""

    names = DISTILBERT


class RelativeAttentionBias(LoadedModule):
    """Relative attention bias per head, by bucketed distance of two tokens as in T5: exact buckets for near
    tokens, logarithmic ones beyond, in both directions."""

    classes, farthest = 32, 128

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        self.shard = divided(scope.group, facts.heads)
        self.name = f"{scope.name}.weight"
        self.table = nn.Parameter(scope.empty(facts.encoder.distances, self.shard.size), requires_grad=False)

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.table, 1, (self.shard,))

    def forward(self, length: int) -> Tensor:
        """Return the bias [heads, length, length]."""
        positions = torch.arange(length, device=self.table.device)
        offsets = positions[:, None] - positions
        half = self.classes // 2
        exact = half // 2
        distance = offsets.abs()
        growth = (distance.clamp(min=1) / exact).log() / math.log(self.farthest / exact)
        far = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
        buckets = half * (offsets < 0) + torch.where(distance < exact, distance, far)
        return self.table[buckets].permute(2, 0, 1).contiguous()


class MPNet(Bert):
    """MPNet encoder: BERT with a relative attention bias."""

    names = MPNET

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.encoder is not None
        self.distances = RelativeAttentionBias(
            facts, scope / facts.encoder.prefix / "encoder" / "relative_attention_bias"
        )

    def bias(self, batch: Batch) -> Tensor | None:
        return self.distances(batch.max_query_len)
