"""GGUF weights that stay packed, on a CPU with native kernels."""

import torch
from torch import Tensor, nn

from quire.kernels import native
from quire.kernels.experts import Routing
from quire.kernels.linear import Product
from quire.kernels.ops import Entry
from quire.kernels.quantized import TYPES, Lookup, interleaves, pack
from quire.quant.method import LinearMethod, add_bias
from quire.quant.plain import Plain


def choose(parts: list[tuple[str | int, ...]], device: torch.device) -> LinearMethod:
    """For a layer of parts given as (ggml type, rows, columns): packed if the kernels know all the types,
    else unpacked."""
    kinds = tuple(str(kind) for kind, *_ in parts)
    known = all(kind in TYPES for kind in kinds) and all(len(shape) == 2 for _, *shape in parts)
    if not kinds or not known or device.type != "cpu" or native.library() is None:
        return Plain()
    return Packed(kinds)


class Packed:
    """The bytes of the file while loading, the order that the kernel reads best afterwards."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds

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
        # A part that the file lacks takes any type: loading will say that it is missing.
        self.kinds += self.kinds[-1:] * (len(sizes_out) - len(self.kinds))
        for i, (kind, size_out) in enumerate(zip(self.kinds, sizes_out, strict=True)):
            form = TYPES[kind]
            shape = (size_out, size_in // form.stored_columns * form.stored_bytes)
            nothing = torch.empty(
                1, dtype=torch.uint8, device=device
            )  # the source will put its own bytes there
            stored = nothing.expand(shape)
            layer.register_parameter(f"packed_{i}", nn.Parameter(stored, requires_grad=False))
        add_bias(layer, sum(sizes_out) if bias else 0, dtype, device)

    def parts(self, layer: nn.Module, sizes_out: tuple[int, ...]) -> list[dict[str, Tensor]]:
        parts: list[dict[str, Tensor]] = [
            {"weight": layer.get_parameter(f"packed_{i}")} for i in range(len(sizes_out))
        ]
        bias = layer._parameters["bias"]
        if bias is not None:
            for part, piece in zip(parts, bias.split(list(sizes_out)), strict=True):
                part["bias"] = piece
        return parts

    def reorder(self, layer: nn.Module, sizes_out: tuple[int, ...], orders: list[Tensor]) -> None:
        for part, order in zip(self.parts(layer, sizes_out), orders, strict=True):
            part["weight"].data = part["weight"].data[order]
            if "bias" in part:
                part["bias"].copy_(part["bias"][order])

    def finish(self, layer: nn.Module) -> None:
        matrices = []
        for i, kind in enumerate(self.kinds):
            parameter = layer.get_parameter(f"packed_{i}")
            matrices.append(pack(parameter.data, kind, interleaved=interleaves()))
            parameter.data = matrices[-1].data
        layer.__dict__["product"] = Product(matrices, layer._parameters["bias"])
        layer.__dict__["lookup"] = Lookup(matrices[0])

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        product: Product = layer.__dict__["product"]
        return product(x)

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        return None

    def entered(self, layer: nn.Module, x: Tensor, entry: Entry) -> Tensor | None:
        return None

    def chosen(
        self, layer: nn.Module, x: Tensor, routing: Routing, bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        return None

    def rows(self, layer: nn.Module, ids: Tensor, dtype: torch.dtype) -> Tensor:
        lookup: Lookup = layer.__dict__["lookup"]
        return lookup(ids, dtype)
