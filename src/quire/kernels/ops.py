"""Ops: the operations of a model between its GEMMs, and the choice of their implementation by device."""

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.checkpoint.facts import Routing
from quire.kernels.cpu import native
from quire.registry import LazyTable

IMPLEMENTATIONS = LazyTable(
    "kernels",
    {
        "cpu": "quire.kernels.cpu.ops:CPUOps",
        "reference": "quire.kernels.reference.ops:Reference",
        "triton": "quire.kernels.triton.ops:TritonOps",
    },
)


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
    """[num_blocks, block_size, kv_heads, head_dim]; an 8-bit cache holds values divided by its scale"""
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


class Ops(Protocol):
    """Operations that a model computes between its GEMMs."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Return rows `ids` ([T] int64) of `table` [V, n]: [T, n]."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm over the last dimension, computed in float32. It is rounded before the weight
        is applied, as in transformers; a float32 weight is applied before rounding."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place and return the RMS norm of the sum."""
        ...

    def norm_parts(self, x: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
        """Apply RMS norm in place to consecutive parts of each row of x, one part per weight and as long as
        it."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm over the last dimension, computed in float32 and rounded at the end."""
        ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Add x to `residual` in place and return the layer norm of the sum."""
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up [T, n] for `gate_up` [T, 2n], gate and up side by side; activations have the
        names of `kernels/reference/activations.py`."""
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return act(x)."""
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply x by `factor` in place."""
        ...

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply each row of x by its factor ([T, 1] float32) in place."""
        ...

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply each column of x by its factor ([n]) in place."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Compute cap * tanh(x / cap) in place."""
        ...

    def weigh(self, x: Tensor, gate: Tensor) -> Tensor:
        """Compute x * sigmoid(gate) in place; the gate has the shape of x, or one value per row."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add y to x in place."""
        ...

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the expert ids of each token and their weights; see `kernels/reference/moe.py`."""
        ...

    def rotate_and_write(self, qkv: Tensor, entry: HeadEntry) -> Tensor:
        """Apply norms and RoPE to queries and keys, write keys and values to their slots, and return the
        queries.

        [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads, head_dim].
        """
        ...

    def assigned(self, tokens: Tensor, num_slots: int) -> Any:
        """Return the `tokens` argument of the lora methods for a step's slots, [T] int32, -1 for tokens
        without an adapter. It is built once per step."""
        ...

    def lora(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Any
    ) -> Tensor:
        """Add the LoRA outputs for x [T, size_in] to `out` [T, sum of part_sizes] in place. `tokens` is the
        result of `assigned`. For each slot, `a` [slots, parts * rank, size_in] shrinks x to the rank of each
        part, and `b` [slots, sum of part_sizes, rank] expands it to the part's outputs, all in float32. The
        weights of one slot are contiguous; the distance between slots is arbitrary."""
        ...

    def lora_rows(self, out: Tensor, ids: Tensor, a: Tensor, b: Tensor, tokens: Any) -> Tensor:
        """Add the LoRA outputs of an embedding to `out` [T, n] in place: `a` [slots, vocab, rank] is indexed
        by the [T] int64 ids, and `b` is [slots, n, rank]."""
        ...

    def lora_shrink(self, x: Tensor, a: Tensor, tokens: Any) -> Tensor:
        """Return x shrunk by `a`, the first half of `lora`: [T, parts * rank]. Rows without an adapter are
        undefined."""
        ...

    def lora_expand(
        self, out: Tensor, ranks: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Any
    ) -> Tensor:
        """Add `ranks` [T, parts * rank] expanded by `b`, the second half of `lora`, to `out` in place."""
        ...


@functools.cache
def choose(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the fastest implementation for models of `dtype` on `device`."""
    ops: Ops = IMPLEMENTATIONS[_name(device, dtype)]()
    return ops


def _name(device: torch.device, dtype: torch.dtype) -> str:
    if native.serves(device, dtype):
        return "cpu"
    if device.type == "cuda":
        return "triton"
    return "reference"
