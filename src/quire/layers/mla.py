"""Multi-head latent attention of one layer over its part of the KV cache, and the sparse indexer."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.attention import sparse_indices
from quire.attention.batch import Batch
from quire.attention.mla import MLAEntry, MLALoRA, MLASpec, choose, rotate
from quire.attention.sparse_indices import SparseIndices
from quire.checkpoint.facts import IndexFacts
from quire.checkpoint.layout import CacheSpec
from quire.layers.attention import KVScales
from quire.layers.linear import WholeLinear
from quire.layers.lora_layers import LoRAMlaLayer, LoRATarget
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rope import Rope
from quire.layers.scope import Scope, Target, target_of
from quire.quant.sharding import Shard, divided
from quire.quant.unquantized import PlainWeight
from quire.quant.weight import LinearShape, Weight, frozen_parameter


class MLAAttention(nn.Module):
    """Multi-head latent attention: writes the KV latents of tokens to the cache and attends to cached
    latents. Its weight is kv_b_proj. Heads are sharded over the tensor-parallel group, latents are
    replicated."""

    def __init__(self, spec: MLASpec, rope: Rope, norm: RMSNorm, scope: Scope, *, index_dim: int = 0) -> None:
        """Build the layer. `index_dim` is the size of the sparse indexer's keys; 0 if there is no indexer."""
        super().__init__()
        self.index_dim = index_dim
        self.index_keys: Tensor | None = None
        """Cached keys of the sparse indexer, [num_blocks, block_size, index_dim]; None until bound or without
        indexer."""
        self.name = scope.name
        self.spec = spec
        self.rope = rope
        self.norm = norm
        self.backend = scope.backend
        self.latent = choose(scope.device, scope.dtype)
        size = spec.heads * (spec.nope_dim + spec.v_dim)
        self.shard = divided(scope.group, size * scope.group.size)
        self.quantized = self._build_quantized(size, scope)
        # Used per head and transposed, so it is not quantized.
        self.weight = frozen_parameter(scope.empty(size, spec.rank))
        self.lora_layer = self._build_lora(scope)
        self.scales = KVScales(scope.sibling("")[:-1], scope)
        self.cache: Tensor | None = None
        self.group = 0

    def _build_quantized(self, size: int, scope: Scope) -> tuple[Weight, ...]:
        """Build kv_b_proj as a quantized weight, which `finish` dequantizes. Return it in a tuple, or () if
        the checkpoint does not quantize it."""
        rank, runs = self.spec.rank, ((self.shard,),)
        shape = LinearShape(
            rank,
            (size,),
            False,
            scope.dtype,
            scope.device,
            quantizable=False,
            outputs=runs,
            inputs=Shard(rank),
        )
        weight = scope.linear((scope.name,), shape)
        return () if isinstance(weight, PlainWeight) else (weight,)

    def _build_lora(self, scope: Scope) -> LoRAMlaLayer | None:
        slots, spec = scope.adapters, self.spec
        if slots is None or not slots.takes(scope.name):
            return None
        heads = spec.heads, spec.nope_dim, spec.v_dim
        transposed = self.latent.needs_transposed_lora
        lora_layer = LoRAMlaLayer(scope.name, slots, spec.rank, heads, scope.ops, keeps_transposed=transposed)
        lora_layer.targets[scope.name] = LoRATarget(lora_layer, slice(0, 1), Shard(spec.rank), (self.shard,))
        return lora_layer

    def adapted(self, batch: Batch) -> MLALoRA | None:
        """Return the LoRA adapters of the batch's tokens for kv_b_proj; None if no token has an adapter."""
        lora_layer = self.lora_layer
        if lora_layer is None or batch.lora is None:
            return None
        return MLALoRA(lora_layer.a, lora_layer.b, lora_layer.transposed, batch.lora.slots, lora_layer.ops)

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec("latent", planes=1, elements=self.spec.width + self.index_dim)

    def bind_memory(self, memory: Tensor, *, block_size: int, cache_dtype: torch.dtype, group: int) -> None:
        numbers, width = memory.view(cache_dtype), self.spec.width
        latents = len(numbers) // self.cache_spec.elements * width
        self.bind(numbers[:latents].view(-1, block_size, width), group)
        if self.index_dim:
            self.index_keys = numbers[latents:].view(-1, block_size, self.index_dim)

    def bind(self, cache: Tensor, group: int = 0) -> None:
        """Use this cache of latents and RoPE keys, [num_blocks, block_size, rank + rope_dim], with the block
        tables of KV cache group `group`."""
        assert cache.shape[2] == self.spec.width
        self.cache, self.group = cache, group
        self.spec = replace(self.spec, k_scale=self.scales.k if cache.itemsize == 1 else 1.0)

    def forward(
        self, q: Tensor, kv: Tensor, batch: Batch, topk_indices: SparseIndices | None = None
    ) -> Tensor:
        """Attend with [T, heads * query_dim] queries, which are rotated in place; return [T, heads * v_dim].
        `kv` holds [T, rank + rope_dim] latents and RoPE keys. `topk_indices` are the tokens that sparse
        attention is limited to."""
        assert self.cache is not None, "bind() comes before forward()"
        spec, cache, batch = self.spec, self.cache, batch.groups[self.group]
        queries = q.unflatten(1, (spec.heads, spec.query_dim))
        entry = MLAEntry(self.norm.weight, self.norm.eps, *self.rope.of(batch), batch.slots, cache)
        self.latent.enter(queries, kv, entry, spec)
        weight, adapted = self.weight.view(spec.heads, -1, spec.rank), self.adapted(batch)
        if topk_indices is not None:
            batch, cache = topk_indices.as_batch(batch), cache.view(-1, 1, spec.width)
        return self.latent.attend(queries, weight, cache, batch, spec, adapted).flatten(1)

    def targets(self) -> Iterator[Target]:
        if not self.quantized:
            yield Target(f"{self.name}.weight", self.weight, 0, (self.shard,))
        for packed in self.quantized:
            (part,) = packed.parts()
            for suffix, piece in part.items():
                yield target_of(f"{self.name}.{suffix}", piece, (self.shard,))

    def begin(self) -> None:
        for packed in self.quantized:
            packed.begin()

    def finish(self) -> None:
        """Dequantize kv_b_proj if it was loaded as a quantized weight: the product with the identity is the
        dequantized weight."""
        for packed in self.quantized:
            packed.finish()
            ones = torch.eye(self.spec.rank, dtype=self.weight.dtype, device=self.weight.device)
            self.weight.copy_(packed.product(ones).t())
        self.quantized = ()


