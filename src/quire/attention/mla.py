"""Multi-head latent attention (MLA) over the paged cache: the protocol, the torch reference, the choice.

The cache of a layer is [num_blocks, block_size, rank + rope_dim]. It holds the latent of each token, which
kv_b_proj expands to the keys and values of all heads, and one RoPE key shared by all heads. Keys need not be
expanded: q . (W k) = (q W) . k. A query is multiplied by W instead (`absorb`), attends to the latents, and
the weighted sum of latents is expanded to values (`release`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.attention.torch_sdpa import TorchSDPA
from quire.kernels.cpu import native
from quire.kernels.library_matmul import bmm
from quire.kernels.ops import Ops
from quire.kernels.reference.ops import Reference, write
from quire.registry import LazyTable

IMPLEMENTATIONS = LazyTable(
    "latent attention",
    {
        "cpu": "quire.attention.cpu_mla:CPUMLA",
        "reference": "quire.attention.mla:TorchMLA",
        "triton": "quire.attention.triton_mla:TritonMLA",
    },
)


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Latent attention parameters of one layer."""

    heads: int
    rank: int
    """Size of a latent (kv_lora_rank)."""
    nope_dim: int
    """Size of the part of a query that is not rotated; it comes first."""
    rope_dim: int
    v_dim: int
    scale: float
    """Factor of the attention scores."""
    neighbours: bool = True
    """Whether RoPE is interleaved: dimensions 2i and 2i + 1 are a pair. Otherwise it pairs the two halves."""
    k_scale: float = 1.0
    """Scale of an 8-bit cache: the cache holds values divided by this scale."""

    @property
    def width(self) -> int:
        """Return the number of cache elements of a token."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class MLAEntry(NamedTuple):
    """Inputs of a cache write: the norm of latents, the RoPE table and positions, the slots and the cache."""

    norm: Tensor
    eps: float
    table: Tensor
    """[max_len, rope_dim], cosines then sines"""
    positions: Tensor
    slots: Tensor
    """[T]; a token with a negative slot is not written"""
    cache: Tensor


class MLALoRA(NamedTuple):
    """LoRA factors of kv_b_proj for all adapter slots, and the slot of each token."""

    a: Tensor
    """[slots, adapter's rank, rank]"""
    b: Tensor
    """[slots, heads * (nope_dim + v_dim), adapter's rank]"""
    transposed: tuple[Tensor, Tensor] | None
    """[slots, heads, adapter's rank, nope_dim] and [slots, rank, adapter's rank]: the factors transposed, for
    kernels that need contiguous inputs."""
    slots: Tensor
    """[T] int32, adapter slot of each token, -1 for none"""
    ops: Ops

    def of(self, tokens: Tensor) -> "MLALoRA":
        """Return the factors with the adapter slots of the tokens with the indices `tokens` alone."""
        return self._replace(slots=self.slots[tokens])

    def by_heads(self, spec: MLASpec) -> tuple[Tensor, Tensor]:
        """Split `b` into its key and value parts: [slots, heads, nope_dim or v_dim, adapter's rank]."""
        by_heads = self.b.unflatten(1, (-1, spec.nope_dim + spec.v_dim))
        keys, values = by_heads.split([spec.nope_dim, spec.v_dim], 2)
        return keys, values

    def of_heads(self, heads: slice, spec: MLASpec) -> "MLALoRA":
        """Return the same factors for some heads only."""
        outputs = spec.nope_dim + spec.v_dim
        return self._replace(b=self.b[:, heads.start * outputs : heads.stop * outputs])

    def select(self, ranks: Tensor) -> Tensor:
        """Return `ranks` [T, heads, slots, adapter's rank], the projections of each token by the adapters of
        all slots, with zeros in all slots but that of the token's own adapter."""
        all_slots = torch.arange(len(self.a), device=ranks.device)
        return torch.where((self.slots[:, None] == all_slots)[:, None, :, None], ranks, 0.0)

    def add(self, kv: Tensor, latents: Tensor, first: int, owners: Tensor) -> None:
        """Add the LoRA outputs for `latents` [keys, rank] to `kv` [keys, outputs], which has the outputs of
        kv_b_proj from index `first` on. `owners` [keys] is for each key the index in the batch of some token
        of the key's sequence; all tokens of a sequence have the same adapter slot."""
        b, size = self.b[:, first : first + kv.shape[1]], kv.shape[1]
        assigned = self.ops.assigned(self.slots[owners], len(self.a))
        self.ops.lora(kv, latents, self.a, b, (size,), assigned)


def choose(device: torch.device, dtype: torch.dtype) -> "MLABackend":
    """Return the fastest implementation for models of `dtype` on `device`."""
    name = "triton" if device.type == "cuda" else "reference"
    if native.serves(device, dtype):
        name = "cpu"
    latent: MLABackend = IMPLEMENTATIONS[name]()
    return latent


def absorb(q: Tensor, weight: Tensor, spec: MLASpec, adapted: MLALoRA | None = None) -> Tensor:
    """Project the queries [T, heads, query_dim] without their RoPE part into the latent space, [T, heads,
    rank], by the key part of `weight` (kv_b_proj)."""
    plain = q[..., : spec.nope_dim]
    out = bmm(plain.transpose(0, 1), weight[:, : spec.nope_dim]).transpose(0, 1)
    if adapted is None:
        return out
    keys, _ = adapted.by_heads(spec)
    by_head = keys.to(q.dtype).permute(1, 2, 0, 3).flatten(2)
    ranks = bmm(plain.transpose(0, 1), by_head).transpose(0, 1).unflatten(2, (-1, keys.shape[3]))
    rows, down = adapted.select(ranks).reshape(1, -1, by_head.shape[2]), adapted.a.to(q.dtype).flatten(0, 1)
    return out + bmm(rows, down[None]).view(out.shape)


def release(mixed: Tensor, weight: Tensor, spec: MLASpec, adapted: MLALoRA | None = None) -> Tensor:
    """Expand attention outputs in the latent space, `mixed` [T, heads, rank], to values [T, heads, v_dim] by
    the value part of `weight` (kv_b_proj)."""
    out = mixed.new_empty(len(mixed), mixed.shape[1], spec.v_dim)
    bmm(mixed.transpose(0, 1), weight[:, spec.nope_dim :].transpose(1, 2), out=out.transpose(0, 1))
    if adapted is None:
        return out
    _, values = adapted.by_heads(spec)
    down = adapted.a.to(mixed.dtype).flatten(0, 1)
    ranks = bmm(mixed.reshape(1, -1, mixed.shape[2]), down.t()[None])
    rows = adapted.select(ranks.view(*mixed.shape[:2], *adapted.a.shape[:2])).flatten(2)
    by_head = values.to(mixed.dtype).permute(1, 0, 3, 2).flatten(1, 2)
    return out.add_(bmm(rows.transpose(0, 1), by_head).transpose(0, 1))


class TorchMLA:
    """MLA in plain torch, on any device: the reference for the kernels."""

    needs_transposed_lora = False
    """Whether this implementation needs `MLALoRA.transposed`."""

    def enter(self, q: Tensor, kv: Tensor, entry: MLAEntry, spec: MLASpec) -> None:
        """Apply RoPE to the queries [T, heads, query_dim] in place. Normalize the latents and apply RoPE to
        the keys of `kv` [T, width], and write both to the cache slots of `entry`."""
        cos, sin = entry.table[entry.positions][:, None].chunk(2, -1)
        latent, key = kv.split([spec.rank, spec.rope_dim], -1)
        normed = Reference().norm(latent, entry.norm, entry.eps)
        rotated = rotate(key[:, None], cos, sin, spec.neighbours)[:, 0]
        write(torch.cat((normed, rotated), -1), entry.cache, entry.slots, spec.k_scale)
        q[..., spec.nope_dim :] = rotate(q[..., spec.nope_dim :], cos, sin, spec.neighbours)

    def attend(
        self,
        q: Tensor,
        weight: Tensor,
        cache: Tensor,
        batch: Batch,
        spec: MLASpec,
        adapted: MLALoRA | None = None,
    ) -> Tensor:
        """Return the attention output [T, heads, v_dim] of `q` [T, heads, query_dim] over the cache. `weight`
        [heads, nope_dim + v_dim, rank] is kv_b_proj."""
        queries = torch.cat((absorb(q, weight, spec, adapted), q[..., spec.nope_dim :]), -1)
        mixed = self.mix(queries, cache[:, :, None], batch, spec)[..., : spec.rank]
        return release(mixed, weight, spec, adapted)

    def mix(self, queries: Tensor, cache: Tensor, batch: Batch, spec: MLASpec) -> Tensor:
        """Return the attention output [T, heads, width] of latent-space queries of this shape over `cache`, a
        single KV head whose keys and values are the same."""
        batch, backend = replace(batch, others=()), TorchSDPA()
        backend.plan(batch)
        mqa = AttentionSpec(spec.heads, 1, spec.width, queries.dtype, scale=spec.scale)
        mqa = replace(mqa, k_scale=spec.k_scale, v_scale=spec.k_scale)
        return backend.forward(queries, cache, cache, batch, mqa)


MLABackend = TorchMLA
"""Interface of every MLA implementation: the methods of the torch reference."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Apply RoPE to x [T, heads, rope_dim] with cosines and sines [T, 1, rope_dim / 2]; for `neighbours` see
    `MLASpec`."""
    if not neighbours:
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
    left, right = x[..., 0::2], x[..., 1::2]
    return torch.stack((left * cos - right * sin, right * cos + left * sin), -1).flatten(-2)
