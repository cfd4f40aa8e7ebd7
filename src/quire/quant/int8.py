"""8-bit weights with a scale per output: stored in int8, or quantized while they are loaded."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.checkpoint.quant.schemes import Int8
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import GGUFRows
from quire.kernels.cpu.linear import LinearProduct
from quire.kernels.cpu.moe import CpuExperts
from quire.kernels.reference.int8 import Int8Codes, as_blocks, fits_blocks, matrices_of, quantize
from quire.quant.dequantized import dequantize_experts, dequantize_weight, use_plain, use_plain_experts
from quire.quant.experts import ExpertShape, StoredExperts, are_fused
from quire.quant.format import Format
from quire.quant.weight import (
    LinearShape,
    Piece,
    Weight,
    bias_of,
    empty_parameter,
    frozen_parameter,
    materialize,
    placeholder_parameter,
    with_bias,
)

_ALIGNED = 16
"""Sizes of experts must be multiples of this number for the GPU kernels."""


class Int8Format:
    """Builds 8-bit weights. On a GPU, inputs are quantized as well in steps with many tokens."""

    def __init__(self, scheme: Int8, plain: Format) -> None:
        self.scheme = scheme
        self.plain = plain

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        return Int8Weight(shape, functools.partial(self.plain.linear, parts, shape), self.scheme)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        if self.scheme.stored and self.scheme.weights == "tensor" and are_fused(parts):
            raise ConfigError(
                f"{parts[0]} has gate and up in one int8 tensor with one scale for both, which is not "
                "supported: one for each output, or experts that are stored one by one, are"
            )
        return Int8Experts(shape, functools.partial(self.plain.experts, parts, shape), self.scheme)


class Int8Matrices(nn.Module):
    """Codes with their scales: one matrix, or several matrices with the leading axes `lead`. A matrix
    combines parts (such as gate and up) with `sizes_out` outputs. Weights of an unquantized checkpoint are
    loaded as they are, and quantized afterwards. `scale` is the name of the scales in checkpoints; stored
    scales are divided by `divisor`."""

    def __init__(
        self,
        scheme: Int8,
        lead: tuple[int, ...],
        sizes_out: tuple[int, ...],
        size_in: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: str = "weight_scale",
        divisor: float = 1.0,
    ) -> None:
        super().__init__()
        self.scheme, self.sizes_out, self.axis = scheme, list(sizes_out), len(lead)
        self.scale, self.divisor = scale, divisor
        self.scales: nn.Parameter | None = None
        if not scheme.stored:
            self.codes = placeholder_parameter(*lead, sum(sizes_out), size_in, dtype=dtype, device=device)
            return
        num_scales = sum(sizes_out) if scheme.weights == "channel" else len(sizes_out)
        self.codes = empty_parameter(*lead, sum(sizes_out), size_in, dtype=torch.int8, device=device)
        self.scales = empty_parameter(*lead, num_scales, dtype=torch.float32, device=device)

    def pieces(self) -> list[dict[str, Piece]]:
        """Return for each part its tensors to load, by the suffix of their checkpoint names."""
        parts, per_channel = self.codes.split(self.sizes_out, self.axis), self.scheme.weights == "channel"
        if self.scales is None:
            return [self._pieces_of(codes, None) for codes in parts]
        scales = self.scales.split(self.sizes_out if per_channel else 1, self.axis)
        return [self._pieces_of(*pair) for pair in zip(parts, scales, strict=True)]

    def whole(self) -> dict[str, Piece]:
        """Return the tensors to load if all parts are stored in one tensor, by the suffix of their checkpoint
        names."""
        return self._pieces_of(self.codes, self.scales)

    def _pieces_of(self, codes: Tensor, scales: Tensor | None) -> dict[str, Piece]:
        pieces = {"weight": Piece(codes, self.axis, self.axis + 1)}
        if scales is not None and self.scheme.weights == "channel":
            in_columns = self.scale == "weight_scale"
            pieces[self.scale] = Piece(scales[..., None] if in_columns else scales, self.axis)
        elif scales is not None:
            pieces[self.scale] = Piece(scales[..., None] if self.axis else scales, None)
        return pieces

    def begin(self) -> None:
        if not self.scheme.stored:
            self.codes = materialize(self.codes)

    def settle(self) -> Int8Codes:
        """Return codes with one scale per output; quantize the weight if the checkpoint stores no codes."""
        if self.scales is None:
            return _quantize_each(self.codes.data) if self.axis else quantize(self.codes.data)
        scales = self.scales.data / self.divisor
        if self.scheme.weights == "tensor":
            sizes = torch.tensor(self.sizes_out, device=scales.device)
            scales = scales.repeat_interleave(sizes, self.axis)
        return Int8Codes(self.codes.data, scales)


class Int8Weight(Weight):
    """An 8-bit weight: stored codes and scales, or an unquantized weight that is quantized after loading."""

    def __init__(self, shape: LinearShape, plain: Callable[[], Weight], scheme: Int8, **options: Any) -> None:
        """Build an `Int8Weight`. `plain` builds the unquantized weight that replaces it if no kernel supports
        the codes; `options` are those of `Int8Matrices`."""
        super().__init__(shape)
        self.plain, self.scheme = plain, scheme
        self.stored: Int8Matrices | None = Int8Matrices(
            scheme, (), shape.sizes_out, shape.size_in, shape.dtype, shape.device, **options
        )
        self.bias = bias_of(shape)
        self.codes: nn.Parameter | None = None
        """None before `repack`; afterwards codes on a GPU, blocks of codes on a CPU, or dequantized
        values."""
        self.scales: nn.Parameter | None = None
        self.inputs: nn.Parameter | None = None
        """Static scale of inputs; None if inputs are quantized dynamically or not at all."""
        if scheme.stored and scheme.activations == "static":
            self.inputs = empty_parameter(len(shape.sizes_out), dtype=torch.float32, device=shape.device)

    def parts(self) -> list[dict[str, Piece]]:
        assert self.stored is not None
        parts = self.stored.pieces()
        if self.inputs is not None:
            for i, part in enumerate(parts):
                part["input_scale"] = Piece(self.inputs[i : i + 1], None)
        return with_bias(parts, self.bias, self.shape.sizes_out)

    def begin(self) -> None:
        assert self.stored is not None
        self.stored.begin()

    def repack(self) -> None:
        assert self.stored is not None
        weight, self.stored = self.stored.settle(), None
        if self.inputs is not None:
            # All parts have the same input and use the largest of their input scales, so that nothing
            # overflows. Inputs with a zero point are quantized dynamically instead.
            self.inputs = frozen_parameter(self.inputs.data.max()[None]) if self.scheme.symmetric else None
        if weight.codes.is_cuda:
            self.codes, self.scales = frozen_parameter(weight.codes), frozen_parameter(weight.scales)
        elif native.serves(self.shape.device, self.shape.dtype) and fits_blocks(weight):
            self.codes = frozen_parameter(as_blocks(weight))
        else:
            values = weight.widened(torch.float32)
            self.codes = dequantize_weight(self.plain, values, _missing_kernel(weight, self.shape))

    def find_kernels(self) -> None:
        shape, codes, bias = self.shape, self.codes, self.bias
        assert codes is not None
        if codes.is_floating_point():
            use_plain(self, codes, bias)
        elif codes.is_cuda:
            from quire.kernels.triton.int8 import Int8GEMM as ProductOnGPU

            assert self.scales is not None
            weight, scheme = Int8Codes(codes, self.scales), self.scheme
            rounds = scheme.stored and scheme.activations != "none"
            product = ProductOnGPU(weight, bias, rounds=rounds, static=self.inputs)
            self.product, self.gated = product, product.gated if bias is None else None
            self.rows = functools.partial(_rows, weight, shape.dtype)
        else:
            (matrix,) = matrices_of(codes, 1, sum(shape.sizes_out), shape.size_in)
            self.product = LinearProduct([matrix], bias)
            self.rows = functools.partial(GGUFRows(matrix), dtype=shape.dtype)


class Int8Experts(StoredExperts):
    """8-bit experts: stored codes and scales, or unquantized experts that are quantized after loading."""

    def __init__(
        self, shape: ExpertShape, plain: Callable[[], StoredExperts], scheme: Int8, **options: Any
    ) -> None:
        super().__init__(shape)
        self.plain = plain
        hidden, inner = shape.hidden, shape.intermediate
        make = functools.partial(
            Int8Matrices, scheme, (shape.experts,), dtype=shape.dtype, device=shape.device, **options
        )
        self.stored_gate_up: Int8Matrices | None = make(sizes_out=(inner, inner), size_in=hidden)
        self.stored_down: Int8Matrices | None = make(sizes_out=(hidden,), size_in=inner)
        self.gate_up: nn.Parameter | None = None
        self.down: nn.Parameter | None = None
        self.gate_up_scales: nn.Parameter | None = None
        self.down_scales: nn.Parameter | None = None

    def parts(self) -> dict[str, dict[str, Piece]]:
        assert self.stored_gate_up is not None and self.stored_down is not None
        gate, up = self.stored_gate_up.pieces()
        whole, down = self.stored_gate_up.whole(), self.stored_down.whole()
        return {"gate_up": whole, "gate": gate, "up": up, "down": down}

    def begin(self) -> None:
        assert self.stored_gate_up is not None and self.stored_down is not None
        self.stored_gate_up.begin()
        self.stored_down.begin()

    def repack(self) -> None:
        assert self.stored_gate_up is not None and self.stored_down is not None
        gate_up, self.stored_gate_up = self.stored_gate_up.settle(), None
        down, self.stored_down = self.stored_down.settle(), None
        shape, both = self.shape, (gate_up, down)
        is_aligned = shape.hidden % _ALIGNED == shape.intermediate % _ALIGNED == 0
        if gate_up.codes.is_cuda and is_aligned:
            self.gate_up, self.down = (frozen_parameter(codes.codes) for codes in both)
            self.gate_up_scales, self.down_scales = (frozen_parameter(codes.scales) for codes in both)
        elif native.serves(shape.device, shape.dtype) and all(map(fits_blocks, both)):
            self.gate_up, self.down = (frozen_parameter(as_blocks(codes)) for codes in both)
        else:
            wide = [codes.widened(torch.float32) for codes in both]
            reason = _missing_kernel(gate_up if fits_blocks(down) else down, shape)
            self.gate_up, self.down = dequantize_experts(self.plain, wide[0], wide[1], reason)

    def find_kernels(self) -> None:
        shape, gate_up, down = self.shape, self.gate_up, self.down
        assert gate_up is not None and down is not None
        if gate_up.is_floating_point():
            use_plain_experts(self, gate_up, down)
        elif gate_up.is_cuda:
            from quire.kernels.triton.int8_moe import ExpertCodes, mix

            assert self.gate_up_scales is not None and self.down_scales is not None
            both = Int8Codes(gate_up, self.gate_up_scales), Int8Codes(down, self.down_scales)
            experts = ExpertCodes(*both, *self.biases)
            self.mix = functools.partial(mix, experts=experts, activation=shape.activation)
            self.adapts = False
        else:
            num, hidden, inner = shape.experts, shape.hidden, shape.intermediate
            ups, downs = (
                matrices_of(gate_up, num, 2 * inner, hidden),
                matrices_of(down, num, hidden, inner),
            )
            self.mix = CpuExperts([[up] for up in ups], downs, shape.activation, *self.biases)


def _quantize_each(weight: Tensor) -> Int8Codes:
    """Quantize the weights of one expert after another, since the intermediate values of all experts would
    take much memory."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    for i, expert in enumerate(weight):
        codes[i], scales[i] = quantize(expert)
    return Int8Codes(codes, scales)


def _rows(weight: Int8Codes, dtype: torch.dtype, ids: Tensor) -> Tensor:
    return Int8Codes(weight.codes[ids], weight.scales[ids]).widened(dtype)


def _missing_kernel(weight: Int8Codes, shape: LinearShape | ExpertShape) -> str:
    if not native.serves(shape.device, shape.dtype):
        return f"int8 weights in {shape.dtype} have no kernels here"
    return f"int8 weights of {weight.codes.shape[-1]} columns or scales like these have no kernels here"
