"""NVFP4, MXFP8 and MXFP4 weights: floats of 4 or 8 bits with a scale per block of inputs.

MXFP4 is repacked into the blocks of GGUF files, which have kernels on CPU and GPU. NVFP4 and MXFP8
have kernels on a CPU. On a GPU with FP8 kernels they are converted to FP8 when a layer is loaded;
on other devices they are dequantized. Inputs are quantized only with FP8 weights."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.checkpoint.quant.schemes import BlockFloat, Fp8
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import GGUFRows, interleaves, pack_nvfp4
from quire.kernels.cpu.linear import BLOCK, LinearProduct, Matrix
from quire.kernels.cpu.moe import CpuExperts
from quire.kernels.reference.fp8 import E4M3
from quire.kernels.reference.mxfp4 import in_halves, split_pairs, unpack_pairs
from quire.logs import get_logger, warn_once
from quire.quant.experts import ExpertShape, StoredExperts, are_fused
from quire.quant.format import Format
from quire.quant.fp8 import Fp8Format
from quire.quant.gguf import GGUFFormat
from quire.quant.sharding import Shard, check_units
from quire.quant.weight import (
    LinearShape,
    Piece,
    Weight,
    bias_of,
    empty_parameter,
    frozen_parameter,
    with_bias,
)

logger = get_logger(__name__)

_MOST_VALUES = 1 << 24
"""Number of values that are dequantized at a time."""
_PER_BYTE = 2
"""Number of 4-bit values in a byte."""
_FP8_SCALE = "weight_scale"
"""Suffix of the scales of FP8 weights."""


class _Layout(NamedTuple):
    block: int
    """Number of inputs per scale."""
    codes: torch.dtype
    scales: torch.dtype


_LAYOUTS = {
    "nvfp4": _Layout(16, torch.uint8, E4M3),
    "mxfp4": _Layout(32, torch.uint8, torch.uint8),
    "mxfp8": _Layout(32, E4M3, torch.uint8),
}


class BlockFloatFormat:
    """Builds the weights of one scheme: NVFP4, MXFP8 or MXFP4."""

    def __init__(self, scheme: BlockFloat, plain: Format) -> None:
        self.scheme = scheme
        self.plain = plain

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        _check(self.scheme, ", ".join(parts), shape.input_shard)
        if self._has_cpu_kernels(shape, shape.size_in):
            return WeightOnCPU(self.scheme, shape)
        target = self._target_format(parts, shape, shape.sizes_out, shape.size_in)
        return ConvertedWeight(self.scheme, shape, partial(target.linear, parts, shape))

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        if are_fused(parts):
            raise ConfigError(
                f"{parts[0]}: experts of {self.scheme.kind} are stored one by one, with gate, up and down "
                "separate, but this model has them fused"
            )
        _check(self.scheme, parts[0], Shard(shape.hidden))
        _check(self.scheme, parts[-1], shape.matrices()["down"][1])
        if self._has_cpu_kernels(shape, *(inputs.size for _, inputs in shape.matrices().values())):
            return ExpertsOnCPU(self.scheme, shape)
        target = self._target_format(
            parts, shape, (shape.experts,) * len(parts), shape.intermediate, shape.hidden
        )
        return ConvertedExperts(self.scheme, shape, partial(target.experts, parts, shape))

    def _has_cpu_kernels(self, shape: LinearShape | ExpertShape, *sizes_in: int) -> bool:
        """Return whether the C kernels read these weights as stored."""
        is_stored = self.scheme.kind != "mxfp4" and native.serves(shape.device, shape.dtype)
        return is_stored and not any(size % BLOCK for size in sizes_in)

    def _target_format(
        self, parts: tuple[str, ...], shape: LinearShape | ExpertShape, sizes: Iterable[int], *rest: int
    ) -> Format:
        """Return the format that the weights are converted to after loading."""
        kind = self.scheme.kind
        if kind != "mxfp4" and _has_fp8_kernels(shape.device, shape.dtype):
            return Fp8Format(Fp8(scale_name=_FP8_SCALE), self.plain)
        if kind != "mxfp4":
            warn_once(
                logger,
                f"{kind} weights have no kernels here: they are dequantized and take as much memory as in "
                "an unquantized model",
            )
            return self.plain
        shapes = zip(parts, sizes, strict=False)
        return GGUFFormat({f"{part}.weight": ("MXFP4", size, *rest) for part, size in shapes}, self.plain)


def _has_fp8_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    from quire.kernels.triton.fp8 import is_native

    return device.type == "cuda" and dtype.itemsize == 2 and is_native()


def _check(scheme: BlockFloat, name: str, inputs: Shard) -> None:
    block = _LAYOUTS[scheme.kind].block
    if inputs.all % block:
        raise ConfigError(
            f"{name}: {scheme.kind} has a scale for each {block} inputs, which does not divide {inputs.all}; "
            "leave this layer out of the quantization"
        )
    check_units(name, (inputs,), block, "blocks")


class BlockFloatMatrices:
    """Stored tensors of one part of a layer (such as the query projection): one matrix, or several matrices
    with the leading axes `front`."""

    def __init__(
        self, scheme: BlockFloat, outputs: int, inputs: int, device: torch.device, *front: int
    ) -> None:
        self.scheme, self.layout = scheme, _LAYOUTS[scheme.kind]
        layout = self.layout
        self.per = _PER_BYTE if layout.codes == torch.uint8 else 1
        size = *front, outputs
        self.codes = empty_parameter(*size, inputs // self.per, dtype=layout.codes, device=device)
        self.scales = empty_parameter(*size, inputs // layout.block, dtype=layout.scales, device=device)
        self.tensor_scale = empty_parameter(*front, 1, dtype=torch.float32, device=device)

    def pieces(self) -> dict[str, Piece]:
        rows, columns = self.codes.ndim - 2, self.codes.ndim - 1
        pieces = {
            self.scheme.codes_name: Piece(self.codes, rows, columns, per_input=self.per),
            "weight_scale": Piece(self.scales, rows, columns, per_input=self.layout.block),
        }
        if self.scheme.tensor_scale:
            pieces[self.scheme.tensor_scale] = Piece(self.tensor_scale, None)
        return pieces

    def move_to(self, part: dict[str, Piece]) -> None:
        """Convert the stored tensors and write them to a part of another weight: as blocks of a GGUF file if
        its dtype is uint8, as FP8 if it has scales, otherwise as dequantized values."""
        target = part["weight"].tensor
        if target.dtype == torch.uint8:
            blocks = in_halves(self.codes.data.unflatten(-1, (-1, self.layout.block // _PER_BYTE)))
            target.data = torch.cat((self.scales.data[..., None], blocks), -1).flatten(-2)
            return
        factors = part[_FP8_SCALE].tensor if _FP8_SCALE in part else None
        for i in range(len(target)) if self.codes.ndim == 3 else (...,):
            factor = None if factors is None else factors[i]
            self._write_values(target[i], factor, self.codes[i], self.scales[i], self.tensor_scale[i])

    def _write_values(
        self, into: Tensor, factors: Tensor | None, codes: Tensor, scales: Tensor, tensor_scale: Tensor
    ) -> None:
        """Write the values of a matrix to `into`, divided by a factor for each output if `factors` [outputs,
        1] takes those. Factors of MXFP8 are powers of two, so that its codes are rounded only if they
        underflow."""
        step = max(_MOST_VALUES // into.shape[1], 1)
        for start in range(0, len(into), step):
            rows = slice(start, start + step)
            wide = self._wide_scales(scales[rows], tensor_scale)
            numbers = unpack_pairs(codes[rows]) if self.per == _PER_BYTE else codes[rows].float()
            blocks = (numbers.unflatten(-1, (-1, self.layout.block)) * wide[..., None]).flatten(-2)
            if factors is not None:
                is_exact = self.scheme.kind == "mxfp8"
                largest = wide.amax(1, keepdim=True) if is_exact else blocks.abs().amax(1, keepdim=True) / 448
                factors[rows] = largest.clamp(min=torch.finfo(torch.float32).tiny)
                blocks /= factors[rows]
            into[rows].copy_(blocks)

    def _wide_scales(self, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Return the factors of the blocks of a matrix in float32."""
        if self.scheme.kind != "nvfp4":
            return torch.exp2(scales.float() - 127)
        return scales.float() * (1 / tensor_scale if self.scheme.is_divisor else tensor_scale)

    def cpu_matrices(self) -> list[Matrix]:
        """Return the stored matrices in the format of the C kernels."""
        if self.codes.ndim == 2:
            return [self._cpu_matrix(self.codes.data, self.scales.data, self.tensor_scale.data)]
        stored = zip(self.codes.data, self.scales.data, self.tensor_scale.data, strict=True)
        return [self._cpu_matrix(*tensors) for tensors in stored]

    def _cpu_matrix(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Matrix:
        wide = self._wide_scales(scales, tensor_scale)
        if self.scheme.kind == "mxfp8":
            return Matrix.fp8(codes, wide, (1, self.layout.block))
        return pack_nvfp4(split_pairs(codes), wide, interleaved=interleaves())


class BlockFloatWeight(Weight):
    """A weight that has the tensors of the checkpoint while it is loaded."""

    def __init__(self, scheme: BlockFloat, shape: LinearShape) -> None:
        super().__init__(shape)
        self.bias = bias_of(shape)
        self.stored = [
            BlockFloatMatrices(scheme, size, shape.size_in, shape.device) for size in shape.sizes_out
        ]

    def parts(self) -> list[dict[str, Piece]]:
        return with_bias([part.pieces() for part in self.stored], self.bias, self.shape.sizes_out)


class ConvertedWeight(BlockFloatWeight):
    """A weight that is converted after loading to another weight, which `build` creates."""

    def __init__(self, scheme: BlockFloat, shape: LinearShape, build: Callable[[], Weight]) -> None:
        super().__init__(scheme, shape)
        self.build = build
        self.target: Weight | None = None

    def finish(self) -> None:
        target = self.build()
        target.begin()
        for stored, packed, part in zip(self.stored, self.parts(), target.parts(), strict=True):
            stored.move_to(part)
            if "bias" in part:
                part["bias"].tensor.copy_(packed["bias"].tensor)
        self.stored, self.bias, self.target = [], None, target
        target.finish()
        self.use_kernels(target)


class WeightOnCPU(BlockFloatWeight):
    """An NVFP4 or MXFP8 weight for the C kernels."""

    def finish(self) -> None:
        matrices = [matrix for stored in self.stored for matrix in stored.cpu_matrices()]
        self.stored, self.packed = [], _tensors_of(matrices)
        self.product = LinearProduct(matrices, self.bias)
        self.rows = partial(GGUFRows(matrices[0]), dtype=self.shape.dtype)


def _tensors_of(matrices: Iterable[Matrix]) -> nn.ParameterList:
    return nn.ParameterList(frozen_parameter(tensor) for matrix in matrices for tensor in matrix.held)


class BlockFloatExperts(StoredExperts):
    """Experts of a layer that have the tensors of the checkpoint while they are loaded."""

    def __init__(self, scheme: BlockFloat, shape: ExpertShape) -> None:
        super().__init__(shape)
        self.stored = {
            name: BlockFloatMatrices(scheme, outputs.size, inputs.size, shape.device, shape.experts)
            for name, (outputs, inputs) in shape.matrices().items()
        }

    def parts(self) -> dict[str, dict[str, Piece]]:
        return {name: stored.pieces() for name, stored in self.stored.items()}


class ConvertedExperts(BlockFloatExperts):
    """Experts that are converted after loading to other experts, which `build` creates."""

    def __init__(self, scheme: BlockFloat, shape: ExpertShape, build: Callable[[], StoredExperts]) -> None:
        super().__init__(scheme, shape)
        self.build = build
        self.target: StoredExperts | None = None

    def finish(self) -> None:
        target = self.build()
        target.begin()
        for name, stored in self.stored.items():
            stored.move_to(target.parts()[name])
        for name, piece in self.bias_parts().items():
            target.bias_parts()[name].tensor.copy_(piece.tensor)
        self.stored, self.target = {}, target
        self.gate_up_bias = self.down_bias = None
        target.finish()
        self.mix, self.adapts = target.mix, target.adapts

    def by_expert(self) -> list[list[Tensor]]:
        assert self.target is not None
        return self.target.by_expert()


class ExpertsOnCPU(BlockFloatExperts):
    """NVFP4 or MXFP8 experts for the C kernels."""

    def finish(self) -> None:
        gate, up, down = (self.stored[name].cpu_matrices() for name in ("gate", "up", "down"))
        self.stored, self.packed = {}, _tensors_of((*gate, *up, *down))
        gate_up = list(zip(gate, up, strict=True))
        self.mix = CpuExperts(gate_up, down, self.shape.activation, *self.biases)
