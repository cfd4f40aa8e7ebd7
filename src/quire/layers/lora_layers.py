"""LoRA layers: the adapter weights of each linear layer, and the checkpoint matrices that they belong to."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.attention.batch import LoRATokens
from quire.kernels.ops import LoRAHeads, Ops
from quire.parallel.group import Group
from quire.quant.sharding import Runs, Shard, divided

_ALIGN = 64
"""Alignment in elements: kernels are compiled for aligned pointers."""
Shape = tuple[int, ...]


class LoRAFactors(NamedTuple):
    """The A and B matrices of one adapter for one LoRA layer, which has several parts if it is fused (such as
    Q, K and V). In host memory, parts of lower rank are padded with zeros. The scale is folded into `b`."""

    a: Tensor
    """A matrices: [(experts,) parts, rank, size_in]; [vocab, rank] for an embedding."""
    b: Tensor
    """B matrices: [(experts,) outputs of all parts, rank]."""

    @property
    def num_ranks(self) -> int:
        """Return the sum of the ranks of all parts and experts."""
        return self.a.numel() // self.a.shape[-1]

    def zero(self) -> None:
        self.a.zero_(), self.b.zero_()


class LoRASlots(Protocol):
    """The attributes of `AdapterSlots`, which has the memory of all LoRA layers."""

    max_slots: int
    max_rank: int
    max_extra_vocab: int
    device: torch.device
    layers: dict[str, "LoRALayer"]


class LoRALayer:
    """LoRA adapter weights of a linear layer for all slots: `a` shrinks inputs to ranks, `b` expands ranks to
    outputs."""

    a: Tensor
    """A matrices of all slots: [slots, parts * max_rank, size_in], not contiguous over slots; [slots,
    experts, ...] for experts."""
    b: Tensor
    """B matrices of all slots: [slots, outputs of all parts, max_rank]; [slots, experts, ...] for experts."""

    def __init__(
        self,
        name: str,
        slots: LoRASlots,
        size_in: int,
        part_sizes: tuple[int, ...],
        ops: Ops,
        *,
        num_experts: int | None = None,
    ) -> None:
        self.name = name
        self.slots = slots
        self.size_in = size_in
        self.part_sizes = part_sizes
        self.num_experts = num_experts
        self.ops = ops
        self.targets: dict[str, LoRATarget] = {}
        """Checkpoint matrices that the layer covers, by their dotted names."""
        slots.layers[name] = self

    def adapted(self, lora: LoRATokens) -> LoRAHeads | None:
        """Return the adapter weights for a GEMM kernel that applies them; None if `add` must be called after
        the GEMM."""
        return LoRAHeads(self.a, self.b, self.part_sizes, lora.assigned)

    def add(self, out: Tensor, x: Tensor, lora: LoRATokens) -> Tensor:
        """Add the output of the adapters of each token for `x` [T, size_in] to the layer's output `out` in
        place. Return `out`."""
        return self.ops.lora(out, x, self.a, self.b, self.part_sizes, lora.assigned)

    # ---- memory

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Return the shapes of the A and B matrices (`LoRAFactors`) of an adapter of this rank."""
        front = () if self.num_experts is None else (self.num_experts,)
        return (*front, len(self.part_sizes), rank, self.size_in), (*front, sum(self.part_sizes), rank)

    @property
    def slot_shapes(self) -> tuple[Shape, Shape]:
        """Return the shapes of A and B in one adapter slot, which has room for the maximum rank."""
        return self.shapes(self.slots.max_rank)

    @property
    def size(self) -> int:
        """Return the number of elements (not bytes) of this layer in one adapter slot."""
        return sum(_aligned(math.prod(shape)) for shape in self.slot_shapes)

    def bind(self, memory: Tensor) -> None:
        """Use `memory` [slots, size] for the A and B matrices of all adapter slots."""
        a, b = self.slot_shapes
        start = _aligned(math.prod(a))
        self._slots_memory = LoRAFactors(
            memory[:, : math.prod(a)].unflatten(1, a), memory[:, start : start + math.prod(b)].unflatten(1, b)
        )
        self.a, self.b = self._slots_memory.a.flatten(-3, -2), self._slots_memory.b

    def unbind(self) -> None:
        for name in ("a", "b", "_slots_memory"):
            self.__dict__.pop(name, None)

    def put(self, slot: int, factors: LoRAFactors) -> None:
        rank = factors.b.shape[-1]
        self._slots_memory.a[slot].narrow(-2, 0, rank).copy_(factors.a, non_blocking=True)
        self._slots_memory.b[slot].narrow(-1, 0, rank).copy_(factors.b, non_blocking=True)


