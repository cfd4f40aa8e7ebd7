"""GGUF weights that stay packed, on a CPU with native kernels."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.kernels import native
from quire.kernels.cpu_experts import Experts
from quire.kernels.experts import Routing
from quire.kernels.linear import Matrix, Product
from quire.kernels.ops import Entry
from quire.kernels.quantized import TYPES, Lookup, group_rows, interleaves, pack
from quire.quant.experts import ExpertMethod, ExpertShape, PlainExperts, add_biases
from quire.quant.method import LinearMethod, add_bias
from quire.quant.plain import Plain


def choose(parts: list[tuple[str | int, ...]], device: torch.device) -> LinearMethod:
    """For a layer of parts given as (ggml type, rows, columns): packed if the kernels know all the types,
    else unpacked."""
    return Packed(_kinds(parts)) if _can_stay(parts, 2, device) else Plain()


def choose_experts(parts: list[tuple[str | int, ...]], device: torch.device) -> ExpertMethod:
    """The same for the gate, up and down of all experts of a layer, given as (ggml type, experts, rows,
    columns)."""
    stay = len(parts) == 3 and _can_stay(parts, 3, device)
    return PackedExperts(_kinds(parts)) if stay else PlainExperts()


def _kinds(parts: list[tuple[str | int, ...]]) -> tuple[str, ...]:
    return tuple(str(kind) for kind, *_ in parts)


def _can_stay(parts: list[tuple[str | int, ...]], num_dims: int, device: torch.device) -> bool:
    known = all(kind in TYPES and len(shape) == num_dims for kind, *shape in parts)
    return bool(parts) and known and device.type == "cpu" and native.library() is not None


def _unfilled(kind: str, *shape: int, device: torch.device) -> nn.Parameter:
    """For bytes of a file that hold matrices of this shape: the source will put its own in their place."""
    form, (*rows, columns) = TYPES[kind], shape
    stored = columns // form.stored_columns * form.stored_bytes
    nothing = torch.empty(1, dtype=torch.uint8, device=device)
    return nn.Parameter(nothing.expand(*rows[:1], math.prod(rows[1:]) * stored), requires_grad=False)


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
            layer.register_parameter(f"packed_{i}", _unfilled(kind, size_out, size_in, device=device))
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


class PackedExperts:
    """`Packed`, for the experts of a layer: the kinds are those of gate, up and down."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = dict(zip(("gate", "up", "down"), kinds, strict=True))

    def create(
        self, layer: nn.Module, shape: ExpertShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        for name, kind in self.kinds.items():
            packed = _unfilled(kind, shape.experts, *_matrix_shape(name, shape), device=device)
            layer.register_parameter(name, packed)
        add_biases(layer, shape, dtype, device)

    def parts(self, layer: nn.Module, shape: ExpertShape) -> dict[str, Tensor]:
        return dict(layer.named_parameters())

    def finish(self, layer: nn.Module, shape: ExpertShape) -> None:
        matrices = {}
        for name, kind in self.kinds.items():
            rows, _ = _matrix_shape(name, shape)
            parameter = layer.get_parameter(name)
            stored = parameter.data.view(shape.experts * rows, -1)
            whole = pack(stored, kind, interleaved=interleaves())
            matrices[name] = _cut(whole, shape.experts)
            parameter.data = whole.data
        biases = [layer.get_parameter(name) for name in ("gate_up_bias", "down_bias") if shape.bias]
        gate_up = list(zip(matrices["gate"], matrices["up"], strict=True))
        layer.__dict__["mix"] = Experts(gate_up, matrices["down"], shape.activation, *biases)

    def apply(self, layer: nn.Module, shape: ExpertShape, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts: Experts = layer.__dict__["mix"]
        return experts(x, ids, weights)


def _matrix_shape(name: str, shape: ExpertShape) -> tuple[int, int]:
    """Rows and columns of an expert's gate, up or down."""
    sizes = shape.intermediate, shape.hidden
    return sizes[::-1] if name == "down" else sizes


def _cut(whole: Matrix, num: int) -> list[Matrix]:
    """A matrix as `num` of as many rows each.

    No two have rows in one group: as many columns as one has rows are whole blocks in the other projection.
    """
    rows = whole.rows // num
    assert not whole.interleaved or rows % group_rows() == 0
    size = rows * whole.row_bytes
    return [replace(whole, data=whole.data[i * size :], rows=rows) for i in range(num)]
