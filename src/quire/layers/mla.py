"""LatentAttention: one layer's latent attention over its part of the cache."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.attention.mla import MLAEntry, MLALoRA, MLASpec, choose
from quire.attention.sparse_indices import SparseIndices
from quire.checkpoint.layout import CacheSpec
from quire.layers.kv_scales import KVScales
from quire.layers.lora_layers import LoRAMlaLayer, LoRATarget
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.layers.scope import Scope, Target, target_of
from quire.quant.plain import PlainWeight
from quire.quant.sharding import Shard, divided
from quire.quant.weight import LinearShape, Weight, kept


class MLAAttention(nn.Module):
    """What a token leaves in the cache, and the product that makes keys and values of it. The heads are those
    of this device, the latents those of all."""

    def __init__(self, spec: MLASpec, rope: Rope, norm: RMSNorm, scope: Scope, *, index_dim: int = 0) -> None:
        """`index_dim`: the size of the keys that an indexer has beside the latents; 0: there is none."""
        super().__init__()
        self.index_dim = index_dim
        self.index_keys: Tensor | None = None
        """[num_blocks, block_size, index_dim]"""
        self.name = scope.name
        self.spec = spec
        self.rope = rope
        self.norm = norm
        self.backend = scope.backend
        self.latent = choose(scope.device, scope.dtype)
        size = spec.heads * (spec.nope_dim + spec.v_dim)
        self.own = divided(scope.group, size * scope.group.size)
        self.packed = self._packed(size, scope)
        # Used by heads and both ways round, so in no packed format.
        self.weight = kept(scope.empty(size, spec.rank))
        self.point = self._point(scope)
        self.scales = KVScales(scope.beside("")[:-1], scope)
        self.cache: Tensor | None = None
        self.group = 0

    def _packed(self, size: int, scope: Scope) -> tuple[Weight, ...]:
        """What the checkpoint has it in, until it is loaded; none: it is plain."""
        rank, runs = self.spec.rank, ((self.own,),)
        shape = LinearShape(
            rank, (size,), False, scope.dtype, scope.device, narrows=False, outputs=runs, inputs=Shard(rank)
        )
        made = scope.linear((scope.name,), shape)
        return () if isinstance(made, PlainWeight) else (made,)

    def _point(self, scope: Scope) -> LoRAMlaLayer | None:
        slots, spec = scope.adapters, self.spec
        if slots is None or not slots.takes(scope.name):
            return None
        heads = spec.heads, spec.nope_dim, spec.v_dim
        point = LoRAMlaLayer(scope.name, slots, spec.rank, heads, scope.ops, turns=self.latent.turns)
        point.places[scope.name] = LoRATarget(point, slice(0, 1), Shard(spec.rank), (self.own,))
        return point

    @property
    def adapted(self) -> MLALoRA | None:
        """What the adapters of the step's tokens add to the weight."""
        point = self.point
        if point is None or point.tokens is None:
            return None
        return MLALoRA(point.a, point.b, point.turned, point.tokens, point.ops)

    @property
    def keeps(self) -> CacheSpec:
        return CacheSpec("latent", planes=1, numbers=self.spec.width + self.index_dim)

    def bind_memory(self, memory: Tensor, *, block_size: int, cache_dtype: torch.dtype, group: int) -> None:
        numbers, width = memory.view(cache_dtype), self.spec.width
        latents = len(numbers) // self.keeps.numbers * width
        self.bind(numbers[:latents].view(-1, block_size, width), group)
        if self.index_dim:
            self.index_keys = numbers[latents:].view(-1, block_size, self.index_dim)

    def bind(self, cache: Tensor, group: int = 0) -> None:
        """Use this cache from now on: [num_blocks, block_size, rank + rope_dim]."""
        assert cache.shape[2] == self.spec.width
        self.cache, self.group = cache, group
        self.spec = replace(self.spec, k_scale=self.scales.k if cache.itemsize == 1 else 1.0)

    def forward(
        self, q: Tensor, kv: Tensor, batch: Batch, topk_indices: SparseIndices | None = None
    ) -> Tensor:
        """[T, heads * query_dim] queries, which are changed, and [T, rank + rope_dim] latents with their keys
        -> [T, heads * v_dim]. `topk_indices`: what tokens see, if not all before them."""
        assert self.cache is not None, "bind() comes before forward()"
        spec, cache, batch = self.spec, self.cache, batch.groups[self.group]
        queries = q.unflatten(1, (spec.heads, spec.query_dim))
        entry = MLAEntry(self.norm.weight, self.norm.eps, *self.rope.of(batch), batch.slots, cache)
        self.latent.enter(queries, kv, entry, spec)
        weight = self.weight.view(spec.heads, -1, spec.rank)
        if topk_indices is not None:
            batch, cache = topk_indices.seen_by(batch), cache.view(-1, 1, spec.width)
        return self.latent.attend(queries, weight, cache, batch, spec, self.adapted).flatten(1)

    def targets(self) -> Iterator[Target]:
        if not self.packed:
            yield Target(f"{self.name}.weight", self.weight, 0, (self.own,))
        for packed in self.packed:
            (part,) = packed.parts()
            yield from (
                target_of(f"{self.name}.{suffix}", each, (self.own,)) for suffix, each in part.items()
            )

    def begin(self) -> None:
        for packed in self.packed:
            packed.begin()

    def finish(self) -> None:
        """A packed weight tells its numbers by what it makes of ones."""
        for packed in self.packed:
            packed.finish()
            ones = torch.eye(self.spec.rank, dtype=self.weight.dtype, device=self.weight.device)
            self.weight.copy_(packed.product(ones).t())
        self.packed = ()
