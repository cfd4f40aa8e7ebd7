"""The operations in plain torch, on any device: what every kernel is compared with."""

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.ops import HeadNorms


class Reference:
    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def rotate_and_write(
        self,
        qkv: Tensor,
        table: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        heads: int,
        norms: HeadNorms | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        kv_heads, head_dim = k_cache.shape[2:]
        q, k, v = qkv.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = self.norm(q, norms.q, norms.eps), self.norm(k, norms.k, norms.eps)
        cos, sin = table[positions][:, None].chunk(2, -1)
        write(rotate(k, cos, sin), k_cache, slots, k_scale)
        write(v, v_cache, slots, v_scale)
        return rotate(q, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, head_dim] turned by the angles of [T, 1, rotary_dim / 2]."""
    dim = 2 * cos.shape[-1]
    left, right = x[..., :dim].chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., dim:]), -1)


def write(x: Tensor, cache: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """[T, kv_heads, head_dim] into the slots of one cache."""
    if cache.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(cache.dtype).max
        x = (x.float() / scale).clamp(-limit, limit)
    written = slots >= 0
    cache.view(-1, *cache.shape[2:])[slots[written]] = x[written].to(cache.dtype)
