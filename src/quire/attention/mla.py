"""Latent attention over the paged cache: what it is, the reference in torch, and who serves which device.

The cache of a layer is [num_blocks, block_size, rank + rope_dim]: of each token the latent, from which the
keys and values of all heads follow by one product, and a key that all heads share and that turns with the
position. Keys need not be multiplied out: q . (W k) = (q W) . k, so that a query, multiplied instead, meets
the latents themselves (`absorb`), and what it takes of them is multiplied to values after (`release`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.attention.torch_sdpa import TorchSDPA
from quire.kernels.cpu import native
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
    """The latent attention of one layer."""

    heads: int
    rank: int
    """The size of a latent."""
    nope_dim: int
    """How many numbers of a query do not turn; they come first."""
    rope_dim: int
    v_dim: int
    scale: float
    """Factor on the scores."""
    neighbours: bool = True
    """Numbers 2i and 2i + 1 turn as a pair; otherwise half against half."""
    k_scale: float = 1.0
    """An 8-bit cache holds numbers divided by this."""

    @property
    def width(self) -> int:
        """What the cache holds of a token."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class MLAEntry(NamedTuple):
    """How tokens enter the attention of a layer: the latent's norm, the angles, the slots."""

    norm: Tensor
    eps: float
    table: Tensor
    """[max_len, rope_dim], cosines then sines"""
    positions: Tensor
    slots: Tensor
    """[T]; below 0 nothing is written"""
    cache: Tensor


class MLALoRA(NamedTuple):
    """What adapters add to the weight of a layer: of each token's own slot, `b` of `a`."""

    a: Tensor
    """[slots, adapter's rank, rank]"""
    b: Tensor
    """[slots, heads * (nope_dim + v_dim), adapter's rank]"""
    turned: tuple[Tensor, Tensor] | None
    """[slots, heads, adapter's rank, nope_dim] and [slots, rank, adapter's rank], the same the other way
    round, for kernels of which an input's numbers lie beside each other."""
    tokens: Tensor
    """[T] int32; -1: none"""
    ops: Ops

    def of(self, tokens: Tensor) -> "MLALoRA":
        """The same for some of the tokens."""
        return self._replace(tokens=self.tokens[tokens])

    def by_heads(self, spec: MLASpec) -> tuple[Tensor, Tensor]:
        """What makes keys, and what makes values: [slots, heads, nope_dim or v_dim, adapter's rank]."""
        keys, values = self.b.unflatten(1, (spec.heads, -1)).split([spec.nope_dim, spec.v_dim], 2)
        return keys, values

    def own(self, ranks: Tensor) -> Tensor:
        """Of [T, heads, slots, adapter's rank] those of each token's own slot; zeros for the others."""
        slots = torch.arange(len(self.a), device=ranks.device)
        return torch.where((self.tokens[:, None] == slots)[:, None, :, None], ranks, 0.0)

    def add(self, kv: Tensor, latents: Tensor, first: int, owners: Tensor) -> None:
        """To [keys, outputs] of the weight, those from `first` on, what adapters make of the latents; the
        token `owners` [keys] is of each one's sequence."""
        b, size = self.b[:, first : first + kv.shape[1]], kv.shape[1]
        slots = self.ops.assigned(self.tokens[owners], len(self.a))
        self.ops.lora(kv, latents, self.a, b, (size,), slots)


class MLABackend(Protocol):
    """Latent attention on some device."""

    turns: bool
    """Whether it needs what adapters add the other way round, too."""

    def enter(self, q: Tensor, kv: Tensor, entry: MLAEntry, spec: MLASpec) -> None:
        """[T, heads, query_dim] queries turn in place; [T, width] new latents and keys, the latents not
        normed and the keys not turned yet, are written to their slots."""
        ...

    def attend(
        self,
        q: Tensor,
        weight: Tensor,
        cache: Tensor,
        batch: Batch,
        spec: MLASpec,
        adapted: MLALoRA | None = None,
    ) -> Tensor:
        """[T, heads, v_dim]. `weight` [heads, nope_dim + v_dim, rank] makes keys and values of a latent."""
        ...


