"""Weight: the weight of a linear layer in some format, or with parts in several formats (MixedWeight)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import Routing
from quire.kernels.cpu.linear import LinearProduct
from quire.kernels.ops import HeadEntry
from quire.quant.sharding import Runs, Shard


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Sizes of the weight of a linear layer, and the dtype of its inputs and outputs."""

    size_in: int
    sizes_out: tuple[int, ...]
    """Number of outputs of each checkpoint part (query, key, value) on this device; all are concatenated."""
    bias: bool
    dtype: torch.dtype
    device: torch.device
    quantizable: bool = True
    """Whether the weight may be quantized on load; False where that saves little memory or costs much
    accuracy."""
    outputs: tuple[Runs, ...] = ()
    """Shards of the outputs of each part; empty: all outputs."""
    inputs: Shard | None = None
    """Shard of the inputs; None: all inputs."""

    @property
    def input_shard(self) -> Shard:
        return self.inputs or Shard(self.size_in)

    @property
    def output_runs(self) -> tuple[Runs, ...]:
        return self.outputs or tuple((Shard(size),) for size in self.sizes_out)


class Piece(NamedTuple):
    """A tensor of a weight that is loaded from one checkpoint tensor, and its axes along the layer's outputs
    and inputs (None: it has no such axis)."""

    tensor: Tensor
    outputs: int | None = 0
    inputs: int | None = None
    per_output: int = 1
    """Number of outputs that one element along the axis of outputs stands for."""
    per_input: int | Fraction = 1
    is_flat: bool = False
    """Whether the tensor may have another shape with as many elements in the checkpoint."""


class TextTensor(Piece):
    """A zeroed buffer for the bytes of a text in the checkpoint, which may be shorter than the buffer."""


_KERNELS = (
    "product",
    "gated",
    "of_gates",
    "entered",
    "adapted",
    "gated_adapted",
    "entered_adapted",
    "chosen",
    "rows",
)
"""Names of the attributes of `Weight` that are kernels."""


class Routes(Protocol):
    """A kernel that computes a router's logits and selects experts in one call; returns the ids and weights
    of the experts, each [T, per_token] (as `Ops.route`)."""

    def __call__(self, x: Tensor, *, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]: ...


class StoredTensors(nn.Module):
    """The tensors of a layer in some format; they are empty until the checkpoint is loaded."""

    def begin(self) -> None:
        """Prepare for loading; called once before the first tensor is filled. This may replace the tensors
        that `parts` returns."""

    def finish(self) -> None:
        """Repack the loaded tensors and choose kernels; called once. Only a weight class that does not
        override this method can be saved in a sharded state and restored from it."""
        self.repack()
        self.find_kernels()

    def repack(self) -> None:
        """Convert the tensors to the layout of the kernels, as parameters."""

    def find_kernels(self) -> None:
        """Choose kernels for the tensors as left by `repack`."""
        raise NotImplementedError


