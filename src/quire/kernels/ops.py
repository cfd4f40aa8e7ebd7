"""Ops: the small operations of a model between its products, and who serves them on which device."""

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
    """RMS norms of query and key, over the head size."""

    q: Tensor
    k: Tensor
    eps: float


class HeadEntry(NamedTuple):
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


class LoRAHeads(NamedTuple):
    """What adapters add to a product; see `Ops.lora`."""

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    """Outputs of each part."""
    tokens: Any
    """What `Ops.assigned` made of their slots."""


class Ops(Protocol):
    """What a model computes between its products."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """[T] int64 ids, [V, n] table -> [T, n]."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension: in float32, rounded before the weight is applied, as transformers
        does; a weight in float32 is applied before it is rounded."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x is added to `residual` in place; returns the norm of the sum."""
        ...

    def norm_parts(self, x: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
        """The first parts of each row of x, as long as the weights, each under its own RMS norm, in place."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Mean taken out, divided by the spread; in float32, rounded at the end."""
        ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """x is added to `residual` in place; returns the layer norm of the sum."""
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2n] gate and up side by side -> act(gate) * up, [T, n]; the names are those of
        `kernels/reference/activations.py`."""
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """act(x)."""
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor, in place."""
        ...

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        """Each row of x times its own of the [T, 1] factors in float32, in place."""
        ...

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        """Each column of x times its own of the [n] factors, in place."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), in place."""
        ...

    def weigh(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), in place; the gate has the shape of x, or one number for each row."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, in the memory of x."""
        ...

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights: see `kernels/reference/moe.py`."""
        ...

    def rotate_and_write(self, qkv: Tensor, entry: HeadEntry) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their slots; the queries remain.

        [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads, head_dim].
        """
        ...

    def assigned(self, tokens: Tensor, num_slots: int) -> Any:
        """What `lora` and `lora_rows` are to be given of the slots of a step's tokens, [T] int32, -1 of those
        without: made once a step."""
        ...

    def lora(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Any
    ) -> Tensor:
        """What adapters make of x [T, size_in], added to `out` [T, sum of part_sizes] in place. `tokens` is
        what `assigned` made of their slots. Of each slot, `a` [slots, parts * rank,
        size_in] shrinks x to the ranks of each part, and `b` [slots, sum of part_sizes, rank] makes its
        outputs of them, all in float32. What is of one slot is contiguous; slots may lie far apart."""
        ...

    def lora_rows(self, out: Tensor, ids: Tensor, a: Tensor, b: Tensor, tokens: Any) -> Tensor:
        """The same of an embedding: `a` [slots, vocab, rank] has the ranks of each of the [T] int64 ids,
        `out` is [T, n] and `b` [slots, n, rank]."""
        ...

    def lora_shrink(self, x: Tensor, a: Tensor, tokens: Any) -> Tensor:
        """The first half of `lora`: [T, parts * rank]. What rows without an adapter have there means
        nothing."""
        ...

    def lora_expand(
        self, out: Tensor, ranks: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Any
    ) -> Tensor:
        """The other half: what `b` makes of [T, parts * rank] is added to `out` in place."""
        ...


@functools.cache
def choose(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest implementation for models of `dtype` on `device`."""
    ops: Ops = IMPLEMENTATIONS[_name(device, dtype)]()
    return ops


def _name(device: torch.device, dtype: torch.dtype) -> str:
    if native.serves(device, dtype):
        return "cpu"
    if device.type == "cuda":
        return "triton"
    return "reference"
