"""Ops: the small operations of a model between its products, and who serves them on which device."""

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels import native
from quire.registry import LazyTable

IMPLEMENTATIONS = LazyTable(
    "kernels",
    {
        "cpu": "quire.kernels.cpu:CPUOps",
        "reference": "quire.kernels.reference:Reference",
        "triton": "quire.kernels.triton.ops:TritonOps",
    },
)


class HeadNorms(NamedTuple):
    """RMS norms of query and key, over the head size."""

    q: Tensor
    k: Tensor
    eps: float


class Entry(NamedTuple):
    """How the heads of a layer enter its attention: queries and keys turned, keys and values into slots."""

    heads: int
    table: Tensor
    """[max_len, rotary_dim], cosines then sines; the first rotary_dim numbers of a head turn, half against
    half."""
    positions: Tensor
    """[T], where in the table"""
    slots: Tensor
    """[T]; below 0 nothing is written"""
    k_cache: Tensor
    """[num_blocks, block_size, kv_heads, head_dim]; an 8-bit one holds values divided by its scale"""
    v_cache: Tensor
    norms: HeadNorms | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


class Ops(Protocol):
    """What a model computes between its products."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """[T] int64 ids, [V, n] table -> [T, n]."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension: in float32, rounded before the weight is applied, as transformers
        does."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x is added to `residual` in place; returns the norm of the sum."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2n] gate and up side by side -> silu(gate) * up, [T, n]."""
        ...

    def rotate_and_write(self, qkv: Tensor, entry: Entry) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their slots; the queries remain.

        [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads, head_dim].
        """
        ...


@functools.cache
def choose(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest implementation for models of `dtype` on `device`."""
    ops: Ops = IMPLEMENTATIONS[_name(device, dtype)]()
    return ops


def _name(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and native.library():
        return "cpu"
    if device.type == "cuda":
        return "triton"
    return "reference"