class Weight(StoredTensors):
    """The weight of a linear layer. `finish` sets its kernels; fused kernels are None where a format or
    device has none."""

    product: Callable[[Tensor], Tensor]
    """Computes x W^T + b; set by `finish`."""
    gated: Callable[[Tensor], Tensor] | None = None
    """Computes silu(gate) * up, if the parts of the weight are gate and up projections."""
    of_gates: Callable[[Tensor], Tensor] | None = None
    """Computes the matmul of silu(gate) * up, given gate and up concatenated as x [T, 2 * size_in]."""
    entered: Callable[[Tensor, HeadEntry], Tensor | None] | None = None
    """Projects x to query, key and value, applies RoPE, writes key and value to the KV cache and returns the
    rotated queries [T, heads, head_dim] (`Ops.rotate_and_write`); None if x is not supported."""
    adapted: Callable[..., Tensor] | None = None
    """Computes x W^T + b plus the LoRA updates of the adapters of each row."""
    gated_adapted: Callable[..., Tensor] | None = None
    entered_adapted: Callable[..., Tensor | None] | None = None
    chosen: Routes | None = None
    rows: Callable[[Tensor], Tensor] | None = None
    """Looks up rows of an embedding: maps token ids [T] to rows [T, size_in]."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape

    def use_kernels(self, other: "Weight") -> None:
        """Replace the kernels of this weight by those of `other`."""
        for name in _KERNELS:
            setattr(self, name, getattr(other, name))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)

    def parts(self) -> list[dict[str, Piece]]:
        """Return for each part (such as query, key and value) its tensors to load, by the suffix of their
        checkpoint names."""
        raise NotImplementedError

    def reorder(self, orders: list[Tensor]) -> None:
        """Reorder the outputs of each part by its tensor of indices, after loading and before `finish`."""
        for part, order in zip(self.parts(), orders, strict=True):
            for tensor, axis, *_ in part.values():
                if axis is not None:
                    tensor.copy_(tensor.index_select(axis, order.to(tensor.device)))

    def refresh_kernels(self) -> None:
        """Update copies of the weight in the layouts of kernels, after the weight was changed in place."""
        if isinstance(product := getattr(self, "product", None), LinearProduct):
            product.refresh()


def with_bias(
    parts: list[dict[str, Piece]], bias: Tensor | None, sizes: Sequence[int]
) -> list[dict[str, Piece]]:
    """Add to the tensors of each part its slice of `bias`, if the layer has one; `sizes` are the numbers of
    outputs of the parts."""
    if bias is not None:
        for part, piece in zip(parts, bias.split(list(sizes)), strict=True):
            part["bias"] = Piece(piece)
    return parts


def stored_indices(runs: Runs, device: torch.device) -> Tensor:
    """Return the index of each entry of a shard in the whole stored axis; padding is past the end."""
    starts = accumulate((run.all for run in runs), initial=0)
    ranges = (torch.arange(run.size) + start + run.start for run, start in zip(runs, starts, strict=False))
    return torch.cat([*ranges]).to(device)


def frozen_parameter(tensor: Tensor) -> nn.Parameter:
    """Return the tensor as a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


def bias_of(shape: LinearShape) -> nn.Parameter | None:
    """Return an empty bias [outputs]; None if the layer has no bias."""
    return (
        empty_parameter(sum(shape.sizes_out), dtype=shape.dtype, device=shape.device) if shape.bias else None
    )


def placeholder_parameter(*size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter without memory, for a tensor that has memory only between `begin` and `finish`.
    While a model is quantized on load, only one layer at a time is unquantized in memory."""
    return frozen_parameter(torch.empty(1, dtype=dtype, device=device).expand(*size))


def materialize(parameter: nn.Parameter) -> nn.Parameter:
    """Return an uninitialized parameter with the size of a placeholder."""
    return empty_parameter(*parameter.shape, dtype=parameter.dtype, device=parameter.device)


def empty_parameter(*size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return frozen_parameter(torch.empty(*size, dtype=dtype, device=device))


class MixedWeight(Weight):
    """A layer with parts in different formats: one weight for consecutive parts in the same format. The
    outputs of the weights are concatenated."""

    def __init__(self, shape: LinearShape, weights: list[Weight]) -> None:
        super().__init__(shape)
        self.weights = nn.ModuleList(weights)

    def _weights(self) -> list[Weight]:
        return [weight for weight in self.weights if isinstance(weight, Weight)]

    def parts(self) -> list[dict[str, Piece]]:
        return [part for weight in self._weights() for part in weight.parts()]

    def begin(self) -> None:
        for weight in self._weights():
            weight.begin()

    def reorder(self, orders: list[Tensor]) -> None:
        left = list(orders)
        for weight in self._weights():
            count = len(weight.shape.sizes_out)
            weight.reorder(left[:count])
            left = left[count:]

    def repack(self) -> None:
        for weight in self._weights():
            weight.finish()

    def find_kernels(self) -> None:
        self.product = partial(_concatenate, weights=self._weights())


def shapes_of(shape: LinearShape, counts: list[int]) -> list[LinearShape]:
    """Split the shape of a layer into shapes with the next `counts[0]`, `counts[1]` ... of its parts."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    cuts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [replace(shape, sizes_out=shape.sizes_out[cut], outputs=shape.outputs[cut]) for cut in cuts]


def _concatenate(x: Tensor, weights: list[Weight]) -> Tensor:
    return torch.cat([weight.product(x) for weight in weights], 1)
