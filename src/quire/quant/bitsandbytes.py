"""Weights of bitsandbytes: 4-bit indices into a table of values, and 8-bit integers."""

import functools
import json
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.checkpoint.quant.schemes import BitsAndBytes, Int8
from quire.errors import ConfigError
from quire.kernels.reference.nf4 import BLOCK, Halves, in_halves, scaled
from quire.quant.dequantized import dequantize_experts, dequantize_weight, use_plain, use_plain_experts
from quire.quant.experts import ExpertShape, StoredExperts, are_fused
from quire.quant.format import Format
from quire.quant.int8 import Int8Experts, Int8Weight
from quire.quant.sharding import Runs, Shard, check_units
from quire.quant.weight import (
    LinearShape,
    Piece,
    TextTensor,
    Weight,
    bias_of,
    empty_parameter,
    frozen_parameter,
    stored_indices,
    with_bias,
)

_SCALES = "SCB"
"""Name of the scales of 8-bit weights: the absolute maximum of each output, which is stored as 127."""
_LARGEST = 127.0
_INT8 = Int8("channel", "none")
_NESTED = 256
"""Number of scales that share a second-level scale, if scales are quantized as well."""
_TEXT_BYTES = 1024
"""Buffer size for `quant_state`, the settings of a weight as JSON text."""


class BitsAndBytesFormat:
    """Builds bitsandbytes weights. 4-bit weights stay packed on a GPU, 8-bit weights on every device."""

    def __init__(self, scheme: BitsAndBytes, plain: Format) -> None:
        self.scheme = scheme
        self.plain = plain

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        plain = functools.partial(self.plain.linear, parts, shape)
        if self.scheme.kind == "int8":
            return Int8Weight(shape, plain, _INT8, scale=_SCALES, divisor=_LARGEST)
        for part, runs in zip(parts, shape.outputs, strict=False):
            _check(part, runs, shape.input_shard)
        return Table4(shape, plain, self.scheme)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        plain = functools.partial(self.plain.experts, parts, shape)
        if are_fused(parts):
            raise ConfigError(
                f"{parts[0]} has all experts in one tensor, which bitsandbytes does not quantize; use a "
                "checkpoint that has them one by one, or the unquantized one"
            )
        if self.scheme.kind == "int8":
            return Int8Experts(shape, plain, _INT8, scale=_SCALES, divisor=_LARGEST)
        if shape.inner is not None:
            _check(parts[0], (shape.inner,), Shard(shape.hidden))
            _check(parts[-1], (Shard(shape.hidden),), shape.inner)
        return TableExperts(shape, plain, self.scheme)


