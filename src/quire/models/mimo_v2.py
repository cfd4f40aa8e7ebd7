"""MiMo-V2-Flash: values with a smaller head size than keys, and attention sinks in sliding-window layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.attention import PagedAttention
from quire.layers.linear import Linear, RowLinear
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import decoder_of
from quire.quant.sharding import divided, of_heads


class Attention(nn.Module):
    """QKV projection, paged attention with values padded to the size of keys, output projection."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        group, head_dim, v_dim = scope.group, facts.head_dim, facts.v_dim
        queries = divided(group, facts.heads * head_dim)
        keys, values = (of_heads(group, facts.kv_heads, size) for size in (head_dim, v_dim))
        parts = {"q_proj": (queries,), "k_proj": (keys,), "v_proj": (values,)}
        named = {(scope / name).name: runs for name, runs in parts.items()}
        self.qkv = Linear(facts.hidden, named, scope / "qkv_proj", bias=facts.qkv_bias)
        self.ops, self.v_dim, self.missing = scope.ops, v_dim, head_dim - v_dim
        _, self.value_scale = facts.attention_scales
        self.sizes = queries.size + keys.size, values.size
        sizes = queries.size // head_dim, keys.size // head_dim, head_dim
        spec = AttentionSpec(*sizes, scope.dtype, layer.window, sinks=layer.window is not None)
        self.mix = PagedAttention(spec, rope, scope)
        self.mix.sinks_name = (scope / "attention_sink_bias").name
        self.out = RowLinear(facts.heads * v_dim, facts.hidden, scope / "o_proj")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        queries_keys, values = self.qkv.multiply(x, batch).split(self.sizes, 1)
        values = F.pad(values.unflatten(1, (-1, self.v_dim)), (0, self.missing)).flatten(1)
        mixed = self.mix.attend(torch.cat((queries_keys, values), 1), batch)
        mixed = mixed.unflatten(1, (-1, self.v_dim + self.missing))[..., : self.v_dim].flatten(1)
        return self.out(self.ops.scale(mixed, self.value_scale), batch)


MiMoV2 = decoder_of(llama.layer_with(Attention))
