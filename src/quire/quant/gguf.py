"""GGUF weights that stay packed: on a GPU, and on a CPU with native kernels."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn

from quire.checkpoint.gguf import GGML_TYPES
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import TYPES, GGUFRows, group_rows, interleaves, pack
from quire.kernels.cpu.linear import LinearProduct, Matrix
from quire.kernels.cpu.moe import CpuExperts
from quire.kernels.triton.gguf_layout import KINDS, TILE, Planes
from quire.kernels.triton.gguf_layout import pack as pack_planes
from quire.logs import get_logger, warn_once
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.format import Format
from quire.quant.sharding import Shard, check_units
from quire.quant.weight import LinearShape, Piece, Weight, bias_of, frozen_parameter, with_bias

logger = get_logger(__name__)

Stored = tuple[str | int, ...]
"""The ggml type of a tensor, and its shape."""
BLOCKS = {name: (columns, num_bytes) for name, columns, num_bytes in GGML_TYPES.values()}
"""Maps a ggml type to (number of values, number of bytes) of a block."""


class GGUFFormat:
    """Builds weights that stay packed, if kernels support the ggml types of all parts; other weights are
    built by `plain`."""

    def __init__(self, stored: Mapping[str, Stored], plain: Format) -> None:
        self.stored = stored
        self.plain = plain

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        stored = self._stored(parts)
        if not _is_supported(stored, 2, shape):
            return self.plain.linear(parts, shape)
        for part, kind in zip(parts, _kinds(stored), strict=False):
            _check(part, kind, shape.inputs)
        weight_class = GGUFWeightOnGPU if shape.device.type == "cuda" else GGUFWeight
        return weight_class(_kinds(stored), shape)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        stored = self._stored(parts)
        inner = shape.intermediate if shape.inner is None else shape.inner.all
        if len(stored) == len(parts) == 2 and stored[0][2:3] == (inner,):  # no gate: `up` is used as the gate
            stored = [stored[0], *stored]
        if len(stored) != 3 or not _is_supported(stored, 3, shape):
            return self.plain.experts(parts, shape)
        gate, up, down = _kinds(stored)
        _check(parts[-1], down, shape.inner)
        if shape.device.type != "cuda":
            return GGUFExperts(_kinds(stored), shape)
        if gate != up or shape.intermediate % TILE or shape.hidden % TILE:
            return self.plain.experts(parts, shape)
        return GGUFExpertsOnGPU(_kinds(stored), shape)

    def _stored(self, parts: tuple[str, ...]) -> list[Stored]:
        """Return the ggml type and shape of each of `parts` that exists in the file."""
        names = [f"{part}.weight" for part in parts]
        return [self.stored[name] for name in names if name in self.stored]


def _kinds(parts: list[Stored]) -> tuple[str, ...]:
    return tuple(str(kind) for kind, *_ in parts)


def _check(part: str, kind: str, inputs: Shard | None) -> None:
    if inputs is not None:
        check_units(part, (inputs,), BLOCKS[kind][0], f"{kind} blocks of a row")


def _per_input(kind: str) -> Fraction:
    """Return the number of values per byte of a ggml type."""
    return Fraction(*BLOCKS[kind])


def _is_supported(parts: list[Stored], num_dims: int, layer: LinearShape | ExpertShape) -> bool:
    device = layer.device
    known = set(KINDS) if device.type == "cuda" else set()
    if native.serves(device, layer.dtype):
        known = set(TYPES)
    if not parts or any(len(shape) != num_dims for _, *shape in parts):
        return False
    missing = [kind for kind in _kinds(parts) if kind not in known]
    for kind in missing:
        if known and BLOCKS[kind][0] > 1:
            warn_once(
                logger, f"Weights of the type {kind} are dequantized: no {device.type} kernel supports them"
            )
    return not missing


def _unfilled(kind: str, *shape: int) -> nn.Parameter:
    """Return a parameter without memory for the stored bytes of matrices of this shape; `GGUFSource.fill`
    lets it point into the mapped file."""
    (block_columns, block_bytes), (*rows, columns) = BLOCKS[kind], shape
    nothing = torch.empty(1, dtype=torch.uint8)
    return frozen_parameter(nothing.expand(*rows, columns // block_columns * block_bytes))


class GGUFWeight(Weight):
    """A GGUF weight: it has the bytes of the file while it is loaded, and then the layout of the kernels."""

    def __init__(self, kinds: tuple[str, ...], shape: LinearShape) -> None:
        super().__init__(shape)
        # A part that is not in the file gets any type: loading will report that it is missing.
        self.kinds = kinds + kinds[-1:] * (len(shape.sizes_out) - len(kinds))
        self.packed = nn.ParameterList(
            _unfilled(kind, size_out, shape.size_in)
            for kind, size_out in zip(self.kinds, shape.sizes_out, strict=True)
        )
        self.bias = bias_of(shape)

    def parts(self) -> list[dict[str, Piece]]:
        parts = [
            {"weight": Piece(packed, 0, 1, per_input=_per_input(kind))}
            for packed, kind in zip(self.packed, self.kinds, strict=True)
        ]
        return with_bias(parts, self.bias, self.shape.sizes_out)

    def reorder(self, orders: list[Tensor]) -> None:
        for part, order in zip(self.parts(), orders, strict=True):
            weight = part["weight"].tensor
            weight.data = weight.data[order]  # the mapped file is read-only
            if "bias" in part:
                bias = part["bias"].tensor
                bias.copy_(bias[order])

    def finish(self) -> None:
        matrices = []
        for kind, parameter in zip(self.kinds, self.packed, strict=True):
            matrices.append(pack(parameter.data, kind, interleaved=interleaves()))
            parameter.data = matrices[-1].data
        self.product = LinearProduct(matrices, self.bias)
        self.rows = partial(GGUFRows(matrices[0]), dtype=self.shape.dtype)


class GGUFWeightOnGPU(GGUFWeight):
    """A GGUF weight in the layout of the GPU kernels (`Planes`). Adjacent parts of the same ggml type are
    merged."""

    def finish(self) -> None:
        from quire.kernels.triton.gguf_launch import gated, rows

        stored = [(kind, parameter.data) for kind, parameter in zip(self.kinds, self.packed, strict=True)]
        self.packed = nn.ParameterList()
        self.planes: list[Planes] = []
        for kind, run in itertools.groupby(stored, key=lambda part: part[0]):
            self.planes.append(pack_planes([part for _, part in run], kind, self.shape.device))
            self.packed.append(frozen_parameter(self.planes[-1].data))
        first, *others = self.planes
        self.product = self._product
        if not others:
            self.rows = partial(rows, planes=first, dtype=self.shape.dtype)
            if self.bias is None and first.rows % (2 * TILE) == 0:
                self.gated = partial(gated, planes=first)

    def _product(self, x: Tensor) -> Tensor:
        from quire.kernels.triton.gguf_launch import linear

        if len(self.planes) == 1:
            return linear(x, self.planes[0], self.bias)
        out = torch.empty(len(x), sum(self.shape.sizes_out), dtype=x.dtype, device=x.device)
        at = 0
        for planes in self.planes:
            span = slice(at, at + planes.rows)
            linear(x, planes, None if self.bias is None else self.bias[span], out[:, span])
            at += planes.rows
        return out


class GGUFExperts(StoredExperts):
    """GGUF experts of a layer; `kinds` are the ggml types of gate, up and down."""

    def __init__(self, kinds: tuple[str, ...], shape: ExpertShape) -> None:
        super().__init__(shape)
        self.kinds = dict(zip(("gate", "up", "down"), kinds, strict=True))
        self.packed = nn.ParameterDict(
            {
                name: _unfilled(self.kinds[name], shape.experts, outputs.size, inputs.size)
                for name, (outputs, inputs) in shape.matrices().items()
            }
        )

    def parts(self) -> dict[str, dict[str, Piece]]:
        return {
            name: {"weight": Piece(self.packed[name], 1, 2, per_input=_per_input(kind))}
            for name, kind in self.kinds.items()
        }

    def copy_up_to_gate(self) -> None:
        self.packed["gate"].data = self.packed["up"].data

    def finish(self) -> None:
        shape, matrices = self.shape, {}
        for name, kind in self.kinds.items():
            parameter = self.packed[name]
            whole = pack(parameter.data.flatten(0, 1), kind, interleaved=interleaves())
            matrices[name] = cut(whole, shape.experts)
            parameter.data = whole.data
        gate_up = list(zip(matrices["gate"], matrices["up"], strict=True))
        self.mix = CpuExperts(gate_up, matrices["down"], shape.activation, *self.biases)


class GGUFExpertsOnGPU(GGUFExperts):
    """GGUF experts in the layout of the GPU kernels (`Planes`); gate and up of an expert are adjacent."""

    adapts = False

    def finish(self) -> None:
        from quire.kernels.triton.gguf_launch import mix

        shape, device = self.shape, self.shape.device
        gate, up, down = (self.packed[name].data for name in ("gate", "up", "down"))
        gate_up = pack_planes([torch.cat((gate, up), 1).flatten(0, 1)], self.kinds["gate"], device)
        last = pack_planes([down.flatten(0, 1)], self.kinds["down"], device)
        self.packed = nn.ParameterDict(
            {"gate_up": frozen_parameter(gate_up.data), "down": frozen_parameter(last.data)}
        )
        biases = dict(zip(("gate_up_bias", "down_bias"), self.biases, strict=False))
        self.mix = partial(mix, gate_up=gate_up, down=last, activation=shape.activation, **biases)

    def by_expert(self) -> list[list[Tensor]]:
        raise ConfigError("experts of a GGUF file cannot move between GPUs: leave enable_eplb out")


def cut(whole: Matrix, num: int) -> list[Matrix]:
    """Split a matrix into `num` matrices of equally many rows.

    If rows are interleaved in groups, no group is cut: the number of rows of one projection is the number of
    columns of another projection, and columns are whole blocks."""
    rows = whole.rows // num
    assert not whole.interleaved or rows % group_rows() == 0
    size = rows * whole.row_bytes
    return [replace(whole, data=whole.data[i * size :], rows=rows) for i in range(num)]
