"""8-bit weights with a scale per output: stored as such, or quantized while they are loaded."""

import functools
from collections.abc import Callable

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
from quire.quant.experts import ExpertShape, StoredExperts
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
"""Inputs of experts on a GPU must be a multiple of this."""


class Int8Format:
    """Builds 8-bit weights. Inputs are quantized as well on a GPU, if there are many."""

    def __init__(self, scheme: Int8, plain: Format) -> None:
        self.scheme = scheme
        self.plain = plain

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        plain = functools.partial(self.plain.linear, parts, shape)
        if not self.scheme.stored:
            return Int8Quantized(shape, plain)
        return Int8Stored(shape, plain, self.scheme)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        plain = functools.partial(self.plain.experts, parts, shape)
        if not self.scheme.stored:
            return Int8QuantizedExperts(shape, plain)
        if self.scheme.weights == "tensor" and are_together(parts):
            raise ConfigError(
                f"{parts[0]} has gate and up in one int8 tensor with one scale for both, which is not "
                "supported: one for each output, or experts that are stored one by one, are"
            )
        return Int8Experts(shape, plain, self.scheme.weights)


class Int8Linear(Weight):
    """Base class of 8-bit weights: their storage and kernels after loading."""

    rounds = False
    """Whether many inputs are quantized as well."""

    def __init__(self, shape: LinearShape, plain: Callable[[], Weight]) -> None:
        super().__init__(shape)
        self.plain = plain
        self.bias = bias_of(shape)
        self.codes: nn.Parameter | None = None
        """After `repack` codes on a GPU, blocks of codes on a CPU, otherwise dequantized values."""
        self.scales: nn.Parameter | None = None
        self.inputs: nn.Parameter | None = None
        """The static scale of inputs, if it is stored."""

    def keep(self, weight: Int8Codes) -> None:
        self.scales = None
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
            weight = Int8Codes(codes, self.scales)
            product = ProductOnGPU(weight, bias, rounds=self.rounds, static=self.inputs)
            self.product, self.gated = product, product.gated if bias is None else None
            self.rows = functools.partial(_rows, weight, shape.dtype)
        else:
            (matrix,) = matrices_of(codes, 1, sum(shape.sizes_out), shape.size_in)
            self.product = LinearProduct([matrix], bias)
            self.rows = functools.partial(GGUFRows(matrix), dtype=shape.dtype)


class Int8Stored(Int8Linear):
    """Codes and scales of a checkpoint; `scale` is the name of the scales, which are divided by `divisor`."""

    def __init__(
        self,
        shape: LinearShape,
        plain: Callable[[], Weight],
        scheme: Int8,
        scale: str = "weight_scale",
        divisor: float = 1.0,
    ) -> None:
        super().__init__(shape, plain)
        self.scheme, self.scale, self.divisor = scheme, scale, divisor
        rows, num_parts = sum(shape.sizes_out), len(shape.sizes_out)
        num_scales = rows if scheme.weights == "channel" else num_parts
        self.codes = empty_parameter(rows, shape.size_in, dtype=torch.int8, device=shape.device)
        self.scales = empty_parameter(num_scales, dtype=torch.float32, device=shape.device)
        self.rounds = scheme.activations != "none"
        if scheme.activations == "static":
            self.inputs = empty_parameter(num_parts, dtype=torch.float32, device=shape.device)

    def parts(self) -> list[dict[str, Piece]]:
        assert self.codes is not None and self.scales is not None
        sizes = list(self.shape.sizes_out)
        parts = [{"weight": Piece(codes, 0, 1)} for codes in self.codes.split(sizes)]
        in_columns = self.scale == "weight_scale"
        for i, part in enumerate(parts):
            if self.scheme.weights == "tensor":
                part[self.scale] = Piece(self.scales[i : i + 1], None)
            else:
                scales = self.scales.split(sizes)[i]
                part[self.scale] = Piece(scales[:, None] if in_columns else scales, 0)
            if self.inputs is not None:
                part["input_scale"] = Piece(self.inputs[i : i + 1], None)
        return with_bias(parts, self.bias, sizes)

    def repack(self) -> None:
        assert self.codes is not None and self.scales is not None
        scales = self.scales.data / self.divisor
        if self.scheme.weights == "tensor":
            scales = scales.repeat_interleave(torch.tensor(self.shape.sizes_out, device=scales.device))
        # All parts have one input and use the largest input scale, which overflows none of them. Inputs with
        # a zero point are quantized dynamically instead.
        is_used = self.inputs is not None and self.scheme.symmetric
        self.inputs = (
            frozen_parameter(self.inputs.data.max()[None]) if self.inputs is not None and is_used else None
        )
        self.keep(Int8Codes(self.codes.data, scales))


class Int8Quantized(Int8Linear):
    """A plain weight while it is loaded, quantized afterwards."""

    def __init__(self, shape: LinearShape, plain: Callable[[], Weight]) -> None:
        super().__init__(shape, plain)
        self.weight: nn.Parameter | None = placeholder_parameter(
            sum(shape.sizes_out), shape.size_in, dtype=shape.dtype, device=shape.device
        )

    def parts(self) -> list[dict[str, Piece]]:
        assert self.weight is not None
        sizes = list(self.shape.sizes_out)
        parts = [{"weight": Piece(rows, 0, 1)} for rows in self.weight.split(sizes)]
        return with_bias(parts, self.bias, sizes)

    def begin(self) -> None:
        assert self.weight is not None
        self.weight = materialize(self.weight)

    def repack(self) -> None:
        assert self.weight is not None
        narrowed = quantize(self.weight.data)
        self.weight = None
        self.keep(narrowed)


