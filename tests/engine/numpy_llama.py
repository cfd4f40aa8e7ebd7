"""Llama in numpy, written from its paper: a reference that shares no code with the engine."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Sizes(NamedTuple):
    """Dimensions of a model."""

    layers: int
    heads: int
    kv_heads: int
    eps: float = 1e-5
    theta: float = 10000.0


def logits(
    weight: Callable[[str], Array], sizes: Sizes, ids: list[int], dtype: type[np.floating[Any]] = np.float64
) -> Array:
    """Return logits [len(ids), vocab] from weights under llama.cpp's names, with interleaved RoPE, computed
    in `dtype`: with weights of the same dtype no matmul converts them."""
    x = weight("token_embd")[ids].astype(dtype)
    for i in range(sizes.layers):
        h = _norm(x, weight(f"blk.{i}.attn_norm"), sizes.eps)
        q, k, v = (h @ weight(f"blk.{i}.attn_{part}").T for part in "qkv")
        x = x + _attention(q, k, v, sizes) @ weight(f"blk.{i}.attn_output").T
        h = _norm(x, weight(f"blk.{i}.ffn_norm"), sizes.eps)
        gate = h @ weight(f"blk.{i}.ffn_gate").T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (h @ weight(f"blk.{i}.ffn_up").T)) @ weight(f"blk.{i}.ffn_down").T
        )
    out: Array = _norm(x, weight("output_norm"), sizes.eps) @ weight("output").T
    return out


def _norm(x: Array, weight: Array, eps: float) -> Array:
    out: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return out


def _rotate(x: Array, theta: float) -> Array:
    """Rotate [T, heads, head_dim] by angles that grow with the position."""
    angles = np.arange(len(x))[:, None] * theta ** -(np.arange(0, x.shape[-1], 2) / x.shape[-1])
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape).astype(x.dtype)


def _attention(q: Array, k: Array, v: Array, sizes: Sizes) -> Array:
    num = len(q)
    q = _rotate(q.reshape(num, sizes.heads, -1), sizes.theta)
    k = _rotate(k.reshape(num, sizes.kv_heads, -1), sizes.theta)
    k, v = (np.repeat(t.reshape(num, sizes.kv_heads, -1), sizes.heads // sizes.kv_heads, 1) for t in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(num, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: Array = np.einsum("hqk,khd->qhd", weights, v).reshape(num, -1)
    return out
