"""FP8 (e4m3) weights with scales: stored in FP8, or quantized while they are loaded.

Inputs are quantized dynamically, with a scale per token (or, for block-wise weights, per 128 values). Input
scales of a checkpoint are not used."""

import functools

import torch
from torch import Tensor, nn

from quire.checkpoint.quant.schemes import Fp8
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.linear import LinearProduct, Matrix
from quire.kernels.cpu.moe import CpuExperts
from quire.kernels.reference.fp8 import BLOCK, E4M3, Scaled, dequantize, linear, quantize_weight
from quire.kernels.reference.moe import ExpertWeights, mix
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.format import Format
from quire.quant.sharding import check_units
from quire.quant.weight import (
    LinearShape,
    MixedWeight,
    Piece,
    Weight,
    bias_of,
    empty_parameter,
    frozen_parameter,
    materialize,
    placeholder_parameter,
    shapes_of,
    with_bias,
)


class Fp8Format:
    """Builds the FP8 weights of one scheme."""

    def __init__(self, scheme: Fp8, plain: Format) -> None:
        self.scheme = scheme
        if scheme.weights == "block" and scheme.block != (BLOCK, BLOCK):
            raise ConfigError(
                f"fp8 weights with a scale for each {scheme.block[0]} x {scheme.block[1]} are not supported;"
                f" {BLOCK} x {BLOCK} are"
            )

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        if self.scheme.weights == "block":
            for part, runs in zip(parts, shape.outputs, strict=False):
                check_units(part, runs, BLOCK, "blocks")
            check_units(", ".join(parts), (shape.inputs,) if shape.inputs else (), BLOCK, "blocks")
            if any(size % BLOCK for size in shape.sizes_out[:-1]):  # no block spans two parts
                return MixedWeight(
                    shape, [Fp8Weight(self.scheme, one) for one in shapes_of(shape, [1] * len(parts))]
                )
        return Fp8Weight(self.scheme, shape)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        if self.scheme.weights == "block" and shape.inner is not None:
            check_units(", ".join(parts), (shape.inner,), BLOCK, "blocks")
        if self.scheme.weights == "block" and shape.intermediate % BLOCK:
            raise ConfigError(
                f"{', '.join(parts)}: blocks of {BLOCK} outputs do not divide the {shape.intermediate} of"
                " gate and up, which are computed as one; use a checkpoint with a scale for each output"
            )
        return Fp8Experts(self.scheme, shape)


