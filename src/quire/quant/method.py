"""LinearMethod: the format of a linear layer's weight, apart from what the layer is for."""

from typing import Protocol

import torch
from torch import Tensor, nn

from quire.kernels.experts import Routing
from quire.kernels.ops import Entry


class LinearMethod(Protocol):
    """Stateless; what it needs at run time are tensors of the layer.

    A layer is made of one or more parts of the checkpoint, stacked along its output (query, key, value).
    """

    def create(
        self,
        layer: nn.Module,
        size_in: int,
        sizes_out: tuple[int, ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Give `layer` its tensors, unfilled; `sizes_out` has one entry for each part."""
        ...

    def parts(self, layer: nn.Module, sizes_out: tuple[int, ...]) -> list[dict[str, Tensor]]:
        """For each part: the views that loading fills, by the suffix of their checkpoint name."""
        ...

    def reorder(self, layer: nn.Module, sizes_out: tuple[int, ...], orders: list[Tensor]) -> None:
        """After loading and before `finish`: the outputs of each part in another order."""
        ...

    def finish(self, layer: nn.Module) -> None:
        """Called once after loading: repack."""
        ...

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor: ...

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """For a layer of a gate and an up part: silu(gate) * up, where one kernel does that; else None."""
        ...

    def entered(self, layer: nn.Module, x: Tensor, entry: Entry) -> Tensor | None:
        """For a layer of query, key and value: `Ops.rotate_and_write` of the product, where one kernel does
        both; else None."""
        ...

    def chosen(
        self, layer: nn.Module, x: Tensor, routing: Routing, bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """For a router: `Ops.route` of the product, where one kernel does both; else None."""
        ...

    def rows(self, layer: nn.Module, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, for an embedding: [T] ids -> [T, size_in]."""
        ...


def row_parts(layer: nn.Module, sizes_out: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """`parts` for formats that keep a row of each tensor for each output."""
    tensors = {name: torch.split(tensor, list(sizes_out)) for name, tensor in layer.named_parameters()}
    return [{name: pieces[i] for name, pieces in tensors.items()} for i in range(len(sizes_out))]


def reorder_rows(layer: nn.Module, sizes_out: tuple[int, ...], orders: list[Tensor]) -> None:
    """`reorder` for the same formats."""
    for part, order in zip(row_parts(layer, sizes_out), orders, strict=True):
        for tensor in part.values():
            tensor.copy_(tensor[order.to(tensor.device)])


def add_bias(layer: nn.Module, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """`size` unfilled numbers, or None if `size` is 0."""
    bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False) if size else None
    layer.register_parameter("bias", bias)
