"""BERT with RoPE: Nomic-BERT, GTE, Jina-embeddings-v3."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.reference.encoder import Spans
from quire.layers.encoder_attention import EncoderAttention, spans
from quire.layers.linear import GateUpLinear, RowLinear
from quire.layers.mlp import PlainMLP
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models.bert import BertEmbeddings


class RotaryBertNames(NamedTuple):
    """Checkpoint names of the model's parts."""

    stack: str
    embed_norm: str
    norms: tuple[str, str]
    attention: str
    qkv: tuple[str, ...]
    out: str
    gate_up: tuple[str, ...]
    """Names of gate and up of a gated MLP; one name for a fused tensor with the gate last."""
    down: str


TODAY = RotaryBertNames(
    "layers",
    "embeddings.LayerNorm",
    ("post_attention_layernorm", "post_mlp_layernorm"),
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "o_proj",
    ("gate_proj", "up_proj"),
    "down_proj",
)
"""Names of current transformers; the others are older, and transformers still writes them."""
_NOMIC = RotaryBertNames(
    "encoder.layers", "emb_ln", ("norm1", "norm2"), "attn", ("Wqkv",), "out_proj", ("fc12", "fc11"), "fc2"
)
_JINA = _NOMIC._replace(attention="mixer")
_GTE = RotaryBertNames(
    "encoder.layer",
    "embeddings.LayerNorm",
    ("attn_ln", "mlp_ln"),
    "attention",
    ("qkv_proj",),
    "o_proj",
    ("up_gate_proj",),
    "down_proj",
)


def names_of(scope: Scope) -> RotaryBertNames:
    """Return the names that the checkpoint uses; the scope is the body's."""
    for names in (_NOMIC, _JINA, _GTE):
        if scope.is_stored(f"{scope.name}.{names.stack}.0.{names.attention}.{names.out}.weight"):
            return names
    return TODAY


class UpGateLinear(GateUpLinear):
    """Fused up and gate projection, stored in one tensor with the gate last."""

    def orders(self) -> list[Tensor]:
        size = self.sizes_out[0] // 2
        return [torch.arange(2 * size).roll(size)]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); only `down` may have a bias."""

    def __init__(self, facts: ArchFacts, names: RotaryBertNames, scope: Scope) -> None:
        super().__init__()
        make = GateUpLinear if len(names.gate_up) == 2 else UpGateLinear
        sizes = facts.hidden, facts.intermediate
        self.gate_up = make(*sizes, scope / "gate_up", activation=facts.activation, names=names.gate_up)
        self.down = RowLinear(facts.intermediate, facts.hidden, scope / names.down, bias=facts.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate_up(x))
        return out


class Layer(nn.Module):
    """Post-norm layer: attention, then MLP, each followed by residual addition and norm."""

    def __init__(
        self, facts: ArchFacts, layer: LayerFacts, rope: Rope, names: RotaryBertNames, scope: Scope
    ) -> None:
        super().__init__()
        assert facts.encoder is not None
        self.attention = EncoderAttention(
            facts, layer, scope / names.attention, names=names.qkv, out=names.out, rope=rope
        )
        self.attention_norm, self.mlp_norm = (norm_of(facts, scope / name) for name in names.norms)
        self.mlp: nn.Module
        if facts.encoder.gated:
            self.mlp = GatedMLP(facts, names, scope / "mlp")
        else:
            self.mlp = PlainMLP(facts, scope / "mlp", names=("fc1", "fc2"))

    def forward(self, x: Tensor, batch: Batch, texts: Spans) -> Tensor:
        x = self.attention_norm.added(self.attention(x, batch.positions, texts), x)
        return self.mlp_norm.added(self.mlp(x), x)


class RotaryBert(nn.Module):
    """BERT encoder with RoPE: embeddings and layers."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        body = scope / facts.encoder.prefix
        names = names_of(body)
        self.embeddings = BertEmbeddings(facts, body / "embeddings", norm=body / names.embed_norm)
        rope = cache(lambda rope: Rope(rope, scope))
        self.layers = nn.ModuleList(
            Layer(facts, layer, rope(layer.rope), names, body / names.stack / i)
            for i, layer in enumerate(facts.layers)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden]."""
        x: Tensor = self.embeddings(batch)
        texts = spans(batch)
        for layer in self.layers:
            x = layer(x, batch, texts)
        return x
