"""Unquantized weights, in the model's dtype or in a narrower dtype that matmuls widen."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import GGUFRows
from quire.kernels.cpu.linear import LinearProduct, Matrix
from quire.kernels.cpu.moe import CpuExperts
from quire.kernels.ops import choose
from quire.kernels.reference.moe import ExpertWeights, mix
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.weight import LinearShape, Piece, Weight, bias_of, empty_parameter, frozen_parameter


class PlainWeight(Weight):
    """The unquantized weight of a linear layer, in the layer's dtype or `stored_dtype`."""

    def __init__(self, shape: LinearShape, stored_dtype: torch.dtype | None = None) -> None:
        super().__init__(shape)
        size = sum(shape.sizes_out), shape.size_in
        self.weight = empty_parameter(*size, dtype=stored_dtype or shape.dtype, device=shape.device)
        self.bias = bias_of(shape)
        self.padded_sizes = list(shape.sizes_out)
        """Number of outputs of each part, including zero padding."""

    def widen(self, *, outputs: int = 1, inputs: int = 1) -> None:
        """Pad the outputs of each part to a multiple of `outputs`, and the inputs to a multiple of `inputs`,
        with zeros, before loading. Library GEMMs are slow on rows that are not aligned."""
        self.padded_sizes = [-(-size // outputs) * outputs for size in self.shape.sizes_out]
        size = sum(self.padded_sizes), -(-self.shape.size_in // inputs) * inputs
        self.weight = frozen_parameter(self.weight.new_zeros(size))
        if self.bias is not None:
            self.bias = frozen_parameter(self.bias.new_zeros(size[0]))

    def parts(self) -> list[dict[str, Piece]]:
        sizes, size_in = self.shape.sizes_out, self.shape.size_in
        rows = zip(self.weight.split(self.padded_sizes), sizes, strict=True)
        parts = [{"weight": Piece(weight[:size, :size_in], 0, 1)} for weight, size in rows]
        if self.bias is not None:
            for part, piece, size in zip(parts, self.bias.split(self.padded_sizes), sizes, strict=True):
                part["bias"] = Piece(piece[:size])
        return parts

    def find_kernels(self) -> None:
        weight = self.weight
        self.product = product_of(weight, self.bias, self.shape.dtype)
        if weight.dtype == self.shape.dtype:
            self.rows = functools.partial(choose(weight.device, weight.dtype).embed, table=weight)
        if weight.is_cuda:
            self._find_on_gpu()
        elif self.rows is None and native.serves(weight.device, weight.dtype):
            self.rows = functools.partial(GGUFRows(Matrix.plain(weight)), dtype=self.shape.dtype)

    def _find_on_gpu(self) -> None:
        from quire.kernels.triton.matmul import gated
        from quire.kernels.triton.moe_topk import choose as choose_experts
        from quire.kernels.triton.qkv import enter

        weight, bias = self.weight, self.bias
        self.gated = functools.partial(gated, weight=weight) if bias is None else None
        self.entered = functools.partial(enter, weight=weight, bias=bias)
        self.adapted, self.gated_adapted, self.entered_adapted = self.product, self.gated, self.entered
        self.chosen = functools.partial(choose_experts, router=weight, router_bias=bias)


def product_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the fastest function that computes x W^T + b [T, size_out] of x [T, size_in] in `dtype`."""
    wide = dtype == torch.float32
    if weight.is_cuda:
        from quire.kernels.triton.matmul import linear

        return functools.partial(linear, weight=weight, bias=bias)
    if native.serves(weight.device, weight.dtype):
        return LinearProduct([Matrix.plain(weight)], bias, wide=wide)
    return functools.partial(_float32_linear if wide else F.linear, weight=weight, bias=bias)


class PlainExperts(StoredExperts):
    """The unquantized experts of a layer, in the layer's dtype or `stored_dtype`."""

    def __init__(self, shape: ExpertShape, stored_dtype: torch.dtype | None = None) -> None:
        super().__init__(shape)
        num, hidden, inner = shape.experts, shape.hidden, shape.intermediate
        dtype = stored_dtype or shape.dtype
        self.gate_up = empty_parameter(num, 2 * inner, hidden, dtype=dtype, device=shape.device)
        self.down = empty_parameter(num, hidden, inner, dtype=dtype, device=shape.device)

    def parts(self) -> dict[str, dict[str, Piece]]:
        gate, up = self.gate_up.split(self.shape.intermediate, dim=1)
        weights = {"gate_up": self.gate_up, "gate": gate, "up": up, "down": self.down}
        return {name: {"weight": Piece(weight, 1, 2)} for name, weight in weights.items()}

    def find_kernels(self) -> None:
        experts, activation = ExpertWeights(self.gate_up, self.down, *self.biases), self.shape.activation
        if self.down.is_cuda:
            from quire.kernels.triton.moe import mix as mix_on_gpu

            self.mix = functools.partial(mix_on_gpu, experts=experts, activation=activation)
        elif native.serves(self.down.device, self.down.dtype):
            gates, downs = ([Matrix.plain(weight) for weight in of] for of in experts[:2])
            self.mix = CpuExperts([[part] for part in gates], downs, activation, *self.biases)
        else:
            self.mix = functools.partial(mix, experts=experts, activation=activation)


class PlainFormat:
    """Builds unquantized weights, in their layer's dtype or `stored_dtype`."""

    def __init__(self, stored_dtype: torch.dtype | None = None) -> None:
        self.stored_dtype = stored_dtype

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        return PlainWeight(shape, self.stored_dtype)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        return PlainExperts(shape, self.stored_dtype)


def _float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b [T, size_out] in float32, for inputs and weights that may be narrower."""
    return F.linear(x.float(), weight.float(), bias)
