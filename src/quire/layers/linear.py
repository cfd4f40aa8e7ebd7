"""Linear layers, whole and tensor-parallel. A fused layer lists the checkpoint parts that it consists of."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch, LoRATokens
from quire.kernels.ops import HeadEntry, HeadNorms
from quire.layers.lora import AdapterSlots
from quire.layers.lora_layers import LoRALayer, LoRARanksLayer, LoRASumLayer, LoRATarget
from quire.layers.norm import norm_sharded_parts
from quire.layers.rope import half_split_order
from quire.layers.scope import Scope, Target, target_of, zero_on_other_ranks
from quire.quant.sharding import Runs, Shard, by_group, divided, of_heads
from quire.quant.weight import LinearShape

_LEAST_OUTPUTS = 16
"""Minimum number of outputs of a linear layer that is quantized on load; smaller layers keep the model
dtype."""


class Linear(nn.Module):
    """Linear layer x W^T + b. It computes one or several matrices (parts) of a checkpoint and concatenates
    their outputs. `parts` maps the checkpoint name of each part to its number of outputs, or to their shards
    (`Runs`) if they are not sharded evenly."""

    divided: ClassVar[Literal["outputs", "inputs"] | None] = None
    """Dimension of the weight that is sharded evenly over the tensor-parallel group; None if neither is."""
    is_summed: ClassVar[bool] = False
    """Whether the outputs are all-reduced, so that only the first rank adds the bias."""
    quantizable: ClassVar[bool] = True
    """Whether the layer's weight may be quantized on load."""
    product: Callable[[Tensor], Tensor]
    """Function that computes the layer without LoRA adapters: [T, size_in] -> [T, outputs of all parts]; set
    by `finish`."""

    def __init__(
        self, size_in: int, parts: Mapping[str, int | Runs], scope: Scope, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.group = scope.group
        self.part_names = tuple(parts)
        self.outputs = tuple(self._runs(part) for part in parts.values())
        self.inputs = divided(scope.group, size_in) if self.divided == "inputs" else Shard(size_in)
        self.sizes_out = tuple(sum(run.size for run in runs) for runs in self.outputs)
        self.transposed = scope.transposed
        num_outputs = sum(run.all for runs in self.outputs for run in runs)
        shape = LinearShape(
            self.inputs.size,
            self.sizes_out,
            bias,
            scope.dtype,
            scope.device,
            quantizable=self.quantizable and num_outputs >= _LEAST_OUTPUTS,
            outputs=self.outputs,
            inputs=self.inputs,
        )
        self.weight = scope.linear(self.part_names, shape)
        self.lora_layer = self._build_lora(scope)
        """LoRA layer; None if this linear layer has no LoRA support."""

    def _build_lora(self, scope: Scope) -> LoRALayer | None:
        slots = scope.adapters
        if slots is None or not slots.takes(scope.name, *self.part_names):
            return None
        lora_layer = self._choose_lora(slots, scope)
        shards = ((lora_layer.shard,),) if isinstance(lora_layer, LoRASumLayer) else self.outputs
        for i, (name, outputs) in enumerate(zip(self.part_names, shards, strict=True)):
            if slots.takes(scope.name, name):
                order = partial(self._order, i)
                lora_layer.targets[name] = LoRATarget(
                    lora_layer, slice(i, i + 1), self.inputs, outputs, order
                )
        return lora_layer

    def _choose_lora(self, slots: AdapterSlots, scope: Scope) -> LoRALayer:
        args = self.part_names[0], slots, self.inputs.size
        if slots.fully_sharded and scope.group.size > 1:
            if self.divided == "outputs":
                return LoRARanksLayer(*args, self.sizes_out, scope.ops, scope.group)
            if self.divided == "inputs" and self.sizes_out[0] % scope.group.size == 0:
                return LoRASumLayer(*args, self.sizes_out[0], scope.ops, scope.group)
        return LoRALayer(*args, self.sizes_out, scope.ops)

    def _order(self, part: int) -> Tensor | None:
        orders = self.orders()
        return orders[part] if orders else None

    def adapters_of(self, batch: Batch | None) -> tuple[LoRALayer, LoRATokens] | None:
        """Return the LoRA layer and the adapter slot of each token; None if no token has a LoRA adapter for
        this layer."""
        if self.lora_layer is None:
            return None
        assert batch is not None, "a layer that takes adapters needs the batch: call layer(x, batch)"
        return None if batch.lora is None else (self.lora_layer, batch.lora)

    def orders(self) -> list[Tensor]:
        """Return the checkpoint index of each output, one tensor per part; an empty list if the outputs are
        in the order of the checkpoint."""
        return []

    def _runs(self, part: int | Runs) -> Runs:
        if not isinstance(part, int):
            return part
        return (divided(self.group, part) if self.divided == "outputs" else Shard(part),)

    def targets(self) -> Iterator[Target]:
        by_inputs = self.divided == "inputs"
        for name, part, outputs in zip(self.part_names, self.weight.parts(), self.outputs, strict=True):
            runs = (self.inputs,) if by_inputs else outputs
            for suffix, piece in part.items():
                target = target_of(f"{name}.{suffix}", piece, runs, by_inputs=by_inputs)
                yield target.transposed() if self.transposed else target

    def begin(self) -> None:
        self.weight.begin()

    def finish(self) -> None:
        if orders := self.orders():
            self.weight.reorder(orders)
        if self.is_summed:
            for part in self.weight.parts():
                if "bias" in part:
                    zero_on_other_ranks(self.group, part["bias"].tensor)
        self.weight.finish()
        self.bind_kernels()

    def bind_kernels(self) -> None:
        """Choose the functions that compute the layer, once the weight is loaded and processed."""
        self.product = self.weight.product

    def multiply(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """Return x W^T + b as [T, outputs of all parts], with the LoRA adapters of the batch applied. Only
        layers without LoRA support may be called without a batch."""
        if self.lora_layer is None or (adapters := self.adapters_of(batch)) is None:
            return self.product(x)
        return self._multiply_with_lora(x, *adapters)

    def _multiply_with_lora(self, x: Tensor, lora_layer: LoRALayer, lora: LoRATokens) -> Tensor:
        if self.weight.adapted is not None and (adapted := lora_layer.adapted(lora)) is not None:
            return self.weight.adapted(x, adapted=adapted)
        return lora_layer.add(self.weight.product(x), x, lora)


class OneLinear(Linear):
    """A linear layer of one part."""

    def __init__(self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False) -> None:
        super().__init__(size_in, {scope.name: size_out}, scope, bias=bias)

    forward = Linear.multiply


class WholeLinear(OneLinear):
    """A replicated linear layer: each tensor-parallel rank computes all of it."""


class ColumnLinear(OneLinear):
    """A column-parallel linear layer: each tensor-parallel rank computes a shard of the outputs."""

    divided = "outputs"


class HeadGate(ColumnLinear):
    """Projection to a scalar gate for each head of an attention output."""

    def __init__(self, size_in: int, heads: int, scope: Scope) -> None:
        super().__init__(size_in, heads, scope)
        self.weigh = scope.ops.weigh

    def scale(self, mixed: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """Scale each head of the attention output `mixed` [T, heads * size] in place by the sigmoid of its
        gate, which is projected from the hidden states x [T, size_in]. Return `mixed`."""
        gates = self.multiply(x, batch)
        self.weigh(mixed.view(-1, mixed.shape[1] // gates.shape[1]), gates.view(-1, 1))
        return mixed


class RowLinear(OneLinear):
    """A row-parallel linear layer: sharded inputs, and all-reduced outputs unless `sums=False`."""

    divided = "inputs"
    is_summed = True
    of_gates: Callable[[Tensor], Tensor] | None = None
    """Fused kernel, [T, 2 * size_in] -> [T, size_out], that computes silu(gate) * up and multiplies it by
    this weight; None if the weight has no such kernel."""

    def __init__(
        self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False, sums: bool = True
    ) -> None:
        super().__init__(size_in, size_out, scope, bias=bias)
        self.sums = sums and scope.group.size > 1

    def bind_kernels(self) -> None:
        super().bind_kernels()
        self.of_gates = self.weight.of_gates
        if self.sums:
            self.product = partial(_multiply_and_reduce, self.weight.product, self.group.all_reduce)
            if self.weight.of_gates is not None:
                self.of_gates = partial(_multiply_and_reduce, self.weight.of_gates, self.group.all_reduce)

    def _multiply_with_lora(self, x: Tensor, lora_layer: LoRALayer, lora: LoRATokens) -> Tensor:
        out = super()._multiply_with_lora(x, lora_layer, lora)
        return self.group.all_reduce(out) if self.sums else out


def _multiply_and_reduce(
    multiply: Callable[[Tensor], Tensor], reduce: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    return reduce(multiply(x))


class QKVLinear(Linear):
    """Fused QKV projection, sharded by heads. `names` are the checkpoint names of query, key and value, or
    one fused name, which may be grouped by key head (`by_head`). With two names the second is that of fused
    keys and values (`by_head`), or `transform_qkv` derives the values from the keys."""

    divided = "outputs"

    def __init__(
        self,
        size_in: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scope: Scope,
        *,
        bias: bool = False,
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        paired_dim: int = 0,
        by_head: bool = False,
    ) -> None:
        group = scope.group
        q, kv = divided(group, heads * head_dim), of_heads(group, kv_heads, head_dim)
        parts: list[Runs] = [(q,), (kv,), (kv,)]
        parts = parts[: len(names)] if len(names) > 1 else [(q, kv, kv)]
        if by_head:
            fused = (q, kv, kv)[len(names) - 1 :]
            parts = [*parts[: len(names) - 1], by_group(group, kv_heads, fused)]
        named = {scope.sibling(name): runs for name, runs in zip(names, parts, strict=True)}
        super().__init__(size_in, named, scope, bias=bias)
        self.heads, self.kv_heads = q.size // head_dim, kv.size // head_dim
        self.head_dim = head_dim
        self.paired_dim = paired_dim
        self.by_head = by_head
        self.ops = scope.ops
        self.norms: HeadNorms | None = None
        """Weights of the QK norms over all heads; None if the model has no such norms."""
        self.transform_qkv: Callable[[Tensor], Tensor] | None = None
        """Function that transforms the concatenated queries, keys and values before RoPE, such as per-head
        layer norms; None if the model has none."""
        self.norm_parts = scope.ops.norm_parts
        if group.size > 1:
            self.norm_parts = partial(norm_sharded_parts, group=group)
        self.entered: Callable[[Tensor, HeadEntry], Tensor | None] | None = None
        """Fused kernel of QKV projection, RoPE and cache write; None if the weight has no such kernel."""

    def orders(self) -> list[Tensor]:
        q, k, v = (num_heads * self.head_dim for num_heads in (self.heads, self.kv_heads, self.kv_heads))
        ungrouped: list[Tensor] = []
        if len(self.part_names) == 2 and self.by_head:
            stored = torch.arange(k + v).view(self.kv_heads, 2, self.head_dim)
            return [torch.arange(q), stored.transpose(0, 1).flatten()]
        if self.by_head:
            stored = torch.arange(q + k + v).view(self.kv_heads, -1, self.head_dim)
            ungrouped = [torch.cat([part.flatten() for part in stored.tensor_split((-2, -1), 1)])]
        if not self.paired_dim:
            return ungrouped
        orders = [*(half_split_order(n, self.head_dim, self.paired_dim) for n in (q, k)), torch.arange(v)]
        if len(self.part_names) == 1:
            orders = [torch.cat((orders[0], orders[1] + q, orders[2] + q + k))]
        return [ungrouped[0][orders[0]]] if ungrouped else orders

    def bind_kernels(self) -> None:
        super().bind_kernels()
        self.entered = self.weight.entered

    def forward(self, x: Tensor, entry: HeadEntry, batch: Batch | None = None) -> Tensor:
        """Project x [T, size_in] to queries, keys and values, and apply RoPE. Write keys and values to the
        cache slots of `entry`; return the queries [T, heads, head_dim]."""
        if self.norms is not None or self.transform_qkv is not None:
            qkv = self.multiply(x, batch)
            if self.norms is not None:
                qkv = self.norm_parts(qkv, (self.norms.q, self.norms.k), self.norms.eps)
            qkv = qkv if self.transform_qkv is None else self.transform_qkv(qkv)
            return self.ops.rotate_and_write(qkv, entry)
        q = self._project_fused(x, entry, batch)
        return self.ops.rotate_and_write(self.multiply(x, batch), entry) if q is None else q

    def _project_fused(self, x: Tensor, entry: HeadEntry, batch: Batch | None) -> Tensor | None:
        """Return the rotated queries that the weight's fused kernel computes; None if there is no such kernel
        or it does not support x or the batch's LoRA adapters."""
        if (adapters := self.adapters_of(batch)) is None:
            return None if self.entered is None else self.entered(x, entry)
        lora_layer, lora = adapters
        enter, adapted = self.weight.entered_adapted, lora_layer.adapted(lora)
        return None if enter is None or adapted is None else enter(x, entry, adapted=adapted)


class KeysWithoutBias(QKVLinear):
    """QKV projection of checkpoints that have a bias of queries and values but not of keys."""

    def targets(self) -> Iterator[Target]:
        return without_bias(self.part_names[1], super().targets())


def without_bias(part: str, targets: Iterator[Target]) -> Iterator[Target]:
    """Yield the load targets of a linear layer except for the bias of `part`, which the checkpoint does not
    have. That bias is set to zero."""
    for target in targets:
        if target.name == f"{part}.bias":
            target.tensor.zero_()
        else:
            yield target


class GateUpLinear(Linear):
    """Fused gate and up projection of a gated MLP, and act(gate) * up; `names`: two names, or a fused one."""

    divided = "outputs"

    def __init__(
        self,
        size_in: int,
        size_out: int,
        scope: Scope,
        *,
        bias: bool = False,
        activation: str = "silu",
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
    ) -> None:
        shard = divided(scope.group, size_out)
        parts = {scope.sibling(name): (shard,) * (2 // len(names)) for name in names}
        super().__init__(size_in, parts, scope, bias=bias)
        self.ops = scope.ops
        self.activation = activation
        self.gated: Callable[[Tensor], Tensor] | None = None
        """Fused kernel of gate, up and silu; None if the weight has no such kernel."""

    def bind_kernels(self) -> None:
        super().bind_kernels()
        self.gated = self.weight.gated if self.activation == "silu" else None

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """Return act(gate(x)) * up(x): [T, size_in] -> [T, size_out]."""
        adapters = self.adapters_of(batch)
        if self.gated is not None and adapters is None:
            return self.gated(x)
        if self.gated is not None and adapters is not None and self.weight.gated_adapted is not None:
            lora_layer, lora = adapters
            if (adapted := lora_layer.adapted(lora)) is not None:
                return self.weight.gated_adapted(x, adapted=adapted)
        return self.ops.gated(self.multiply(x, batch), self.activation)
