"""Zamba2: Mamba-2 layers, some preceded by a block of attention and MLP that several layers share.

A shared block reads the hidden states concatenated with the token embeddings.
"""

from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.attention import PagedAttention
from quire.layers.linear import Linear, QKVLinear, RowLinear, WholeLinear
from quire.layers.mlp import MLP
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import DecoderNames, Scope
from quire.layers.ssm import Mamba2Mixer
from quire.models.decoder import Decoder, refuse_pipeline
from quire.quant.sharding import Runs, divided, of_heads


class SharedBlock(nn.Module):
    """Weights shared by several layers: norms, QKV and output projections, MLP."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        heads, attention = (facts.heads, facts.kv_heads, facts.head_dim), scope / "self_attn"
        self.scope = scope
        self.norm = norm_of(facts, scope / "input_layernorm", 2 * facts.hidden)
        self.qkv = QKVLinear(2 * facts.hidden, *heads, attention / "qkv_proj")
        self.out = RowLinear(facts.heads * facts.head_dim, facts.hidden, attention / "o_proj")
        self.mlp_norm = norm_of(facts, scope / "pre_ff_layernorm")
        self.mlp = MLP(facts, scope / "feed_forward")


class SharedLayerLoRA(nn.Module):
    """Low-rank adapter of a shared linear layer, for one layer that uses it. Each part of a fused linear
    layer has a down and an up projection."""

    def __init__(self, size_in: int, rank: int, parts: dict[str, Runs], scope: Scope) -> None:
        super().__init__()
        self.ops, self.rank = scope.ops, rank
        self.down = Linear(size_in, {f"{name}.0": rank for name in parts}, scope)
        self.ups = [Linear(rank, {f"{name}.1": runs}, scope) for name, runs in parts.items()]
        self.up = nn.ModuleList(self.ups)

    def forward(self, out: Tensor, x: Tensor, batch: Batch) -> Tensor:
        ranks = self.down.multiply(x, batch).split(self.rank, 1)
        parts = [up.multiply(part, batch) for up, part in zip(self.ups, ranks, strict=True)]
        return self.ops.add(out, parts[0] if len(parts) == 1 else torch.cat(parts, 1))


class SharedBlockUse(nn.Module):
    """A layer's use of a shared block, with the layer's own KV cache, adapters and output projection."""

    def __init__(
        self, facts: ArchFacts, layer: LayerFacts, rope: Rope, block: SharedBlock, scope: Scope
    ) -> None:
        super().__init__()
        assert facts.shared is not None
        self.ops, self.block = scope.ops, block
        group, rank, shared = scope.group, facts.shared.rank, block.scope / "self_attn"
        spec = AttentionSpec(
            block.qkv.heads, block.qkv.kv_heads, facts.head_dim, scope.dtype, scale=facts.attention_scale
        )
        self.mix = PagedAttention(spec, rope, scope / "shared_transformer" / "self_attn")
        self.more_qkv: SharedLayerLoRA | None = None
        if facts.shared.adapts_attention:
            q = divided(group, facts.heads * facts.head_dim)
            kv = of_heads(group, facts.kv_heads, facts.head_dim)
            names = [f"{shared.name}.linear_{part}_adapter_list.{layer.shared_block_use}" for part in "qkv"]
            runs: list[Runs] = [(q,), (kv,), (kv,)]
            parts = dict(zip(names, runs, strict=True))
            self.more_qkv = SharedLayerLoRA(2 * facts.hidden, rank, parts, shared)
        shared, inner = block.scope / "feed_forward", divided(group, facts.intermediate)
        parts = {f"{shared.name}.gate_up_proj_adapter_list.{layer.shared_block_use}": (inner, inner)}
        self.more_gate_up = SharedLayerLoRA(facts.hidden, rank, parts, shared)
        self.linear = WholeLinear(facts.hidden, facts.hidden, scope / "linear")

    def forward(self, x: Tensor, batch: Batch, embeddings: Tensor) -> Tensor:
        block, mlp = self.block, self.block.mlp
        qkv = self._project_qkv(block.norm.normalize(torch.cat((x, embeddings), 1)), batch)
        mixed = self.mix.attend(qkv, batch)
        x = block.mlp_norm.normalize(block.out(mixed, batch))
        gate_up = self.more_gate_up(mlp.gate_up.multiply(x, batch), x, batch)
        down = mlp.down(self.ops.gated(gate_up, mlp.gate_up.activation), batch)
        return self.linear(down, batch)

    def _project_qkv(self, x: Tensor, batch: Batch) -> Tensor:
        qkv = self.block.qkv.multiply(x, batch)
        return qkv if self.more_qkv is None else self.more_qkv(qkv, x, batch)


class BlockFactory(Protocol):
    """Function that returns the shared block that the checkpoint stores under a layer number."""

    def __call__(self, number: int, /) -> SharedBlock: ...


class Layer(nn.Module):
    """Pre-norm Mamba-2 layer. The output of a shared block is added to Mamba's input only, not to the
    residual."""

    def __init__(
        self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope, *, blocks: BlockFactory
    ) -> None:
        super().__init__()
        assert facts.state is not None
        self.ops, inner = scope.ops, scope
        self.use: SharedBlockUse | None = None
        if layer.shared_block >= 0:
            self.use = SharedBlockUse(facts, layer, rope, blocks(layer.shared_block), scope)
            inner = scope / "mamba_decoder"
        self.norm = norm_of(facts, inner / "input_layernorm")
        self.mamba = Mamba2Mixer(facts.hidden, facts.state, facts.norm_eps, inner / "mamba")

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, embeddings: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), [T, hidden] each, whose sum is the output of the layer. `embeddings` are the
        token embeddings, [T, hidden]."""
        if self.use is None:
            x, residual = self.norm(x, residual)
            return self.mamba(x, batch), residual
        residual = x if residual is None else self.ops.add(residual, x)
        x = self.norm.normalize(self.ops.add(self.use(residual, batch, embeddings), residual))
        return self.mamba(x, batch), residual


class Zamba2(Decoder):
    """Zamba2 decoder."""

    names = DecoderNames(last_norm="final_layernorm")

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        refuse_pipeline(
            scope, "Zamba2, where layers of all stages share weights and read the token embeddings"
        )
        stack = scope / self.names.body / self.names.layers
        blocks = cache(lambda number: SharedBlock(facts, stack / number / "shared_transformer"))
        self.Layer = partial(Layer, blocks=blocks)
        super().__init__(facts, scope)

    def layer_inputs(self, x: Tensor, batch: Batch) -> tuple[Tensor]:
        return (x.clone(),)  # layers add to x in place