def choose(device: torch.device, dtype: torch.dtype) -> MLABackend:
    """The fastest implementation for models of `dtype` on `device`."""
    name = "triton" if device.type == "cuda" else "reference"
    if native.serves(device, dtype):
        name = "cpu"
    latent: MLABackend = IMPLEMENTATIONS[name]()
    return latent


def absorb(q: Tensor, weight: Tensor, spec: MLASpec, adapted: MLALoRA | None = None) -> Tensor:
    """What [T, heads, query_dim] queries look for in latents: [T, heads, rank]."""
    plain = q[..., : spec.nope_dim]
    out = torch.bmm(plain.transpose(0, 1), weight[:, : spec.nope_dim]).transpose(0, 1)
    if adapted is None:
        return out
    keys, _ = adapted.by_heads(spec)
    ranks = adapted.own(torch.einsum("thn,shnr->thsr", plain, keys.to(q.dtype)))
    return out + torch.einsum("thsr,srl->thl", ranks, adapted.a.to(q.dtype))


def release(seen: Tensor, weight: Tensor, spec: MLASpec, adapted: MLALoRA | None = None) -> Tensor:
    """[T, heads, rank] sums of latents -> [T, heads, v_dim] of values."""
    out = seen.new_empty(len(seen), spec.heads, spec.v_dim)
    torch.bmm(seen.transpose(0, 1), weight[:, spec.nope_dim :].transpose(1, 2), out=out.transpose(0, 1))
    if adapted is None:
        return out
    _, values = adapted.by_heads(spec)
    ranks = adapted.own(torch.einsum("thl,srl->thsr", seen, adapted.a.to(seen.dtype)))
    return out.add_(torch.einsum("thsr,shvr->thv", ranks, values.to(seen.dtype)))


class TorchMLA:
    """Latent attention in plain torch, on any device: the reference."""

    turns = False

    def enter(self, q: Tensor, kv: Tensor, entry: MLAEntry, spec: MLASpec) -> None:
        cos, sin = entry.table[entry.positions][:, None].chunk(2, -1)
        latent, key = kv.split([spec.rank, spec.rope_dim], -1)
        normed = Reference().norm(latent, entry.norm, entry.eps)
        turned = turn(key[:, None], cos, sin, spec.neighbours)[:, 0]
        write(torch.cat((normed, turned), -1), entry.cache, entry.slots, spec.k_scale)
        q[..., spec.nope_dim :] = turn(q[..., spec.nope_dim :], cos, sin, spec.neighbours)

    def attend(
        self,
        q: Tensor,
        weight: Tensor,
        cache: Tensor,
        batch: Batch,
        spec: MLASpec,
        adapted: MLALoRA | None = None,
    ) -> Tensor:
        queries = torch.cat((absorb(q, weight, spec, adapted), q[..., spec.nope_dim :]), -1)
        seen = self.mix(queries, cache[:, :, None], batch, spec)[..., : spec.rank]
        return release(seen, weight, spec, adapted)

    def mix(self, queries: Tensor, cache: Tensor, batch: Batch, spec: MLASpec) -> Tensor:
        """All heads of [T, heads, width] queries against one head, whose keys are its values too."""
        own, backend = replace(batch, others=()), TorchSDPA()
        backend.plan(own)
        one = AttentionSpec(spec.heads, 1, spec.width, queries.dtype, scale=spec.scale)
        one = replace(one, k_scale=spec.k_scale, v_scale=spec.k_scale)
        return backend.forward(queries, cache, cache, own, one)


def turn(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """[T, heads, rope_dim] by the angles of [T, 1, rope_dim / 2]."""
    if not neighbours:
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
    left, right = x[..., 0::2], x[..., 1::2]
    return torch.stack((left * cos - right * sin, right * cos + left * sin), -1).flatten(-2)