class Fp8Weight(Weight):
    """The FP8 weight of a linear layer."""

    def __init__(self, scheme: Fp8, shape: LinearShape) -> None:
        super().__init__(shape)
        self.stored = Fp8Matrices(scheme, (), shape.sizes_out, shape.size_in, shape.dtype, shape.device)
        self.bias = bias_of(shape)

    def parts(self) -> list[dict[str, Piece]]:
        return with_bias(self.stored.pieces(), self.bias, self.shape.sizes_out)

    def begin(self) -> None:
        self.stored.begin()

    def reorder(self, orders: list[Tensor]) -> None:
        blocks = [_order_of_blocks(order) for order in orders]
        if self.stored.per != "block" or any(order is None for order in blocks):
            self.stored.rescale_by_output()
            return super().reorder(orders)
        for part, order, of_blocks in zip(self.parts(), orders, blocks, strict=True):
            for suffix, (tensor, axis, *_) in part.items():
                if axis is not None:
                    new_order = of_blocks if suffix == self.stored.scheme.scale_name else order
                    assert new_order is not None
                    tensor.copy_(tensor.index_select(axis, new_order.to(tensor.device)))

    def repack(self) -> None:
        self.stored.settle()

    def find_kernels(self) -> None:
        weight, bias = self.stored.scaled, self.bias
        self.product = functools.partial(linear, weight=weight, bias=bias)
        if weight.data.is_cuda:
            self._find_on_gpu(weight)
        elif native.serves(self.shape.device, self.shape.dtype):
            self.product = LinearProduct([_cpu_matrix(weight)], bias)

    def _find_on_gpu(self, weight: Scaled) -> None:
        from quire.kernels.triton import fp8
        from quire.kernels.triton.qkv import enter

        if not fp8.is_native():
            return
        bias = self.bias
        self.product = functools.partial(fp8.linear, weight=weight, bias=bias)
        if bias is None and (not weight.is_blocked or len(weight.data) // 2 % BLOCK == 0):
            self.gated = functools.partial(fp8.gated, weight=weight)
        if self.shape.size_in % 16 == 0 and self.shape.dtype.itemsize == 2:
            self.of_gates = functools.partial(fp8.gated_linear, weight=weight, bias=bias)
        self.entered = functools.partial(enter, weight=weight.data, bias=bias, scale=weight.scale)


class Fp8Experts(StoredExperts):
    """The FP8 experts of a layer."""

    def __init__(self, scheme: Fp8, shape: ExpertShape) -> None:
        super().__init__(shape)
        hidden, inner = shape.hidden, shape.intermediate
        make = functools.partial(
            Fp8Matrices, scheme, (shape.experts,), dtype=shape.dtype, device=shape.device
        )
        self.gate_up = make(sizes_out=(inner, inner), size_in=hidden)
        self.down = make(sizes_out=(hidden,), size_in=inner)

    def parts(self) -> dict[str, dict[str, Piece]]:
        gate, up = self.gate_up.pieces()
        return {"gate": gate, "up": up, "gate_up": self.gate_up.whole(), "down": self.down.whole()}

    def begin(self) -> None:
        self.gate_up.begin()
        self.down.begin()

    def reorder(self, order: Tensor) -> None:
        self.gate_up.rescale_by_output()
        super().reorder(order)

    def repack(self) -> None:
        for stored in (self.gate_up, self.down):
            stored.settle()
            if stored.weight.is_cuda and not self._is_native():
                stored.weight.data = dequantize(stored.scaled, self.shape.dtype)

    def _is_native(self) -> bool:
        from quire.kernels.triton.fp8 import is_native

        return is_native() and self.shape.dtype.itemsize == 2

    def find_kernels(self) -> None:
        (gate_up, *_), (down, *_) = weights = self.gate_up.scaled, self.down.scaled
        scales = [weight.scale for weight in weights] if down.dtype == E4M3 else []
        experts = ExpertWeights(gate_up, down, self.gate_up_bias, self.down_bias, *scales)
        activation = self.shape.activation
        self.mix = functools.partial(mix, experts=experts, activation=activation)
        if down.is_cuda:
            from quire.kernels.triton.moe import mix as mix_on_gpu

            self.mix = functools.partial(mix_on_gpu, experts=experts, activation=activation)
        elif native.serves(self.shape.device, self.shape.dtype):
            gates, downs = ([_cpu_matrix(Scaled(*pair)) for pair in zip(*of, strict=True)] for of in weights)
            self.mix = CpuExperts([[part] for part in gates], downs, activation, *self.biases)


class Fp8Matrices(nn.Module):
    """Weights with their scales: one matrix, or several matrices with the leading axes `lead`. A matrix
    combines parts (such as gate and up) with `sizes_out` outputs."""

    def __init__(
        self,
        scheme: Fp8,
        lead: tuple[int, ...],
        sizes_out: tuple[int, ...],
        size_in: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.scheme, self.sizes_out, self.axis = scheme, list(sizes_out), len(lead)
        self.per = scheme.weights
        make = empty_parameter if scheme.stored else placeholder_parameter
        size_out = sum(sizes_out)
        self.weight = make(*lead, size_out, size_in, dtype=E4M3 if scheme.stored else dtype, device=device)
        shape = {
            "channel": (*lead, size_out, 1),
            "tensor": (*lead, len(sizes_out)),
            "block": (*lead, -(-size_out // BLOCK), -(-size_in // BLOCK)),
        }[self.per]
        scale = torch.full(shape, torch.nan, dtype=torch.float32, device=device)
        self.scale = frozen_parameter(scale)

    def pieces(self) -> list[dict[str, Piece]]:
        """Return for each part its tensors to load, by the suffix of their checkpoint names."""
        weights = self.weight.split(self.sizes_out, self.axis)
        if self.per == "tensor":
            scales = list(self.scale.unbind(-1))
        else:
            unit = BLOCK if self.per == "block" else 1
            scales = list(self.scale.split([-(-size // unit) for size in self.sizes_out], self.axis))
        return [self._pieces_of(*pair) for pair in zip(weights, scales, strict=True)]

    def whole(self) -> dict[str, Piece]:
        """Return the tensors to load if all parts are stored in one tensor, by the suffix of their checkpoint
        names; a per-tensor scale goes to the first part."""
        return self._pieces_of(self.weight, self.scale[..., 0] if self.per == "tensor" else self.scale)

    def _pieces_of(self, weight: Tensor, scale: Tensor) -> dict[str, Piece]:
        outputs, inputs = {
            "channel": (self.axis, None),
            "tensor": (None, None),
            "block": (self.axis, self.axis + 1),
        }[self.per]
        pieces = {"weight": Piece(weight, self.axis, self.axis + 1)}
        if self.scheme.stored:
            unit = BLOCK if self.per == "block" else 1
            pieces[self.scheme.scale_name] = Piece(scale, outputs, inputs, unit, unit)
        return pieces

    def begin(self) -> None:
        if not self.scheme.stored:
            self.weight = materialize(self.weight)

    def rescale_by_output(self) -> None:
        """Replace block scales by one scale per output, so that outputs can be reordered."""
        if self.per == "block":
            wide = dequantize(Scaled(self.weight.data, self.scale.data), torch.float32)
            self.weight.data, scale = quantize_weight(wide)
            self.scale.data, self.per = scale[..., None], "channel"

    @property
    def scaled(self) -> Scaled:
        """Return the weight and its scales, once `settle` has quantized or completed them after loading."""
        return Scaled(self.weight.data, self.scale.data)

    def settle(self) -> None:
        """Expand the scales to one per output or block after loading; quantize the weight if the checkpoint
        is not in FP8."""
        if not self.scheme.stored:
            matrices = self.weight.data.flatten(0, -3) if self.axis else self.weight.data[None]
            quantized = [quantize_weight(matrix) for matrix in matrices]  # one by one, to save memory
            shape = self.weight.shape
            self.weight.data = torch.stack([matrix.data for matrix in quantized]).view(shape)
            self.scale.data = torch.stack([matrix.scale for matrix in quantized]).view(shape[:-1])
        elif self.per == "channel":
            self.scale.data = self.scale.data.squeeze(-1)
        elif self.per == "tensor":
            first = self.scale.data[..., :1]
            scales = self.scale.data.where(~self.scale.data.isnan(), first)
            sizes = torch.tensor(self.sizes_out, device=scales.device)
            self.scale.data = scales.repeat_interleave(sizes, -1)


def _order_of_blocks(order: Tensor) -> Tensor | None:
    """Return for each block of reordered outputs the index of the block that they come from; None if the
    outputs of a block come from several blocks."""
    sources = order.div(BLOCK, rounding_mode="floor").split(BLOCK)
    firsts = torch.stack([source[0] for source in sources])
    is_whole = all(bool((source == first).all()) for source, first in zip(sources, firsts, strict=True))
    return firsts if is_whole else None


def _cpu_matrix(weight: Scaled) -> Matrix:
    """Return the weight as a matrix of the CPU kernels."""
    return Matrix.fp8(weight.data, weight.scale, (BLOCK, BLOCK) if weight.is_blocked else None)