class LoRARanksLayer(LoRALayer):
    """Fully sharded LoRA of a column-parallel layer: each device multiplies by a shard of A, and the low-rank
    results are gathered."""

    def __init__(
        self, name: str, slots: LoRASlots, size_in: int, sizes: tuple[int, ...], ops: Ops, group: Group
    ) -> None:
        self.group = group
        self.num_local_ranks = -(-slots.max_rank // group.size)
        super().__init__(name, slots, size_in, sizes, ops)

    def adapted(self, lora: LoRATokens) -> None:
        return None

    @property
    def slot_shapes(self) -> tuple[Shape, Shape]:
        (parts, _, size_in), b = self.shapes(self.num_local_ranks * self.group.size)
        return (parts, self.num_local_ranks, size_in), b

    def put(self, slot: int, factors: LoRAFactors) -> None:
        first, rank = self.group.rank * self.num_local_ranks, factors.b.shape[-1]
        local_a = factors.a[:, first : first + self.num_local_ranks]
        self._slots_memory.a[slot].narrow(1, 0, local_a.shape[1]).copy_(local_a, non_blocking=True)
        self._slots_memory.b[slot].narrow(-1, 0, rank).copy_(factors.b, non_blocking=True)

    def add(self, out: Tensor, x: Tensor, lora: LoRATokens) -> Tensor:
        local = self.ops.lora_shrink(x, self.a, lora.assigned).unflatten(1, (-1, self.num_local_ranks))
        ranks = self.group.gather(local).flatten(1)
        return self.ops.lora_expand(out, ranks, self.b, self.part_sizes, lora.assigned)


class LoRASumLayer(LoRALayer):
    """Fully sharded LoRA of a row-parallel layer: the low-rank result is all-reduced, and each device expands
    it to a shard of the outputs. The all-reduce of the linear layer combines the shards."""

    def __init__(
        self, name: str, slots: LoRASlots, size_in: int, size_out: int, ops: Ops, group: Group
    ) -> None:
        self.group = group
        self.shard = divided(group, size_out)
        super().__init__(name, slots, size_in, (self.shard.size,), ops)

    def adapted(self, lora: LoRATokens) -> None:
        return None

    def add(self, out: Tensor, x: Tensor, lora: LoRATokens) -> Tensor:
        ranks = self.group.all_reduce(self.ops.lora_shrink(x, self.a, lora.assigned))
        local_out = out[:, self.shard.start : self.shard.start + self.shard.size]
        self.ops.lora_expand(local_out, ranks, self.b, self.part_sizes, lora.assigned)
        return out


class LoRAMlaLayer(LoRALayer):
    """LoRA of MLA's kv_b_proj, which expands latents to keys and values. Some kernels also need the factors
    transposed (`transposed`)."""

    def __init__(
        self,
        name: str,
        slots: LoRASlots,
        latent: int,
        heads: tuple[int, int, int],
        ops: Ops,
        *,
        keeps_transposed: bool,
    ) -> None:
        """Reserve the factors. `heads` holds the number of heads, the key size and the value size."""
        self.heads, self.key_dim, value_dim = heads
        self._keeps_transposed = keeps_transposed
        super().__init__(name, slots, latent, (self.heads * (self.key_dim + value_dim),), ops)
        self.transposed: tuple[Tensor, Tensor] | None = None

    def _transposed_shapes(self) -> tuple[Shape, ...]:
        rank = self.slots.max_rank
        return ((self.heads, rank, self.key_dim), (self.size_in, rank)) if self._keeps_transposed else ()

    @property
    def size(self) -> int:
        return super().size + sum(_aligned(math.prod(shape)) for shape in self._transposed_shapes())

    def bind(self, memory: Tensor) -> None:
        super().bind(memory)
        if self._keeps_transposed:
            at, views = super().size, []
            for shape in self._transposed_shapes():
                views.append(memory[:, at : at + math.prod(shape)].unflatten(1, shape))
                at += _aligned(math.prod(shape))
            self.transposed = views[0], views[1]

    def unbind(self) -> None:
        super().unbind()
        self.transposed = None

    def put(self, slot: int, factors: LoRAFactors) -> None:
        super().put(slot, factors)
        a, b = self.a[slot], self.b[slot]
        # GEMMs run over all slots at once: an infinity would reach the rows of other adapters.
        a.nan_to_num_(), b.nan_to_num_()
        if self.transposed is not None:
            keys, down = self.transposed
            keys[slot].copy_(b.unflatten(0, (self.heads, -1))[:, : self.key_dim].transpose(1, 2))
            down[slot].copy_(a.t())


class LoRAHeadLayer(LoRALayer):
    """LoRA of the LM head, which runs only on the tokens that need logits (`Batch.logit_lora`)."""


class LoRAEmbeddingLayer(LoRALayer):
    """LoRA of an embedding: `a` has a low-rank vector for each token of the vocabulary."""

    def add(self, out: Tensor, x: Tensor, lora: LoRATokens) -> Tensor:
        """Add the adapters' vectors of the token ids x [T] to `out` in place."""
        return self.ops.lora_rows(out, x, self.a, self.b, lora.assigned)

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        return (self.size_in, rank), (sum(self.part_sizes), rank)

    def bind(self, memory: Tensor) -> None:
        super().bind(memory)
        self.a = self._slots_memory.a

    def put(self, slot: int, factors: LoRAFactors) -> None:
        rank = factors.b.shape[-1]
        for memory, factor in zip(self._slots_memory, factors, strict=True):
            memory[slot].narrow(-1, 0, rank).copy_(factor, non_blocking=True)


def in_order() -> Tensor | None:
    """Return None, which says that the outputs are in the checkpoint's order."""
    return None


class LoRATarget(NamedTuple):
    """A checkpoint matrix that adapters may target: its shard on this device and its LoRA layer."""

    lora_layer: LoRALayer
    part: slice
    """Parts of the LoRA layer that the matrix fills; several for a fused matrix."""
    inputs: Shard
    outputs: Runs
    order: Callable[[], Tensor | None] = in_order
    """Returns the checkpoint index of each output of these parts; None if the order is the same."""
    expert: int | None = None
    is_table: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of the unsharded checkpoint matrix."""
        return self.inputs.all, sum(run.all for run in self.outputs)

    @property
    def num_parts(self) -> int:
        return int(self.part.stop - self.part.start)

    def of(self, factors: LoRAFactors) -> LoRAFactors:
        """Return the views of an adapter's `factors` for the LoRA layer that belong to this matrix: [parts,
        rank, size_in] and [outputs, rank]."""
        a, b = factors if self.expert is None else (factor[self.expert] for factor in factors)
        if self.is_table:
            return LoRAFactors(a, b)
        first, end = (sum(self.lora_layer.part_sizes[:end]) for end in (self.part.start, self.part.stop))
        return LoRAFactors(a.narrow(0, self.part.start, self.num_parts), b.narrow(0, first, end - first))


class LoRAStack(NamedTuple):
    """The experts of a layer, for adapters that store one matrix for all experts. `products` holds, by
    projection (gate_up_proj, down_proj), the target of each expert's matrix."""

    products: dict[str, list[LoRATarget]]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def alias_targets(layer: nn.Module, name: str, alias: str) -> None:
    """Let adapters name the linear layers inside of `layer` also with `alias` in place of `name`."""
    for module in layer.modules():
        lora_layer = getattr(module, "lora_layer", None)
        if isinstance(lora_layer, LoRALayer):
            targets = lora_layer.targets
            targets |= {key.replace(name, alias, 1): target for key, target in targets.items()}