_EPS = 1e-6


class SparseIndexer(nn.Module):
    """Indexer of sparse attention, which selects the tokens that each token attends to: queries of a few
    heads, one key for all heads, and a weight per head. It is not sharded."""

    def __init__(
        self, facts: IndexFacts, hidden: int, q_latent: int, rope_dim: int, rope: Rope, scope: Scope
    ) -> None:
        super().__init__()
        self.facts, self.rope, self.rope_dim = facts, rope, rope_dim
        self.q = WholeLinear(q_latent, facts.heads * facts.dim, scope / "wq_b")
        self.k = WholeLinear(hidden, facts.dim, scope / "wk")
        self.k_norm = LayerNorm(facts.dim, _EPS, scope / "k_norm")
        self.weights = WholeLinear(hidden, facts.heads, scope / "weights_proj")
        self.scale = (facts.heads * facts.dim) ** -0.5

    def forward(self, x: Tensor, q_latent: Tensor, keys: Tensor, batch: Batch) -> SparseIndices | None:
        """Write the keys of x [T, hidden] to the cache `keys` [num_blocks, block_size, dim]. Return the
        cached tokens to which each token attends, selected by queries that are projected from the query
        latents `q_latent`."""
        facts = self.facts
        queries = self._rotate(self.q(q_latent, batch).view(len(x), facts.heads, facts.dim), batch)
        new_keys = self._rotate(self.k_norm.normalize(self.k(x, batch))[:, None], batch)[:, 0]
        sparse_indices.write_keys(new_keys, keys, batch.slots)
        weights = self.weights(x, batch).float() * self.scale
        return sparse_indices.select(queries, weights, keys, batch, facts.top_k)

    def _rotate(self, x: Tensor, batch: Batch) -> Tensor:
        """Apply RoPE to the first `rope_dim` dimensions of each head."""
        table, positions = self.rope.of(batch)
        cos, sin = table[positions][:, None].chunk(2, -1)
        rotary, rest = x.split([self.rope_dim, x.shape[-1] - self.rope_dim], -1)
        return torch.cat((rotate(rotary, cos, sin, self.facts.rope_pairs), rest), -1)
