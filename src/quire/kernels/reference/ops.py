"""The operations of a model between its GEMMs: their inputs, and the reference in torch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.checkpoint.facts import Routing
from quire.checkpoint.layout import SCALE_BYTES
from quire.kernels.reference.activations import ACTIVATIONS, gated
from quire.kernels.reference.moe import route

INT8_LIMIT = 127.0
"""Largest code of an int8 cache, which stands for the absolute maximum of a head."""
_LEAST = 1e-30
"""Least absolute maximum of a head in an int8 cache, so that scales are not 0."""


class HeadNorms(NamedTuple):
    """RMS norm weights of query and key heads, over the head size."""

    q: Tensor
    k: Tensor
    eps: float


class HeadEntry(NamedTuple):
    """Inputs of `Ops.rotate_and_write`: RoPE table and positions, KV cache and slots, norms and scales."""

    heads: int
    table: Tensor
    """[max_len, rotary_dim], cosines then sines; the first rotary_dim dimensions of a head are rotated, the
    left half with the right half"""
    positions: Tensor
    """[T], rows of the table"""
    slots: Tensor
    """[T]; nothing is written for a slot below 0"""
    k_cache: Tensor
    """[num_blocks, block_size, kv_heads, head_dim]; an fp8 cache holds values divided by its scale, and an
    int8 cache has `SCALE_BYTES` more in each head, for the scale of the head"""
    v_cache: Tensor
    norms: HeadNorms | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


class LoRAHeads(NamedTuple):
    """LoRA weights of a linear layer and the slots of its tokens; see `Ops.lora`."""

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    """Number of outputs of each part."""
    tokens: Any
    """Result of `Ops.assigned` for the slots of the tokens."""


class Reference:
    """Operations that a model computes between its GEMMs, in plain torch on any device."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Return rows `ids` ([T] int64) of `table` [V, n]: [T, n]."""
        return F.embedding(ids, table)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm over the last dimension, computed in float32. It is rounded before the weight
        is applied, as in transformers; a float32 weight is applied before rounding."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * wide.to(weight.dtype)).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place and return the RMS norm of the sum."""
        return self.norm(residual.add_(x), weight, eps)

    def norm_parts(self, x: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
        """Apply RMS norm in place to consecutive parts of each row of x: one part per weight, of its size."""
        start = 0
        for weight in weights:
            part = x[:, start : start + len(weight)]
            part.copy_(self.norm(part, weight, eps))
            start += len(weight)
        return x

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm over the last dimension, computed in float32 and rounded at the end."""
        wide_bias = None if bias is None else bias.float()
        return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Add x to `residual` in place and return the layer norm of the sum."""
        return self.layer_norm(residual.add_(x), weight, bias, eps)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up [T, n] for `gate_up` [T, 2n], gate and up side by side; activations have the
        names of `kernels/reference/activations.py`."""
        return gated(gate_up, activation)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return act(x)."""
        return ACTIVATIONS[activation](x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply x by `factor` in place."""
        return x.mul_(factor)

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply each row of x by its factor ([T, 1] float32) in place."""
        return x.copy_(x * factors)

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply each column of x by its factor ([n]) in place."""
        return x.mul_(factors)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Compute cap * tanh(x / cap) in place."""
        return x.div_(cap).tanh_().mul_(cap)

    def weigh(self, x: Tensor, gate: Tensor) -> Tensor:
        """Compute x * sigmoid(gate) in place; the gate has the shape of x, or one value per row."""
        return x.mul_(gate.sigmoid())

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add y to x in place."""
        return x.add_(y)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the expert ids of each token and their weights; see `kernels/reference/moe.py`."""
        return route(logits, routing, bias)

    def rotate_and_write(self, qkv: Tensor, entry: HeadEntry) -> Tensor:
        """Apply norms and RoPE to queries and keys, write keys and values to their slots, and return the
        queries.

        [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads, head_dim].
        """
        kv_heads, head_dim = entry.k_cache.shape[2], head_size(entry.k_cache)
        q, k, v = qkv.view(len(qkv), -1, head_dim).split([entry.heads, kv_heads, kv_heads], dim=1)
        if (norms := entry.norms) is not None:
            q, k = self.norm(q, norms.q, norms.eps), self.norm(k, norms.k, norms.eps)
        cos, sin = entry.table[entry.positions][:, None].chunk(2, -1)
        write(rotate(k, cos, sin), entry.k_cache, entry.slots, entry.k_scale)
        write(v, entry.v_cache, entry.slots, entry.v_scale)
        return rotate(q, cos, sin)

    def assigned(self, tokens: Tensor, num_slots: int) -> Any:
        """Return the `tokens` argument of the lora methods for a step's slots, [T] int32, -1 for tokens
        without an adapter. It is built once per step."""
        return tokens

    def lora(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Any
    ) -> Tensor:
        """Add the LoRA outputs for x [T, size_in] to `out` [T, sum of part_sizes] in place. `tokens` is the
        result of `assigned`. For each slot, `a` [slots, parts * rank, size_in] shrinks x to the ranks of each
        part. `b` [slots, sum of part_sizes, rank] expands the ranks to the part's outputs. All is computed in
        float32. The weights of one slot are contiguous; the distance between slots is arbitrary."""
        return self.lora_expand(out, self.lora_shrink(x, a, tokens), b, part_sizes, tokens)

    def lora_rows(self, out: Tensor, ids: Tensor, a: Tensor, b: Tensor, tokens: Any) -> Tensor:
        """Add the LoRA outputs of an embedding to `out` [T, n] in place: `a` [slots, vocab, rank] is indexed
        by the [T] int64 ids, and `b` is [slots, n, rank]."""
        for slot in range(len(a)):
            ranks = a[slot][ids].float() * (tokens == slot)[:, None]
            out += ranks @ b[slot].float().t()
        return out

    def lora_shrink(self, x: Tensor, a: Tensor, tokens: Any) -> Tensor:
        """Return x shrunk by `a`, the first half of `lora`: [T, parts * rank]. Rows without an adapter are
        undefined."""
        ranks = x.new_zeros(len(x), a.shape[1], dtype=torch.float32)
        for slot in range(len(a)):
            ranks += (x.float() @ a[slot].float().t()) * (tokens == slot)[:, None]
        return ranks

    def lora_expand(
        self, out: Tensor, ranks: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Any
    ) -> Tensor:
        """Add `ranks` [T, parts * rank] expanded by `b`, the second half of `lora`, to `out` in place."""
        for slot in range(len(b)):
            masked = (ranks * (tokens == slot)[:, None]).chunk(len(part_sizes), 1)
            parts = zip(masked, b[slot].float().split(part_sizes), strict=True)
            out += torch.cat([part @ outputs.t() for part, outputs in parts], 1)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by the angles [T, 1, rotary_dim / 2]."""
    dim = 2 * cos.shape[-1]
    left, right = x[..., :dim].chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., dim:]), -1)


def head_size(cache: Tensor) -> int:
    """Return the number of elements of a head of a KV cache."""
    return cache.shape[3] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def quantize_heads(x: Tensor) -> Tensor:
    """Return x [T, kv_heads, head_dim] as int8 [T, kv_heads, head_dim + SCALE_BYTES]: codes from -127 to 127
    and the bytes of a float32 scale. NaN and infinity make the scale, and so the whole head, NaN or
    infinite."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / INT8_LIMIT
    codes = (wide / scales).nan_to_num(0.0).round().to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def dequantize_heads(stored: Tensor) -> Tensor:
    """Return the float32 values of heads as `quantize_heads` stores them."""
    codes, scales = stored.split([stored.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    values: Tensor = codes.float() * scales.contiguous().view(torch.float32)
    return values


def write(x: Tensor, cache: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """Write x [T, kv_heads, head_dim] to the slots of one cache."""
    if cache.dtype == torch.int8:
        x = quantize_heads(x)
    elif cache.dtype.itemsize == 1:
        limit = torch.finfo(cache.dtype).max
        x = (x.float() / scale).clamp(-limit, limit)
    written = slots >= 0
    # torch does not support indexing of 8-bit floats on every device.
    into, x = cache.view(-1, *cache.shape[2:]), x[written].to(cache.dtype)
    if cache.dtype.itemsize == 1:
        into, x = into.view(torch.uint8), x.view(torch.uint8)
    into[slots[written]] = x
