"""Weights of HQQ: packed codes with a scale and a fractional zero point per group, in the kernels of int4."""

import torch
from torch import Tensor

from quire.checkpoint.quant.schemes import Hqq
from quire.errors import ConfigError
from quire.kernels.reference.int4 import Int4Codes
from quire.quant.experts import ExpertShape, StoredExperts, are_fused
from quire.quant.format import Format
from quire.quant.int4 import GROUPS, Int4Experts, Int4Linear
from quire.quant.sharding import Runs, Shard, check_units
from quire.quant.weight import LinearShape, Piece, Weight, empty_parameter, stored_indices


class HqqFormat:
    """Builds weights of HQQ, which stay packed if groups have consecutive inputs; other weights are
    dequantized."""

    def __init__(self, scheme: Hqq, plain: Format) -> None:
        self.scheme = scheme
        self.plain = plain

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        for name in parts:
            self._check(name, shape.input_shard)
        return Int4Linear(HqqTensors(self.scheme), shape, self.plain)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        if are_fused(parts):
            raise ConfigError(
                f"{parts[0]} has several experts or gate and up in one tensor, which HQQ does not quantize; "
                "use another checkpoint"
            )
        for name, (_, inputs) in shape.matrices().items():
            self._check(f"{parts[0]} ({name})", inputs)
        return Int4Experts(HqqTensors(self.scheme), shape, self.plain)

    def _check(self, name: str, inputs: Shard) -> None:
        if group := _kernel_group(self.scheme, inputs.all):
            check_units(name, (inputs,), group, "groups")


class HqqTensors:
    """The checkpoint tensors of an HQQ weight. A device with a shard of a weight loads all codes of the
    weight, since outputs far apart share a byte."""

    def __init__(self, scheme: Hqq) -> None:
        self.scheme = scheme
        self.label = f"HQQ weights of {scheme.bits} bits, groups of {scheme.group} and axis {scheme.axis}"

    def empty(self, outputs: Runs, inputs: Shard, device: torch.device, *front: int) -> dict[str, Piece]:
        scheme = self.scheme
        groups = sum(run.all for run in outputs) * inputs.all // scheme.group
        rows, columns = (groups, scheme.group) if scheme.axis else (scheme.group, groups)
        dtype = torch.int32 if scheme.bits == 3 else torch.uint8
        words = -(-rows // scheme.fields[scheme.bits])
        of_groups = (groups, 1) if scheme.axis else (1, groups)
        tensors = {
            "W_q": empty_parameter(*front, words, columns, dtype=dtype, device=device),
            "scale": empty_parameter(*front, *of_groups, dtype=torch.float32, device=device),
            "zero": empty_parameter(*front, *of_groups, dtype=torch.float32, device=device),
        }
        return {suffix: Piece(tensor, None) for suffix, tensor in tensors.items()}

    def read(self, stored: dict[str, Tensor], outputs: Runs, inputs: Shard) -> tuple[Int4Codes, None]:
        return _read(self.scheme, stored, outputs, inputs), None


def _kernel_group(scheme: Hqq, inputs: int) -> int:
    """Return the group size that the kernels use, in inputs; 0 if the weights are dequantized."""
    if scheme.axis == 0 or inputs % scheme.group:
        return 0
    if scheme.group == inputs:
        return inputs
    return next((group for group in sorted(GROUPS, reverse=True) if scheme.group % group == 0 < group), 0)


def _read(scheme: Hqq, stored: dict[str, Tensor], outputs: Runs, inputs: Shard) -> Int4Codes:
    """Return the codes of a shard. A stored integer contains codes from equally spaced rows, the first row in
    the highest bits."""
    words, bits = stored["W_q"], scheme.bits
    size, group = (sum(run.all for run in outputs), inputs.all), _kernel_group(scheme, inputs.all)
    shifts = range(bits * (scheme.fields[bits] - 1), -1, -bits)
    rows = torch.cat([(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts])
    rows = rows[: size[0] * size[1] // rows.shape[1]]
    scales, zeros = stored["scale"], stored["zero"]
    if group:  # a group of the file may consist of several groups of the kernels
        scales, zeros = (
            x.view(size[0], -1).repeat_interleave(scheme.group // group, 1) for x in (scales, zeros)
        )
    else:
        group = 1
        scales, zeros = (x.expand_as(rows).reshape(size) for x in (scales, zeros))
    places = stored_indices(outputs, words.device)
    exists, places = places < size[0], places.clamp(max=size[0] - 1)  # padding gets the scale 0
    span = slice(inputs.start, inputs.start + inputs.size)
    groups = span if group == 1 else slice(span.start // group, -(-span.stop // group))
    return Int4Codes(
        rows.view(size)[places, span],
        scales[places, groups] * exists[:, None],
        zeros[places, groups],
        4 if bits <= 4 else 8,
    ).contiguous()
