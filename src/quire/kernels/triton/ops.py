"""Operations between a model's GEMMs on a GPU, one kernel each.

The reference is `kernels/reference/ops.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.checkpoint.facts import Routing
from quire.kernels import batch_invariant
from quire.kernels.ops import HeadEntry, LoRAHeads
from quire.kernels.reference.ops import INT8_LIMIT, head_size
from quire.kernels.triton.activations import activated, gated, tanh
from quire.kernels.triton.attention import head_step
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.lora import LoRARows, add, add_rows, assign, expand, shrink
from quire.kernels.triton.moe_topk import route

_GATHERED = 2048
"""Elements per program of elementwise and gather kernels."""
_FEW_TOKENS = 64
"""Maximum tokens for which a program processes only a few heads of a token, to have enough programs."""
_NO_FRACTION = tl.constexpr(12582912.0)
"""1.5 * 2**23: float32 numbers near it are integers."""
_LEAST = tl.constexpr(1e-30)
"""Least absolute maximum of a head in an int8 cache, equal to that of the reference."""


@triton.jit
def _embed(
    out: tl.tensor, ids: tl.tensor, table: tl.tensor, size: tl.tensor,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow(OVERLAP)
    token, id = tl.program_id(0).to(tl.int64), tl.load(ids + tl.program_id(0)).to(tl.int64)
    tl.store(out + token * size + at, tl.load(table + id * size + at, mask=at < size), mask=at < size)


@triton.jit
def _norm(
    out: tl.tensor, x: tl.tensor, residual: tl.tensor, weight: tl.tensor, bias: tl.tensor, size: tl.tensor,
    stride: tl.tensor, eps: tl.tensor,
    ADD: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the RMS norm of one row, or if `CENTRED` its layer norm. Grid: (rows,)."""
    at = tl.arange(0, BLOCK)
    exists = at < size
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + at, mask=exists, other=0.0).to(tl.float32)
    offset = 0.0
    if bias is not None:
        offset = tl.load(bias + at, mask=exists, other=0.0).to(tl.float32)
    follow(OVERLAP)
    values = tl.load(x + row * stride + at, mask=exists, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * size + at, mask=exists, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * size + at, rounded, mask=exists)
        values = rounded.to(tl.float32)
    if CENTRED:
        values = tl.where(exists, values - tl.sum(values, 0) / size, 0.0)
    mean = tl.sum(values * values, 0) / size
    values = values * tl.rsqrt(mean + eps)
    if not CENTRED:
        values = values.to(weight.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, (values * scale + offset).to(out.dtype.element_ty), mask=exists)