class SharedExperts(StoredExperts):
    """Base class of 8-bit experts; see `Int8Linear`."""

    def __init__(self, shape: ExpertShape, plain: Callable[[], StoredExperts]) -> None:
        super().__init__(shape)
        self.plain = plain
        self.gate_up: nn.Parameter | None = None
        self.down: nn.Parameter | None = None
        self.gate_up_scales: nn.Parameter | None = None
        self.down_scales: nn.Parameter | None = None

    def keep(self, gate_up: Int8Codes, down: Int8Codes) -> None:
        shape, both = self.shape, (gate_up, down)
        is_aligned = shape.hidden % _ALIGNED == shape.intermediate % _ALIGNED == 0
        self.gate_up_scales = self.down_scales = None
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
        else:
            num, hidden, inner = shape.experts, shape.hidden, shape.intermediate
            ups, downs = (
                matrices_of(gate_up, num, 2 * inner, hidden),
                matrices_of(down, num, hidden, inner),
            )
            self.mix = CpuExperts([[up] for up in ups], downs, shape.activation, *self.biases)


class Int8Experts(SharedExperts):
    """Codes and scales of a checkpoint's experts."""

    def __init__(
        self,
        shape: ExpertShape,
        plain: Callable[[], StoredExperts],
        weights: str,
        scale: str = "weight_scale",
        divisor: float = 1.0,
    ) -> None:
        super().__init__(shape, plain)
        self.weights, self.scale, self.divisor = weights, scale, divisor
        num, hidden, inner = shape.experts, shape.hidden, shape.intermediate
        make = functools.partial(empty_parameter, num, device=shape.device)
        self.gate_up = make(2 * inner, hidden, dtype=torch.int8)
        self.down = make(hidden, inner, dtype=torch.int8)
        per_channel = weights == "channel"
        self.gate_up_scales = make(2 * inner if per_channel else 2, 1, dtype=torch.float32)
        self.down_scales = make(hidden if per_channel else 1, 1, dtype=torch.float32)

    def parts(self) -> dict[str, dict[str, Piece]]:
        assert self.gate_up is not None and self.down is not None
        assert self.gate_up_scales is not None and self.down_scales is not None
        scales = self.gate_up_scales, self.gate_up_scales.chunk(2, 1), self.down_scales
        gate, up = self.gate_up.chunk(2, 1)
        return {
            "gate_up": self._part(self.gate_up, scales[0]),
            "gate": self._part(gate, scales[1][0]),
            "up": self._part(up, scales[1][1]),
            "down": self._part(self.down, scales[2]),
        }

    def _part(self, codes: Tensor, scales: Tensor) -> dict[str, Piece]:
        of_outputs = 1 if self.weights == "channel" else None
        piece = Piece(scales if self.scale == "weight_scale" else scales[:, :, 0], of_outputs)
        return {"weight": Piece(codes, 1, 2), self.scale: piece}

    def repack(self) -> None:
        assert self.gate_up is not None and self.down is not None
        both = []
        for codes, scales in ((self.gate_up, self.gate_up_scales), (self.down, self.down_scales)):
            assert scales is not None
            wide = scales.data[:, :, 0] / self.divisor
            both.append(Int8Codes(codes.data, wide.repeat_interleave(codes.shape[1] // wide.shape[1], 1)))
        self.keep(*both)


class Int8QuantizedExperts(SharedExperts):
    """Plain experts while they are loaded, quantized afterwards."""

    def __init__(self, shape: ExpertShape, plain: Callable[[], StoredExperts]) -> None:
        super().__init__(shape, plain)
        num, hidden, inner = shape.experts, shape.hidden, shape.intermediate
        make = functools.partial(placeholder_parameter, num, dtype=shape.dtype, device=shape.device)
        self.gate_up = make(2 * inner, hidden)
        self.down = make(hidden, inner)

    def parts(self) -> dict[str, dict[str, Piece]]:
        assert self.gate_up is not None and self.down is not None
        gate, up = self.gate_up.chunk(2, 1)
        weights = {"gate_up": self.gate_up, "gate": gate, "up": up, "down": self.down}
        return {name: {"weight": Piece(weight, 1, 2)} for name, weight in weights.items()}

    def begin(self) -> None:
        assert self.gate_up is not None and self.down is not None
        self.gate_up, self.down = materialize(self.gate_up), materialize(self.down)

    def repack(self) -> None:
        assert self.gate_up is not None and self.down is not None
        gate_up = _quantize_experts(self.gate_up.data)
        self.gate_up = None
        down = _quantize_experts(self.down.data)
        self.down = None
        self.keep(gate_up, down)


def are_together(parts: tuple[str, ...]) -> bool:
    """Whether gate and up are in one tensor; some experts have no gate."""
    return len(parts) == 2 and not parts[0].endswith(".up_proj")


def _quantize_experts(weight: Tensor) -> Int8Codes:
    """Quantize expert by expert, since intermediate values are wide."""
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
