"""NVFP4, MXFP8 and MXFP4 weights: floats of 4 or 8 bits with a scale per block of inputs.

MXFP4 is repacked into the blocks of GGUF files, which have kernels on CPU and GPU. NVFP4 and
MXFP8 are dequantized when a layer is loaded. Inputs are not quantized."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checkpoint.quant.schemes import BlockFloat
from quire.errors import ConfigError
from quire.kernels.reference.fp8 import E4M3
from quire.kernels.reference.mxfp4 import in_halves, unpack_pairs
from quire.logs import get_logger, warn_once
from quire.quant.experts import ExpertShape, StoredExperts, are_fused
from quire.quant.format import Format
from quire.quant.gguf import GGUFFormat
from quire.quant.sharding import Shard, check_units
from quire.quant.weight import LinearShape, Piece, Weight, bias_of, empty_parameter, with_bias

logger = get_logger(__name__)

_MOST_VALUES = 1 << 24
"""Number of values that are dequantized at a time."""
_PER_BYTE = 2
"""Number of 4-bit values in a byte."""


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
        build = partial(self._target_format(parts, shape.sizes_out, shape.size_in).linear, parts, shape)
        return BlockFloatWeight(self.scheme, shape, build)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        if are_fused(parts):
            raise ConfigError(
                f"{parts[0]}: experts of {self.scheme.kind} are stored one by one, with gate, up and down "
                "separate, but this model has them fused"
            )
        _check(self.scheme, parts[0], Shard(shape.hidden))
        _check(self.scheme, parts[-1], shape.matrices()["down"][1])
        target = self._target_format(parts, (shape.experts,) * len(parts), shape.intermediate, shape.hidden)
        return BlockFloatExperts(self.scheme, shape, partial(target.experts, parts, shape))

    def _target_format(self, parts: tuple[str, ...], sizes: Iterable[int], *rest: int) -> Format:
        """Return the format that the weights are converted to after loading."""
        if self.scheme.kind != "mxfp4":
            return self.plain
        shapes = zip(parts, sizes, strict=False)
        return GGUFFormat({f"{part}.weight": ("MXFP4", size, *rest) for part, size in shapes}, self.plain)


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

    def move_to(self, target: Tensor) -> None:
        """Convert the stored tensors and write them to `target`: as blocks of a GGUF file if its dtype is
        uint8, otherwise as dequantized values."""
        if target.dtype == torch.uint8:
            blocks = in_halves(self.codes.data.unflatten(-1, (-1, self.layout.block // _PER_BYTE)))
            target.data = torch.cat((self.scales.data[..., None], blocks), -1).flatten(-2)
            return
        matrices = self.codes.ndim == 3
        warn_once(
            logger,
            f"{self.scheme.kind} weights have no kernels here: they are dequantized and take as much memory "
            "as in an unquantized model",
        )
        for i in range(len(target)) if matrices else (...,):
            self._write_values(target[i], self.codes[i], self.scales[i], self.tensor_scale[i])

    def _write_values(self, into: Tensor, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> None:
        step = max(_MOST_VALUES // into.shape[1], 1)
        for start in range(0, len(into), step):
            rows = slice(start, start + step)
            if self.scheme.kind == "nvfp4":
                factor = 1 / tensor_scale if self.scheme.is_divisor else tensor_scale
                wide = scales[rows].float() * factor
            else:
                wide = torch.exp2(scales[rows].float() - 127)
            numbers = unpack_pairs(codes[rows]) if self.per == _PER_BYTE else codes[rows].float()
            blocks = numbers.unflatten(-1, (-1, self.layout.block)) * wide[..., None]
            into[rows].copy_(blocks.flatten(-2))


class BlockFloatWeight(Weight):
    """A weight with the tensors of the file while loading; afterwards it has the converted weight, which
    `build` creates."""

    def __init__(self, scheme: BlockFloat, shape: LinearShape, build: Callable[[], Weight]) -> None:
        super().__init__(shape)
        self.build = build
        self.bias = bias_of(shape)
        self.stored = [
            BlockFloatMatrices(scheme, size, shape.size_in, shape.device) for size in shape.sizes_out
        ]
        self.target: Weight | None = None

    def parts(self) -> list[dict[str, Piece]]:
        return with_bias([part.pieces() for part in self.stored], self.bias, self.shape.sizes_out)

    def finish(self) -> None:
        target = self.build()
        for stored, packed, part in zip(self.stored, self.parts(), target.parts(), strict=True):
            stored.move_to(part["weight"].tensor)
            if "bias" in part:
                part["bias"].tensor.copy_(packed["bias"].tensor)
        self.stored, self.bias, self.target = [], None, target
        target.finish()
        self.use_kernels(target)


class BlockFloatExperts(StoredExperts):
    """Experts of a layer with the tensors of the file while loading, afterwards with converted experts, which
    `build` creates."""

    def __init__(self, scheme: BlockFloat, shape: ExpertShape, build: Callable[[], StoredExperts]) -> None:
        super().__init__(shape)
        self.build = build
        self.stored = {
            name: BlockFloatMatrices(scheme, outputs.size, inputs.size, shape.device, shape.experts)
            for name, (outputs, inputs) in shape.matrices().items()
        }
        self.target: StoredExperts | None = None

    def parts(self) -> dict[str, dict[str, Piece]]:
        return {name: stored.pieces() for name, stored in self.stored.items()}

    def finish(self) -> None:
        target = self.build()
        for name, stored in self.stored.items():
            stored.move_to(target.parts()[name]["weight"].tensor)
        for name, piece in self.bias_parts().items():
            target.bias_parts()[name].tensor.copy_(piece.tensor)
        self.stored, self.target = {}, target
        self.gate_up_bias = self.down_bias = None
        target.finish()
        self.mix, self.adapts = target.mix, target.adapts

    def by_expert(self) -> list[list[Tensor]]:
        assert self.target is not None
        return self.target.by_expert()
