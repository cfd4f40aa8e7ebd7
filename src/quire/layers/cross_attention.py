"""Cross-attention to the output of an encoder, for items without placeholder tokens (Whisper)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import CROSS_BLOCK_SIZE, CacheSpec, cross_attention_spec
from quire.layers.linear import ColumnLinear, Linear, RowLinear, without_bias
from quire.layers.scope import Scope, Target
from quire.quant.sharding import of_heads


class KVLinear(Linear):
    """Fused key and value projection, sharded by heads; values have a bias, keys do not."""

    divided = "outputs"

    def __init__(self, size_in: int, kv_heads: int, head_dim: int, scope: Scope) -> None:
        kv = of_heads(scope.group, kv_heads, head_dim)
        parts = {scope.sibling(name): (kv,) for name in ("k_proj", "v_proj")}
        super().__init__(size_in, parts, scope, bias=True)
        self.kv_heads, self.head_dim = kv.size // head_dim, head_dim

    def targets(self) -> Iterator[Target]:
        return without_bias(self.part_names[0], super().targets())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project [N, size_in] to keys and values, [N, kv_heads, head_dim] each."""
        k, v = self.multiply(x).view(len(x), 2, self.kv_heads, self.head_dim).unbind(1)
        return k, v


class CrossAttention(nn.Module):
    """Cross-attention of tokens to encoder vectors: query and KV projections, attention, output
    projection."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        inner = facts.heads * facts.head_dim
        self.q = ColumnLinear(facts.hidden, inner, scope / "q_proj", bias=True)
        self.kv = KVLinear(facts.hidden, facts.kv_heads, facts.head_dim, scope / "kv_proj")
        self.out = RowLinear(inner, facts.hidden, scope / "out_proj", bias=True)
        heads = sum(self.q.sizes_out) // facts.head_dim
        self.spec = AttentionSpec(heads, self.kv.kv_heads, facts.head_dim, scope.dtype)
        self.backend = scope.backend
        self.records_queries = False
        """Whether `forward` stores its queries in `queries`, from which word timestamps are computed."""
        self.queries: Tensor | None = None
        """Queries of the last step, [N, heads, head_dim]; None unless `records_queries`."""
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Use these caches of keys and values, [blocks, block size, kv_heads, head_dim] each."""
        self.k_cache, self.v_cache = k_cache, v_cache

    def write(self, vectors: Tensor, first: int) -> None:
        """Write the keys and values of encoder vectors [vectors, hidden] to the cache from block `first`
        on."""
        assert self.k_cache is not None and self.v_cache is not None, "bind() comes before write()"
        for cache, projected in zip((self.k_cache, self.v_cache), self.kv(vectors), strict=True):
            cache[first:].flatten(0, 1)[: len(projected)].copy_(projected)

    def keys_of(self, blocks: Tensor, heads: list[int]) -> Tensor:
        """Return the cached keys of an encoded item, [vectors, len(heads), head_dim]. `blocks` are the
        indices of its cache blocks, `heads` are indices of query heads, for which the matching KV heads are
        returned."""
        assert self.k_cache is not None, "bind() comes before keys_of()"
        shared = self.spec.heads // self.spec.kv_heads
        return self.k_cache[blocks.long()].flatten(0, 1)[:, [head // shared for head in heads]]

    def forward(self, x: Tensor, cross_batch: Batch) -> Tensor:
        """Return the attention [T, hidden] of the tokens x [T, hidden] to the encoder vectors of their
        sequences. `cross_batch` is made by `CrossAttentionCache.cross_batch`."""
        assert self.k_cache is not None and self.v_cache is not None, "bind() comes before forward()"
        q = self.q(x, cross_batch).view(len(x), self.spec.heads, self.spec.head_dim)
        self.queries = q if self.records_queries else None
        mixed = self.backend.forward(q, self.k_cache, self.v_cache, cross_batch, self.spec)
        return self.out(mixed.flatten(1), cross_batch)


class CrossAttentionCache(nn.Module):
    """Cross-attention KV cache of all layers. It has one slot per item (such as an audio clip), and records
    the slot of the sequence in each batch row.

    For the attention backend each token is a sequence, whose earlier tokens are the encoder's vectors."""

    def __init__(self, layers: Sequence[CrossAttention], num_vectors: int, scope: Scope) -> None:
        super().__init__()
        self.layers = tuple(layers)  # a tuple, so that the weights are not registered here
        self.num_vectors, self.num_blocks = num_vectors, -(-num_vectors // CROSS_BLOCK_SIZE)
        self.backend, self.device = scope.backend, scope.device
        self.num_slots = 0
        """Number of item slots: the maximum number of rows."""
        self.tables = torch.empty(0, dtype=torch.int32)
        """Block tables, [rows, blocks]: the cache blocks that the sequence in each row attends to. The last
        row is for padding."""
        self.lens = torch.empty(0, dtype=torch.int32)
        """Length of the encoder output of each row, [rows]; all are `num_vectors`."""

    @property
    def cache_spec(self) -> CacheSpec:
        spec = self.layers[0].spec
        return cross_attention_spec(len(self.layers), self.num_vectors, spec.kv_heads * spec.head_dim)

    def bind_memory(self, memory: Tensor, *, block_size: int, cache_dtype: torch.dtype, group: int) -> None:
        num_rows, spec = len(memory), self.layers[0].spec
        shape = (len(self.layers), 2, -1, CROSS_BLOCK_SIZE, spec.kv_heads, spec.head_dim)
        for layer, (k_cache, v_cache) in zip(
            self.layers, memory.flatten().view(cache_dtype).view(shape), strict=True
        ):
            layer.bind(k_cache, v_cache)
        self.num_slots = num_rows - 1
        self.tables = torch.zeros(num_rows, self.num_blocks, dtype=torch.int32, device=self.device)
        self.lens = torch.full((num_rows,), self.num_vectors, dtype=torch.int32, device=self.device)
        self.assign(list(range(num_rows)), [self.num_slots] * num_rows)

    def write(self, vectors: Tensor, slot: int) -> None:
        """Write the keys and values of an encoder's output [num_vectors, hidden] to a slot."""
        for layer in self.layers:
            layer.write(vectors, slot * self.num_blocks)

    def assign(self, rows: list[int], slots: list[int]) -> None:
        """Let the sequence in rows[i] attend to the item in slots[i]."""
        firsts = self.num_blocks * np.array(slots, np.int32)
        blocks = firsts[:, None] + np.arange(self.num_blocks, dtype=np.int32)
        self.tables[torch.tensor(rows, device=self.device)] = torch.from_numpy(blocks).to(self.device)

    def cross_batch(self, batch: Batch) -> Batch:
        """Return `batch` changed for cross-attention: each token is a sequence of its own. For decodes the
        result only references existing tensors, so that CUDA graphs stay valid."""
        count = len(batch.token_ids)
        rows, starts, lens = batch.rows, batch.query_starts, self.lens[:count]
        if count > len(rows):
            counts = torch.from_numpy(batch.query_lens_host).to(self.device)
            rows = rows.repeat_interleave(counts, output_size=count)
            starts = torch.arange(count + 1, dtype=torch.int32, device=self.device)
            lens = torch.full((count,), self.num_vectors, dtype=torch.int32, device=self.device)
        cross_batch = replace(
            batch,
            query_starts=starts,
            rows=rows,
            seq_lens=lens,
            block_tables=self.tables,
            query_lens_host=np.ones(count, np.int32),
            seq_lens_host=np.full(count, self.num_vectors, np.int32),
            others=(),
        )
        self.backend.plan(cross_batch)
        return cross_batch
