"""MXFP4: experts of 4-bit floats, packed on a GPU and on a CPU with native kernels."""

import functools

import torch
from torch import Tensor, nn

from quire.checkpoint.quant.schemes import Mxfp4
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import interleaves, pack
from quire.kernels.cpu.linear import Matrix
from quire.kernels.cpu.moe import CpuExperts
from quire.kernels.reference.moe import ExpertWeights, mix
from quire.kernels.reference.mxfp4 import BLOCK, in_halves, unpack
from quire.quant.experts import ExpertShape, StoredExperts, are_fused
from quire.quant.format import Format
from quire.quant.gguf import cut
from quire.quant.sharding import check_units
from quire.quant.weight import LinearShape, Piece, Weight, empty_parameter


class Mxfp4Format:
    """Builds experts that stay packed; other layers are never stored as MXFP4."""

    def __init__(self, scheme: Mxfp4, plain: Format) -> None:
        self.scheme = scheme

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        raise ConfigError(f"{parts[0]}: mxfp4 is for experts; use a checkpoint with other layers unquantized")

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        if not are_fused(parts):
            raise ConfigError(
                f"{parts[0]}: mxfp4 needs all experts of a layer in one tensor, gate and up together;"
                " use the unquantized checkpoint"
            )
        if shape.inner is not None:
            check_units(parts[1], (shape.inner,), BLOCK, "blocks")
        for name, size in (("hidden", shape.hidden), ("intermediate", shape.intermediate)):
            if size % BLOCK:
                raise ConfigError(
                    f"{parts[0]}: mxfp4 needs sizes that are multiples of {BLOCK}, not {name} {size}"
                )
        return Mxfp4Experts(shape)


class Mxfp4Experts(StoredExperts):
    """MXFP4 experts: blocks of 32 values in 16 bytes, and a scale per block."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__(shape)
        self.gate_up, self.gate_up_scales = _unfilled(shape, 2 * shape.intermediate, shape.hidden)
        self.down, self.down_scales = _unfilled(shape, shape.hidden, shape.intermediate)

    def parts(self) -> dict[str, dict[str, Piece]]:
        stored = {"gate_up": (self.gate_up, self.gate_up_scales), "down": (self.down, self.down_scales)}
        return {
            name: {
                "_blocks": Piece(blocks, 1, 2, per_input=BLOCK),
                "_scales": Piece(scales, 1, 2, per_input=BLOCK),
            }
            for name, (blocks, scales) in stored.items()
        }

    def finish(self) -> None:
        activation = self.shape.activation
        for blocks in (*self.gate_up, *self.down):
            blocks.copy_(in_halves(blocks))
        if self.down.is_cuda:
            from quire.kernels.triton.mxfp4 import Mxfp4Weights
            from quire.kernels.triton.mxfp4 import mix as mix_on_gpu

            packed = Mxfp4Weights(
                self.gate_up, self.gate_up_scales, self.down, self.down_scales, *self.biases
            )
            self.mix = functools.partial(mix_on_gpu, experts=packed, activation=activation)
        elif native.serves(self.shape.device, self.shape.dtype):
            gates, downs = (
                self._repack(self.gate_up, self.gate_up_scales),
                self._repack(self.down, self.down_scales),
            )
            self.mix = CpuExperts([[part] for part in gates], downs, activation, *self.biases)
        else:
            self.mix = functools.partial(self._mix_unpacked, activation=activation)
        self.adapts = isinstance(self.mix, CpuExperts)

    def _repack(self, blocks: nn.Parameter, scales: nn.Parameter) -> list[Matrix]:
        """Return the matrices in the layout of the native kernel, and release the loaded tensors."""
        num, rows, *_ = blocks.shape
        stored = torch.cat((scales[..., None], blocks), -1).view(num * rows, -1)
        scales.data = scales.data.new_empty(0)
        whole = pack(stored, "MXFP4", interleaved=interleaves())
        blocks.data = whole.data
        return cut(whole, num)

    def _mix_unpacked(self, x: Tensor, ids: Tensor, weights: Tensor, *, activation: str) -> Tensor:
        """Compute the experts in plain torch, with dequantized weights."""
        gate_up, down = unpack(self.gate_up, self.gate_up_scales), unpack(self.down, self.down_scales)
        experts = ExpertWeights(gate_up.to(x.dtype), down.to(x.dtype), *self.biases)
        return mix(x, ids, weights, experts, activation)


def _unfilled(shape: ExpertShape, rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return empty parameters for the packed blocks and the scales of each expert's matrix [rows,
    columns]."""
    size = shape.experts, rows, columns // BLOCK
    blocks = empty_parameter(*size, BLOCK // 2, dtype=torch.uint8, device=shape.device)
    return blocks, empty_parameter(*size, dtype=torch.uint8, device=shape.device)