class Packed4(nn.Module):
    """`num` stored matrices of 4-bit codes with their scales, or this device's shard of their rows or
    columns. A byte contains two codes, row by row."""

    def __init__(
        self, num: int, rows: Runs, columns: Shard, scheme: BitsAndBytes, device: torch.device
    ) -> None:
        super().__init__()
        self.rows, self.columns, self.scheme = rows, columns, scheme
        self.size = sum(run.size for run in rows), columns.size
        num_values = math.prod(self.size)
        self.is_shard = not (columns.is_whole and all(run.is_whole for run in rows))
        """Whether this device has only a shard. If so, no block is cut, and rows consist of whole blocks."""
        make = functools.partial(empty_parameter, num, device=device)
        self.codes = make(num_values // 2, 1, dtype=torch.uint8)
        self.absmax = make(-(-num_values // BLOCK), dtype=torch.uint8 if scheme.nested else torch.float32)
        self.table = make(16, dtype=torch.float32)
        self.state = make(_TEXT_BYTES, dtype=torch.uint8).zero_()
        all_blocks = -(-sum(run.all for run in rows) * columns.all // BLOCK)
        self.nested_absmax = make(-(-all_blocks // _NESTED) if scheme.nested else 0, dtype=torch.float32)
        self.nested_table = make(256 if scheme.nested else 0, dtype=torch.float32)

    def pieces(self) -> dict[str, Piece]:
        """Return the tensors to load, by suffix of their checkpoint names. Second-level scales are not
        sharded."""
        codes, absmax = Piece(self.codes, None), Piece(self.absmax, None)
        if self.is_shard:
            codes, absmax = (
                Piece(tensor.view(len(tensor), self.size[0], -1), 1, 2, per_input=per, is_flat=True)
                for tensor, per in ((self.codes, 2), (self.absmax, BLOCK))
            )
        pieces = {
            "weight": codes,
            "weight.absmax": absmax,
            "weight.quant_map": Piece(self.table, None),
            f"weight.quant_state.bitsandbytes__{self.scheme.kind}": TextTensor(self.state, None),
        }
        if self.scheme.nested:
            pieces["weight.nested_absmax"] = Piece(self.nested_absmax, None)
            pieces["weight.nested_quant_map"] = Piece(self.nested_table, None)
        return pieces

    def code(self, i: int) -> Tensor:
        """Return the codes of matrix `i`, [rows, columns]; the first of two codes is in the high half of a
        byte."""
        packed = self.codes[i, :, 0]
        return torch.stack((packed >> 4, packed & 15), 1).view(self.size)

    def scales(self, i: int) -> Tensor:
        """Return the scales of matrix `i`, one per block."""
        absmax = self.absmax[i]
        if not self.scheme.nested:
            return absmax
        scale = self.nested_absmax[i][self._blocks() // _NESTED]
        return self.nested_table[i][absmax.long()] * scale + self._offset(i)

    def _blocks(self) -> Tensor:
        """Return the indices that the blocks of this shard have in the whole matrix."""
        device = self.codes.device
        if not self.is_shard:
            return torch.arange(self.absmax.shape[1], device=device)
        columns = self.columns.per(BLOCK)
        within = torch.arange(columns.size, device=device) + columns.start
        return (stored_indices(self.rows, device)[:, None] * columns.all + within).flatten()

    def _offset(self, i: int) -> float:
        """Return the offset that bitsandbytes subtracted from all scales of matrix `i` before it quantized
        them."""
        text = bytes(self.state[i].tolist()).rstrip(b"\0")
        return float(json.loads(text).get("nested_offset", 0.0)) if text else 0.0

    def values(self, i: int) -> Tensor:
        """Return the dequantized values of matrix `i`, [rows, columns] in float32."""
        values, rows = self.table[i][self.code(i).long()].flatten(), self.size[0]
        missing = -len(values) % BLOCK
        blocks = torch.cat((values, values.new_zeros(missing))).view(1, -1)
        return scaled(blocks, self.scales(i)[None])[0, : len(values)].view(rows, -1)


class Table4(Weight):
    """A weight of 4-bit codes, NF4 or FP4; dequantized after loading if the device has no kernel."""

    def __init__(self, shape: LinearShape, plain: Callable[[], Weight], scheme: BitsAndBytes) -> None:
        super().__init__(shape)
        self.plain, self.kind = plain, scheme.kind
        self.stored = nn.ModuleList(
            Packed4(1, rows, shape.input_shard, scheme, shape.device) for rows in shape.output_runs
        )
        self.bias = bias_of(shape)
        self.codes: nn.Parameter | None = None
        """None before `repack`; afterwards codes if the GPU kernel supports them, otherwise dequantized
        values."""
        self.scales: nn.Parameter | None = None
        self.table: nn.Parameter | None = None
        self.orders: list[Tensor] | None = None

    def parts(self) -> list[dict[str, Piece]]:
        parts = [
            {suffix: _without_first_axis(piece) for suffix, piece in stored.pieces().items()}
            for stored in self._stored()
        ]
        return with_bias(parts, self.bias, self.shape.sizes_out)

    def reorder(self, orders: list[Tensor]) -> None:
        super().reorder(orders)
        self.orders = orders

    def _stored(self) -> list[Packed4]:
        return [stored for stored in self.stored if isinstance(stored, Packed4)]

    def _reorder_rows(self, parts: list[Tensor]) -> Tensor:
        """Concatenate the parts, with rows in the orders that `reorder` recorded. Rows are reordered only
        after loading, since blocks span rows."""
        orders = self.orders or [torch.arange(len(part)) for part in parts]
        return torch.cat([part[order.to(part.device)] for part, order in zip(parts, orders, strict=True)])

    def repack(self) -> None:
        stored = self._stored()
        on_gpu = self.shape.device.type == "cuda" and self.shape.size_in % (2 * BLOCK) == 0
        if on_gpu and all(torch.equal(part.table, stored[0].table) for part in stored):
            self.codes = frozen_parameter(self._reorder_rows([in_halves(part.code(0)) for part in stored]))
            self.scales = frozen_parameter(
                self._reorder_rows([part.scales(0).view(part.size[0], -1) for part in stored])
            )
            self.table = frozen_parameter(stored[0].table.data[0])
        else:
            values = self._reorder_rows([part.values(0) for part in stored])
            reason = f"{self.kind} has no kernels for this device or width"
            self.codes = dequantize_weight(self.plain, values, reason)
        self.stored = nn.ModuleList()

    def find_kernels(self) -> None:
        assert self.codes is not None
        if self.codes.is_floating_point():
            use_plain(self, self.codes, self.bias)
            return
        from quire.kernels.triton.nf4 import linear

        assert self.scales is not None and self.table is not None
        weight = Halves(self.codes, self.scales, self.table)
        self.product = functools.partial(linear, weight=weight, bias=self.bias)


class TableExperts(StoredExperts):
    """Experts stored as 4-bit codes (NF4 or FP4), dequantized after loading."""

    def __init__(self, shape: ExpertShape, plain: Callable[[], StoredExperts], scheme: BitsAndBytes) -> None:
        super().__init__(shape)
        self.plain, self.kind = plain, scheme.kind
        self.gate_up: nn.Parameter | None = None
        self.down: nn.Parameter | None = None
        self.stored = nn.ModuleDict(
            {
                name: Packed4(shape.experts, (rows,), columns, scheme, shape.device)
                for name, (rows, columns) in shape.matrices().items()
            }
        )

    def parts(self) -> dict[str, dict[str, Piece]]:
        return {name: stored.pieces() for name, stored in self._stored().items()}

    def _stored(self) -> dict[str, Packed4]:
        return {name: stored for name, stored in self.stored.items() if isinstance(stored, Packed4)}

    def repack(self) -> None:
        stored, experts = self._stored(), range(self.shape.experts)
        gate, up, down = (torch.stack([part.values(i) for i in experts]) for part in stored.values())
        self.stored = nn.ModuleDict()
        reason = f"{self.kind} experts have no kernels"
        self.gate_up, self.down = dequantize_experts(self.plain, torch.cat((gate, up), 1), down, reason)

    def find_kernels(self) -> None:
        assert self.gate_up is not None and self.down is not None
        use_plain_experts(self, self.gate_up, self.down)


def _check(name: str, rows: Runs, columns: Shard) -> None:
    """Raise unless a shard consists of whole blocks; a block may span rows."""
    check_units(name, (columns,), BLOCK, "blocks")
    if columns.all % BLOCK and not all(run.is_whole for run in rows):
        raise ConfigError(
            f"{name}: blocks of {BLOCK} span rows of {columns.all} columns, so that no shard of "
            "rows consists of whole blocks; use tensor_parallel_size 1 or another checkpoint"
        )


def _without_first_axis(piece: Piece) -> Piece:
    """Return a piece of the only matrix without the first axis, which is the index of the matrix."""
    outputs, inputs = (None if axis is None else axis - 1 for axis in (piece.outputs, piece.inputs))
    return piece._replace(tensor=piece.tensor[0], outputs=outputs, inputs=inputs)