@triton.jit
def _norm_part(
    x: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, q_size: tl.tensor, k_size: tl.tensor,
    stride: tl.tensor, eps: tl.tensor,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the RMS norm of the first or second part of one row in place. Grid: (rows, parts)."""
    second = tl.program_id(1)
    size, at = tl.where(second == 0, q_size, k_size), tl.arange(0, BLOCK)
    scale = tl.load(q_weight + at, mask=at < tl.where(second == 0, q_size, 0), other=0.0).to(tl.float32)
    scale += tl.load(k_weight + at, mask=at < tl.where(second == 0, 0, k_size), other=0.0).to(tl.float32)
    place = x + tl.program_id(0).to(tl.int64) * stride + second * q_size + at
    follow(OVERLAP)
    values = tl.load(place, mask=at < size, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    values = values.to(q_weight.dtype.element_ty).to(tl.float32) * scale
    tl.store(place, values.to(x.dtype.element_ty), mask=at < size)


@triton.jit
def _elementwise(
    out: tl.tensor, x: tl.tensor, other: tl.tensor, number: tl.tensor, size: tl.tensor, width: tl.tensor,
    KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Apply the operation KIND to each of `size` elements of x. Its operand is `number`, or `other` with one
    value per element, per row of `width` elements, or per column. Grid: (size / BLOCK,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    follow(OVERLAP)
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "scale":
        wide = wide * number
    elif KIND == "scale_rows":
        wide = wide * tl.load(other + at // width, mask=inside, other=0.0).to(tl.float32)
    elif KIND == "scale_columns":
        wide = wide * tl.load(other + at % (size // width), mask=inside, other=0.0).to(tl.float32)
    elif KIND == "softcap":
        wide = number * tanh(wide / number)
    elif KIND == "add":
        wide = wide + tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    elif KIND == "weigh":
        wide = wide * tl.sigmoid(tl.load(other + at // width, mask=inside, other=0.0).to(tl.float32))
    else:
        wide = activated(wide, KIND)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def put(
    values: tl.tensor, exists: tl.tensor, dims: tl.tensor, where: tl.tuple,
    SCALED: tl.constexpr, LIMIT: tl.constexpr,
) -> None:  # fmt: skip
    """Store dimensions `dims` of a token's heads: queries to `q`, keys and values to the token's cache slot.
    With SCALED, cached values are divided by their scale and at most LIMIT."""
    q, k_cache, v_cache, q_offset, slot, is_q, is_k, is_v, k_scale, v_scale = where
    narrow = values.to(q.dtype.element_ty)
    tl.store(q + q_offset[:, None] + dims[None, :], narrow, mask=is_q[:, None] & exists)
    keys, stored = narrow, narrow
    if SCALED:
        wide = narrow.to(tl.float32)
        keys = tl.clamp(wide / k_scale, -LIMIT, LIMIT)
        stored = tl.clamp(wide / v_scale, -LIMIT, LIMIT)
    kind = k_cache.dtype.element_ty
    if kind == tl.int8:  # the sum has no fraction: ties are rounded to even
        keys, stored = (keys + _NO_FRACTION) - _NO_FRACTION, (stored + _NO_FRACTION) - _NO_FRACTION
    tl.store(k_cache + slot[:, None] + dims[None, :], keys.to(kind), mask=is_k[:, None] & exists)
    tl.store(v_cache + slot[:, None] + dims[None, :], stored.to(kind), mask=is_v[:, None] & exists)


@triton.jit
def _rotate_and_write(
    q: tl.tensor, qkv: tl.tensor, table: tl.tensor, positions: tl.tensor, slots: tl.tensor,
    k_cache: tl.tensor, v_cache: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, eps: tl.tensor,
    k_scale: tl.tensor, v_scale: tl.tensor, stride: tl.tensor, block_stride: tl.tensor,
    slot_stride: tl.tensor,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORMED: tl.constexpr, SCALED: tl.constexpr, LIMIT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Apply norms and RoPE to HEADS heads of a token, and store them: the left and right half that are
    rotated, then the rest. Grid: (tokens, heads / HEADS)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q, is_v = head < Q_HEADS, (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    left, rest = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    right = left + HALF
    exists = (head < Q_HEADS + 2 * KV_HEADS)[:, None]
    rotated, plain = exists & (left < HALF)[None, :], exists & (rest < DIM)[None, :]
    follow(OVERLAP)
    position, slot = tl.load(positions + token), tl.load(slots + token + 0 * head)
    is_k, is_v = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS) & (slot >= 0), is_v & (slot >= 0)
    heads = qkv + token * stride + head[:, None] * DIM
    a = tl.load(heads + left[None, :], mask=rotated, other=0.0).to(tl.float32)
    b = tl.load(heads + right[None, :], mask=rotated, other=0.0).to(tl.float32)
    c = tl.load(heads + rest[None, :], mask=plain, other=0.0).to(tl.float32)
    has_rope = (head < Q_HEADS + KV_HEADS)[:, None]
    if NORMED:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        a = _norm_heads(a, factor, q_weight, k_weight, left, left < HALF, is_q, has_rope, q.dtype.element_ty)
        b = _norm_heads(b, factor, q_weight, k_weight, right, left < HALF, is_q, has_rope, q.dtype.element_ty)
        c = _norm_heads(c, factor, q_weight, k_weight, rest, rest < DIM, is_q, has_rope, q.dtype.element_ty)
    cos, sin = angles(table + position * (2 * HALF), left, has_rope, HALF)
    q_offset = (token * Q_HEADS + head) * DIM
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    kind: tl.constexpr = k_cache.dtype.element_ty
    place += (head - tl.where(is_v, Q_HEADS + KV_HEADS, Q_HEADS)) * head_step(kind, DIM)
    a, b = a * cos - b * sin, b * cos + a * sin
    if kind == tl.int8:
        narrow: tl.constexpr = q.dtype.element_ty
        most = tl.maximum(_most(a, rotated, narrow), _most(b, rotated, narrow))
        scale = tl.maximum(tl.maximum(most, _most(c, plain, narrow)), _LEAST) / LIMIT
        k_scale, v_scale = scale[:, None], scale[:, None]
        at = (place + DIM) // 4
        tl.store(k_cache.to(tl.pointer_type(tl.float32), bitcast=True) + at, scale, mask=is_k)
        tl.store(v_cache.to(tl.pointer_type(tl.float32), bitcast=True) + at, scale, mask=is_v)
    where = (q, k_cache, v_cache, q_offset, place, is_q, is_k, is_v, k_scale, v_scale)
    put(a, rotated, left, where, SCALED, LIMIT)
    put(b, rotated, right, where, SCALED, LIMIT)
    if DIM > 2 * HALF:
        put(c, plain, rest, where, SCALED, LIMIT)


@triton.jit
def _most(x: tl.tensor, exists: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return the absolute maximum of each row of x, rounded to dtype KIND; infinity if the row has NaN."""
    size = tl.abs(x.to(KIND).to(tl.float32))
    return tl.max(tl.where(exists, tl.where(size == size, size, float("inf")), 0.0), 1)


@triton.jit
def angles(row: tl.tensor, dims: tl.tensor, has_rope: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Load cosines and sines of RoPE, [heads, dims]. For heads without RoPE (values) they are 1 and 0."""
    cos = tl.load(row + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    return tl.where(has_rope, cos, 1.0), tl.where(has_rope, sin, 0.0)


@triton.jit
def _norm_heads(
    x: tl.tensor, factor: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, dims: tl.tensor,
    exists: tl.tensor, is_q: tl.tensor, has_rope: tl.tensor,
    kind: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return dimensions `dims` of heads; those of queries and keys are multiplied by `factor` and weight."""
    for_q = tl.load(q_weight + dims, mask=exists, other=0.0).to(tl.float32)[None, :]
    for_k = tl.load(k_weight + dims, mask=exists, other=0.0).to(tl.float32)[None, :]
    normed = (x * factor).to(kind).to(tl.float32) * tl.where(is_q[:, None], for_q, for_k)
    return tl.where(has_rope, normed.to(kind).to(tl.float32), x)


def limit_of(cache: Tensor) -> float:
    """Return the largest value that an 8-bit cache represents; 0 for other caches."""
    if cache.dtype == torch.int8:
        return INT8_LIMIT
    return torch.finfo(cache.dtype).max if cache.element_size() == 1 else 0.0


class TritonOps:
    """Operations of a model between its GEMMs (`Ops`) as Triton kernels, for a GPU."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        size = table.shape[1]
        out = torch.empty(len(ids), size, dtype=table.dtype, device=table.device)
        if len(ids):
            ahead = overlap(len(ids), size)
            launch(_embed, len(ids), triton.cdiv(size, _GATHERED))(
                out, ids, table, size, BLOCK=_GATHERED, OVERLAP=ahead, launch_pdl=ahead
            )
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        return _apply_norm(rows, rows, weight, eps, add=False).view(x.shape)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _apply_norm(x, residual, weight, eps, add=True)

    def norm_parts(self, x: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
        block, ahead = triton.next_power_of_2(max(map(len, weights))), overlap(len(x), x.shape[1])
        part = x
        for at in range(0, len(weights) if len(x) else 0, 2):
            pair = weights[at : at + 2]
            first, last = pair[0], pair[-1]
            launch(_norm_part, len(x), len(pair))(
                part, first, last, len(first), len(last), x.stride(0), eps, BLOCK=block, OVERLAP=ahead,
                launch_pdl=ahead, num_warps=min(max(block // 256, 1), 16),
            )  # fmt: skip
            part = part[:, sum(map(len, pair)) :]
        return x

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return _apply_norm(x, x, weight, eps, add=False, bias=bias, centred=True)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        return _apply_norm(x, residual, weight, eps, add=True, bias=bias, centred=True)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        return gated(gate_up, activation)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return _apply(torch.empty_like(x), x, x, 0.0, activation)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return _apply(x, x, x, factor, "scale")

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        return _apply(x, x, factors, 0.0, "scale_rows")

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        return _apply(x, x, factors, 0.0, "scale_columns")

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return _apply(x, x, x, cap, "softcap")

    def weigh(self, x: Tensor, gate: Tensor) -> Tensor:
        return _apply(x, x, gate, 0.0, "weigh")

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return _apply(x, x, y, 0.0, "add")

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return route(logits, routing, bias)

    def rotate_and_write(self, qkv: Tensor, entry: HeadEntry) -> Tensor:
        heads, table, positions, slots, k_cache, v_cache, norms, k_scale, v_scale = entry
        (_, block_size, kv_heads, _), dim = k_cache.shape, head_size(k_cache)
        num_tokens, half = len(qkv), table.shape[1] // 2
        q = torch.empty(num_tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
        if not num_tokens:
            return q
        few, warps = (2, 1) if num_tokens <= _FEW_TOKENS else (8, 2)
        if few == 8 and norms is not None and batch_invariant.is_on():
            warps = 4  # two heads per warp, so that the sums of a norm have the same order as for few tokens
        scaled, ahead = k_cache.element_size() == 1, overlap(num_tokens, heads * dim)
        q_weight, k_weight, eps = norms or (qkv, qkv, 0.0)
        launch(_rotate_and_write, num_tokens, triton.cdiv(heads + 2 * kv_heads, few))(
            q, qkv, table, positions, slots, k_cache, v_cache, q_weight, k_weight, eps, k_scale, v_scale,
            qkv.stride(0), k_cache.stride(0), k_cache.stride(1), Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
            HALF=half, BLOCK_SIZE=block_size, NORMED=norms is not None, SCALED=scaled,
            LIMIT=limit_of(k_cache), HEADS=few,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_REST=triton.next_power_of_2(max(dim - 2 * half, 1)), OVERLAP=ahead, launch_pdl=ahead,
            num_warps=warps,
        )  # fmt: skip
        return q

    def assigned(self, tokens: Tensor, num_slots: int) -> LoRARows:
        return assign(tokens, num_slots)

    def lora(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: LoRARows
    ) -> Tensor:
        return add(out, x, LoRAHeads(a, b, part_sizes, tokens))

    def lora_rows(self, out: Tensor, ids: Tensor, a: Tensor, b: Tensor, tokens: LoRARows) -> Tensor:
        return add_rows(out, ids, LoRAHeads(a, b, (out.shape[1],), tokens))

    def lora_shrink(self, x: Tensor, a: Tensor, tokens: LoRARows) -> Tensor:
        return shrink(x, LoRAHeads(a, a, (a.shape[1],), tokens)) if len(x) else x.new_empty(0, a.shape[1])

    def lora_expand(
        self, out: Tensor, ranks: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: LoRARows
    ) -> Tensor:
        return expand(out, ranks.contiguous(), LoRAHeads(b, b, part_sizes, tokens)) if len(out) else out


def _apply(out: Tensor, x: Tensor, other: Tensor, number: float, kind: str) -> Tensor:
    assert x.is_contiguous() and other.is_contiguous() and out.is_contiguous()
    if x.numel():
        ahead = overlap(len(x), x.shape[-1])
        launch(_elementwise, triton.cdiv(x.numel(), _GATHERED))(
            out, x, other, float(number), x.numel(), x.numel() // other.numel(), KIND=kind, BLOCK=_GATHERED,
            OVERLAP=ahead, launch_pdl=ahead,
        )  # fmt: skip
    return out


def _apply_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    add: bool,
    bias: Tensor | None = None,
    centred: bool = False,
) -> Tensor:
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows:
        block, ahead = triton.next_power_of_2(size), overlap(num_rows, size)
        launch(_norm, num_rows)(
            out, x, residual, weight, bias, size, x.stride(0), eps, ADD=add, CENTRED=centred, BLOCK=block,
            OVERLAP=ahead, launch_pdl=ahead, num_warps=min(max(block // 256, 1), 16),
        )  # fmt: skip
    return out
