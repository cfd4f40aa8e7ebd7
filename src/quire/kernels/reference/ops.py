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
    """RMS norm weights [head_dim] of query heads and of key heads."""

    q: Tensor
    k: Tensor
    eps: float


class HeadEntry(NamedTuple):
    """Inputs of `Ops.rotate_and_write`: RoPE table and positions, KV cache and slots, norms and scales."""

    heads: int
    """Number of query heads."""
    table: Tensor
    """[max_len, rotary_dim], cosines then sines; the first rotary_dim dimensions of a head are rotated, the
    left half with the right half"""
    positions: Tensor
    """[T], position of each token, which is its row of the table"""
    slots: Tensor
    """[T], cache slot of each token; tokens with a slot below 0 are not written"""
    k_cache: Tensor
    """[num_blocks, block_size, kv_heads, head_dim], like `v_cache`. Values of an fp8 cache are divided by
    `k_scale` or `v_scale`. A head of an int8 cache has `SCALE_BYTES` more bytes, for its scale."""
    v_cache: Tensor
    norms: HeadNorms | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


class LoRAHeads(NamedTuple):
    """LoRA weights of a linear layer and the adapter slots of its tokens; see `Ops.lora`."""

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    """Number of outputs of each part of the layer, such as queries, keys and values."""
    tokens: Any
    """Result of `Ops.assigned` for the adapter slots of the tokens."""


class Reference:
    """Operations that a model computes between its GEMMs, in plain torch on any device."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Return the rows `ids` ([T] int64) of the embedding `table` [V, n] as [T, n]."""
        return F.embedding(ids, table)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of x over the last dimension, computed in float32. As in transformers, it is
        rounded to the dtype of the weight before the weight is applied, and afterwards to the dtype of x."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * wide.to(weight.dtype)).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x [T, n] to `residual` [T, n] in place and return the RMS norm of the sum."""
        return self.norm(residual.add_(x), weight, eps)

    def norm_parts(self, x: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
        """Divide each row of x [T, n] into consecutive parts, one per weight and as long as the weight. Apply
        RMS norm to each part in place."""
        start = 0
        for weight in weights:
            part = x[:, start : start + len(weight)]
            part.copy_(self.norm(part, weight, eps))
            start += len(weight)
        return x

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm of x over the last dimension, computed in float32 and rounded at the end."""
        wide_bias = None if bias is None else bias.float()
        return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Add x [T, n] to `residual` [T, n] in place and return the layer norm of the sum."""
        return self.layer_norm(residual.add_(x), weight, bias, eps)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up [T, n] for `gate_up` [T, 2n], the gate and up projections side by side.
        Activations have the names of `kernels/reference/activations.py`."""
        return gated(gate_up, activation)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation of x [T, n]."""
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
        """Return the expert ids [T, per_token] of each token and their weights, from router logits [T,
        experts]; see `kernels/reference/moe.py`."""
        return route(logits, routing, bias)

    def rotate_and_write(self, qkv: Tensor, entry: HeadEntry) -> Tensor:
        """Apply norms and RoPE to queries and keys, write keys and values to their cache slots, and return
        the queries [T, heads, head_dim].

        `qkv` [T, (heads + 2 * kv_heads) * head_dim] has queries, keys and values side by side.
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
        """Return the `tokens` argument of the LoRA methods, which is built once per step. The argument
        `tokens` of this method is [T] int32: the adapter slot of each token, -1 for none."""
        return tokens

    def lora(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Any
    ) -> Tensor:
        """Add the LoRA outputs for x [T, size_in] to `out` [T, sum of part_sizes] in place. `tokens` is the
        result of `assigned`. In the adapter slot of a token, `a` [slots, parts * rank, size_in] shrinks x to
        the ranks of each part, and `b` [slots, sum of part_sizes, rank] expands these to the outputs of the
        part. All is computed in float32. The weights of a slot are contiguous, with any stride of slots."""
        return self.lora_expand(out, self.lora_shrink(x, a, tokens), b, part_sizes, tokens)

    def lora_rows(self, out: Tensor, ids: Tensor, a: Tensor, b: Tensor, tokens: Any) -> Tensor:
        """Add the LoRA outputs of an embedding layer to `out` [T, n] in place. The ranks of a token are row
        ids[t] of its slot in `a` [slots, vocab, rank]; `b` is [slots, n, rank]. `ids` is [T] int64."""
        for slot in range(len(a)):
            ranks = a[slot][ids].float() * (tokens == slot)[:, None]
            out += ranks @ b[slot].float().t()
        return out

    def lora_shrink(self, x: Tensor, a: Tensor, tokens: Any) -> Tensor:
        """Compute the first half of `lora`: return x A^T [T, parts * rank] for A in the slot of each token.
        Rows of tokens without an adapter are undefined."""
        ranks = x.new_zeros(len(x), a.shape[1], dtype=torch.float32)
        for slot in range(len(a)):
            ranks += (x.float() @ a[slot].float().t()) * (tokens == slot)[:, None]
        return ranks

    def lora_expand(
        self, out: Tensor, ranks: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Any
    ) -> Tensor:
        """Compute the second half of `lora`: expand `ranks` [T, parts * rank] by `b` and add them to
        `out`."""
        for slot in range(len(b)):
            masked = (ranks * (tokens == slot)[:, None]).chunk(len(part_sizes), 1)
            parts = zip(masked, b[slot].float().split(part_sizes), strict=True)
            out += torch.cat([part @ outputs.t() for part, outputs in parts], 1)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the first rotary_dim dimensions of x [T, heads, head_dim], with the cosines and sines of
    the angles, each [T, 1, rotary_dim / 2]."""
    dim = 2 * cos.shape[-1]
    left, right = x[..., :dim].chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., dim:]), -1)


def head_size(cache: Tensor) -> int:
    """Return the head size of a KV cache; heads of an int8 cache [..., head_dim + SCALE_BYTES] are longer."""
    return cache.shape[3] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def quantize_heads(x: Tensor) -> Tensor:
    """Quantize x [T, kv_heads, head_dim] to int8 [T, kv_heads, head_dim + SCALE_BYTES]: codes from -127 to
    127, then the bytes of a float32 scale. With NaN or infinity in a head, its scale is NaN or infinite."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / INT8_LIMIT
    codes = (wide / scales).nan_to_num(0.0).round().to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def dequantize_heads(stored: Tensor) -> Tensor:
    """Return the float32 values of heads [..., head_dim + SCALE_BYTES] from `quantize_heads`."""
    codes, scales = stored.split([stored.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    values: Tensor = codes.float() * scales.contiguous().view(torch.float32)
    return values


def write(x: Tensor, cache: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """Write x [T, kv_heads, head_dim] to `slots` [T] of a key or value cache; skip slots below 0."""
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
