"""`Ops` in plain torch on any device, the reference for every kernel."""

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.checkpoint.facts import Routing
from quire.kernels.ops import HeadEntry
from quire.kernels.reference.activations import ACTIVATIONS, gated
from quire.kernels.reference.moe import route


class Reference:
    """`Ops` in plain torch, on any device."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * wide.to(weight.dtype)).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm(residual.add_(x), weight, eps)

    def norm_parts(self, x: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
        start = 0
        for weight in weights:
            part = x[:, start : start + len(weight)]
            part.copy_(self.norm(part, weight, eps))
            start += len(weight)
        return x

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        return self.layer_norm(residual.add_(x), weight, bias, eps)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        return gated(gate_up, activation)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return ACTIVATIONS[activation](x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        return x.copy_(x * factors)

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        return x.mul_(factors)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def weigh(self, x: Tensor, gate: Tensor) -> Tensor:
        return x.mul_(gate.sigmoid())

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return route(logits, routing, bias)

    def rotate_and_write(self, qkv: Tensor, entry: HeadEntry) -> Tensor:
        kv_heads, head_dim = entry.k_cache.shape[2:]
        q, k, v = qkv.view(len(qkv), -1, head_dim).split([entry.heads, kv_heads, kv_heads], dim=1)
        if (norms := entry.norms) is not None:
            q, k = self.norm(q, norms.q, norms.eps), self.norm(k, norms.k, norms.eps)
        cos, sin = entry.table[entry.positions][:, None].chunk(2, -1)
        write(rotate(k, cos, sin), entry.k_cache, entry.slots, entry.k_scale)
        write(v, entry.v_cache, entry.slots, entry.v_scale)
        return rotate(q, cos, sin)

    def assigned(self, tokens: Tensor, num_slots: int) -> Tensor:
        return tokens

    def lora(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Tensor
    ) -> Tensor:
        return self.lora_expand(out, self.lora_shrink(x, a, tokens), b, part_sizes, tokens)

    def lora_shrink(self, x: Tensor, a: Tensor, tokens: Tensor) -> Tensor:
        ranks = x.new_zeros(len(x), a.shape[1], dtype=torch.float32)
        for slot in range(len(a)):
            ranks += (x.float() @ a[slot].float().t()) * (tokens == slot)[:, None]
        return ranks

    def lora_expand(
        self, out: Tensor, ranks: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Tensor
    ) -> Tensor:
        for slot in range(len(b)):
            masked = (ranks * (tokens == slot)[:, None]).chunk(len(part_sizes), 1)
            parts = zip(masked, b[slot].float().split(part_sizes), strict=True)
            out += torch.cat([part @ outputs.t() for part, outputs in parts], 1)
        return out

    def lora_rows(self, out: Tensor, ids: Tensor, a: Tensor, b: Tensor, tokens: Tensor) -> Tensor:
        for slot in range(len(a)):
            ranks = a[slot][ids].float() * (tokens == slot)[:, None]
            out += ranks @ b[slot].float().t()
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by the angles [T, 1, rotary_dim / 2]."""
    dim = 2 * cos.shape[-1]
    left, right = x[..., :dim].chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., dim:]), -1)


def write(x: Tensor, cache: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """Write x [T, kv_heads, head_dim] to the slots of one cache."""
    if cache.dtype.itemsize == 1:
        limit = torch.finfo(cache.dtype).max
        x = (x.float() / scale).clamp(-limit, limit)
    written = slots >= 0
    # torch does not support indexing of 8-bit floats on every device.
    into, x = cache.view(-1, *cache.shape[2:]), x[written].to(cache.dtype)
    if cache.dtype.itemsize == 1:
        into, x = into.view(torch.uint8), x.view(torch.uint8)
    into[slots[written]] = x
